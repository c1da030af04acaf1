"""The store fails just when a decision is written: every member learns the outcome, or trains no further."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynatrain.errors import CheckpointError, OutcomeUnknown
from ds_dynatrain.membership.control import Control
from tests.engine import jobs, oracle
from tests.engine.pool import RankPool

DECISIONS = re.compile(r"(record/\d+|.*/record)$")
START: jobs.Sizes = (2, 1)
CHANGED: jobs.Sizes = (2, 2)


def cut(board: Control) -> None:
    """End the connection of one member's board to the store, as a network does."""
    store = board.store
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    found = re.search(r"fd=(\d+)", str(store))
    if found is None:
        raise ValueError(f"no connection in {store}")
    with suppress(OSError), socket.socket(fileno=os.dup(int(found[1]))) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_at_the_decision(forever: bool) -> Iterator[list[str]]:
    """Inside the block this member's connection ends whenever it decides, or waits for a decision.

    forever: and there is no other one.
    """
    decide, wait, keys = Control.decide, Control.wait, list[str]()

    def cut_at(board: Control, key: str) -> None:
        if DECISIONS.match(key) and (forever or not keys):
            keys.append(key)
            cut(board)
            board.timeout_seconds = 0.5 if forever else board.timeout_seconds

    def decides(board: Control, key: str, value: Any) -> Any:
        cut_at(board, key)
        return decide(board, key, value)

    def waits(board: Control, awaited: Mapping[int, str], *arguments: Any, **named: Any) -> dict[int, Any]:
        for key in awaited.values():
            cut_at(board, key)
        return wait(board, awaited, *arguments, **named)

    def nowhere(board: Control) -> None:
        raise torch.distributed.DistNetworkError("there is no store any more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Control, "decide", decides)
        patch.setattr(Control, "wait", waits)
        if forever:
            patch.setattr(Control, "_connect_anew", nowhere)
        yield keys


def switches(made: jobs.Job, folder: Path) -> None:
    jobs.ask(made.engine, CHANGED)
    next(iter(made.loader))


def loads(made: jobs.Job, folder: Path) -> None:
    made.engine.load(folder)


def registers(made: jobs.Job, folder: Path) -> None:
    next(each for each in made.engine.module.parameters() if each.requires_grad).requires_grad_(False)
    if not made.engine.update_param_groups():
        raise ValueError("nothing was registered")


CALLS: dict[str, Callable[[jobs.Job, Path], None]] = {
    "switch": switches,
    "switch through a checkpoint": switches,
    "load": loads,
    "register": registers,
}


def settings(call: str, folder: Path) -> dict[str, Any]:
    made = jobs.config("fp32", START)
    if call == "switch through a checkpoint":
        fallback = {"path": str(folder / "fallback"), "every_steps": 100}
        made["dynatrain"] = {**made["dynatrain"], "safety": "lean", "fallback": fallback}
    return made


def cut_case(call: str, folder: Path, who: tuple[int, ...], forever: bool) -> Any:
    """(whether it was cut, what was raised, whether the state is that from before, what the next batch raises)."""
    with jobs.job(settings(call, folder)) as made:
        engine = made.engine
        if engine.idle:
            return None
        jobs.train(made, 1)
        engine.save(folder / "saved")
        jobs.train(made, 2)
        before, said, after = oracle.gather(engine), "", ""
        if engine.rank not in who:
            CALLS[call](made, folder / "saved")
            keys = []
        else:
            with cut_at_the_decision(forever) as keys:
                try:
                    CALLS[call](made, folder / "saved")
                except OutcomeUnknown as unknown:
                    said = str(unknown)
        if said:
            engine._parts.control._connect_anew()  # for the end of this job
            try:
                next(iter(made.loader))
            except OutcomeUnknown as unknown:
                after = str(unknown)
            return bool(keys), said, engine.layout.zero_stage == START[1] and engine.global_steps == 2, after
        same = oracle.differences(before, oracle.gather(engine)) == []
        steps = engine.global_steps
        jobs.train(made, steps + 2)
        return bool(keys), engine.layout.zero_stage, steps, same, engine.global_steps - steps
    return None


@pytest.mark.parametrize("call", CALLS)
def test_a_cut_connection_is_no_other_outcome(pool: RankPool, tmp_path: Path, call: str) -> None:
    """One member's connection ends at the decision: it asks over another one, and all have committed."""
    first, second = pool.run(cut_case, call=call, folder=tmp_path, who=(1,), forever=False)[:2]
    assert not first[0] and second[0], "the second member was cut"
    assert first[1:] == second[1:]
    assert first[1] == (CHANGED[1] if "switch" in call else START[1])
    assert first[2] == (1 if call == "load" else 2)
    assert first[4] == 2, "training went on"


@pytest.mark.parametrize("call", CALLS)
def test_who_does_not_know_trains_no_further(pool: RankPool, tmp_path: Path, call: str) -> None:
    """The store is gone at the decision: the state is that from before, and the next batch says why there is none."""
    for cut_off, said, is_as_before, after in pool.run(cut_case, call=call, folder=tmp_path, who=(0, 1), forever=True)[
        :2
    ]:
        assert cut_off and "other members may have committed" in said.lower()
        assert is_as_before
        assert after == said


def save_case(folder: Path) -> Any:
    """A save whose member cannot write learns of it like all others, over another connection."""
    with jobs.job(jobs.config("fp32", START)) as made:
        engine = made.engine
        if engine.idle:
            return None
        jobs.train(made, 1)
        if engine.rank == 1:
            with cut_at_the_decision(False) as keys, pytest.MonkeyPatch.context() as patch:
                patch.setattr("ds_dynatrain.engine.checkpoints.saving.write_shares", _full)
                said = _saved(engine, folder)
        else:
            keys, said = [], _saved(engine, folder)
        jobs.train(made, 2)
        return len(keys), said
    return None


def _full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def _saved(engine: Any, folder: Path) -> str:
    try:
        return str(engine.save(folder))
    except CheckpointError as error:
        return str(error)


def test_a_save_that_fails_fails_for_all(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(save_case, folder=tmp_path)[:2]
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1] and "No space left" in first[1] and "nothing was saved" in first[1]
