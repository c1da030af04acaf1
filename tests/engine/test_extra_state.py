"""Further state that is no tensor is one row of the carry: it survives a switch, a checkpoint and a death."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from ds_dynatrain.reshard import carry
from ds_dynatrain.reshard.carry import ExtraState, LoadReason
from tests.engine import jobs, test_from_copies
from tests.engine.axis_walks import Subject, one_step
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.transitions import layout

HELD: dict[str, Any] = {}
"""The state of this process: "steps", which all working members count alike, and "seen", which each has for itself."""


def state(name: str) -> dict[str, Any]:
    return {name: HELD[name]}


@contextmanager
def two_more_rows() -> Iterator[None]:
    """Inside the block the carry has both states, which start anew."""
    HELD.update(steps=0, seen=[])
    rows = [
        ExtraState(
            (name,),
            is_shared,
            LoadReason.START,
            lambda engine, name=name: state(name),
            lambda _, held: HELD.update(held),
        )
        for name, is_shared in (("steps", True), ("seen", False))
    ]
    with patch.object(carry, "STATES", [*carry.STATES, *rows]):
        yield


def count(made: jobs.Job, found: list[Any]) -> None:
    """Note the state that this rank has, after a step, and count the step."""
    found.append((HELD["steps"], list(HELD["seen"])))
    HELD["steps"] += 1
    HELD["seen"] = [*HELD["seen"], made.engine._parts.control.member]


def switching_case(folder: str, loads: bool) -> tuple[list[Any], int, Any]:
    """What this member had after each step of a job, its rank at the end, and what it has then.

    The job switches and saves, or loads what another one has saved.
    """
    found: list[Any] = []
    with two_more_rows(), jobs.job(jobs.config(start=(3, 1) if loads else (2, 1))) as made:
        if loads and not made.engine.idle:
            made.engine.load(folder)
        jobs.train(made, 5 if loads else 4, {} if loads else {2: (3, 2)}, each=partial(count, found=found))
        if not loads and not made.engine.idle:
            made.engine.save(folder)
        return found, made.engine.rank, HELD["seen"]
    return [], -1, None


def test_a_switch_and_a_checkpoint_have_it(pool: RankPool, tmp_path: Any) -> None:
    ranks = pool.run(switching_case, folder=str(tmp_path), loads=False)
    (first, *_), (second, *_), (third, *_), _ = ranks
    assert first == [(0, []), (1, [0]), (2, [0, 0]), (3, [0, 0, 0])]
    assert second == [(0, []), (1, [1]), (2, [1, 1]), (3, [1, 1, 1])]
    assert third == [(2, [0, 0]), (3, [0, 0, 2])], "it begins with that of rank 0"
    saved = {rank: seen for _, rank, seen in ranks if rank >= 0}
    for found, rank, _ in pool.run(switching_case, folder=str(tmp_path), loads=True)[:3]:
        assert found == [(4, saved[rank])], "each place goes on with its own"


def counted(step: Any, engine: Any, batch: Any) -> float:
    loss: float = step(engine, batch)
    HELD["steps"] += 1
    return loss


def counting(find: Any) -> Subject:
    subject = find()
    return replace(subject, step=partial(counted, subject.step or one_step))


def death_case(**arguments: Any) -> tuple[Any, int]:
    """Copies are taken after some steps, one rank dies some steps later, and from the copies there are some steps."""
    with two_more_rows():
        found = test_from_copies.case(partial(counting, SUBJECTS["module"]), **arguments)
        return found, HELD["steps"]


def test_members_that_go_on_from_copies_have_it(pool: RankPool) -> None:
    layouts = {"at": layout("d3z1"), "target": layout("d3z1")}
    ranks = pool.run(death_case, dtype="fp32", **layouts, dead=1, seconds=120)
    steps = test_from_copies.STEPS + test_from_copies.MORE
    assert [held for (_, after), held in ranks if after is not None] == [steps] * 3, "one of them had made none"
