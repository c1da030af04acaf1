"""The ten faults of a switch, in one through a checkpoint: each is found out, and its members take the source back from
that checkpoint, in the same processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.reshard.restoration import Restoration
from tests.engine import faults, jobs
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool
from tests.engine.test_faults import APART, CHANGES, FIRST_AT, frozen, snapshot

DIVERGED = "diverged replica"
DAMAGED = r"not what was saved"
REASONS = dict.fromkeys(faults.REASONS, DAMAGED) | {
    "lost step counter": r"scalars: not as saved",
    "changed learning rate": r"groups: not as saved",
    "random stream reset": r"the random streams are not those",
    DIVERGED: r"differ",
}
"""Words of the roll-back's reason."""


def stale_moment(restoration: Any) -> None:
    """A moment from the checkpoint of the switch before."""
    present = Path(restoration.where)
    path = present.with_name(_older(present))
    saved = Saved.open(path)
    old = {key: torch.zeros_like(buffer) for key, buffer in restoration.buffers.items()}
    with Reader(saved.path, saved.manifest, 1 << 20) as reader:
        reader.fill(restoration.vps, restoration.goal.layout, restoration.rank, old)
    for key, buffer in restoration.buffers.items():
        if key[0] == "exp_avg":
            buffer.copy_(old[key])


def _older(path: Path) -> str:
    """The tag of the newest checkpoint but this one."""
    others = [saved for saved in path.parent.iterdir() if saved.is_dir() and saved != path and "." not in saved.name]
    return max(others, key=lambda saved: saved.stat().st_mtime).name


def dropped_piece(restoration: Any) -> None:
    """The first part of a moment is not read: it is as it was allocated."""
    buffer = faults.fresh(as_switch(restoration), "exp_avg")
    buffer[: int(torch.nonzero(buffer)[0]) + 8] = 0


def as_switch(restoration: Any) -> Any:
    """What the faults of live switches look at."""
    return SimpleNamespace(
        target=restoration.buffers,
        preparation=SimpleNamespace(kept=set(), vps=restoration.vps),
        proposal=restoration.goal,
        target_rank=restoration.rank,
        engine=restoration.engine,
    )


def corrupted(read: Callable[..., None]) -> Callable[..., None]:
    """The first bytes that come from the disk have a wrong bit."""
    calls = list[int]()

    def pread(self: Reader, name: str, at: int, place: torch.Tensor) -> None:
        read(self, name, at, place)
        if not calls:
            place.view(torch.uint8)[0] ^= 1
        calls.append(1)

    return pread


def act(name: str, after: str, restoration: Any) -> None:
    """Do what is wrong, if it belongs after that method and on this rank."""
    own = {"stale moment": stale_moment, "dropped piece": dropped_piece}
    fault = faults.AFTER.get(name)
    if fault is None:
        if name in own and after == "_read" and restoration.rank == faults.WHERE:
            own[name](restoration)
    elif after == ("_read" if fault.after == "_execute" else "_take"):
        if fault.everywhere or restoration.rank == faults.WHERE:
            fault.act(as_switch(restoration))


@contextmanager
def injected(names: Sequence[str]) -> Iterator[None]:
    """Inside the block the job's first switch fails by the first fault, its second by the second, and so on."""
    by_key = {f"switch/{faults.FIRST_GENERATION + number}/restore": name for number, name in enumerate(names)}

    def followed(method: str) -> Any:
        own = getattr(Restoration, method)

        def wrapped(self: Any, *arguments: Any) -> None:
            name = by_key.get(self.goal.key, "")  # what is read to go back has another key
            if method == "_read" and name == "corrupted message" and self.rank == faults.WHERE:
                with patch.object(Reader, "_pread", corrupted(Reader._pread)):
                    own(self, *arguments)
            else:
                own(self, *arguments)
            act(name, method, self)

        return patch.object(Restoration, method, wrapped)

    with ExitStack() as stack:
        stack.enter_context(followed("_read"))
        stack.enter_context(followed("_take"))
        yield


def case(change: str, names: list[str], folder: Path | None) -> dict[str, Any]:
    """As `test_faults.case`, through checkpoints in a folder; without a folder nothing is asked for."""
    start, target = CHANGES[change]
    at = {FIRST_AT + APART * number: name for number, name in enumerate(names)}
    end = FIRST_AT + APART * len(names)
    result: dict[str, Any] = {"record": jobs.Record(), "events": {}, "snapshots": {}}
    settings = jobs.config("fp32", start)
    if folder is not None:
        settings["dynatrain"] |= {"safety": "lean", "fallback": {"path": str(folder), "keep": 3}}

    def each(made: jobs.Job) -> None:
        engine, step = made.engine, made.engine.global_steps
        if engine.rank == 1 and at.get(step - APART) == DIVERGED:
            frozen(engine)[3] *= 0.5
        result["events"][step] = engine.last_switch
        if at.get(step - 1, DIVERGED) != DIVERGED:
            result["snapshots"][step] = snapshot(engine)
        if engine.rank == 1 and at.get(step) == DIVERGED:
            frozen(engine)[3] *= 2.0

    schedule = dict.fromkeys([*at, end], target) if folder is not None else {}
    with jobs.job(settings, model=small_gpt(dropout=0.1)) as made, injected(names if folder is not None else []):
        try:
            faults.train(made, end + 2, schedule, result["record"], each)
        finally:
            result["last"] = made.engine.last_switch
    return result


@pytest.mark.full
@pytest.mark.parametrize("change", ["2 to 4", "4 to 2"])
def test_ten_faults_end_where_they_began(pool: RankPool, tmp_path: Path, change: str) -> None:
    start, target = (sizes[0] for sizes in CHANGES[change])
    names = sorted(faults.REASONS, key=lambda name: (name != DIVERGED, name == "stale moment"))
    expected = pool.run(case, change=change, names=names, folder=None, seconds=120)
    found = pool.run(case, change=change, names=names, folder=tmp_path / "lean", seconds=200)
    for rank in range(start):
        mine, other = found[rank], expected[rank]
        for number, name in enumerate(names):
            begin = FIRST_AT + APART * number
            event = mine["events"][begin + 1]
            assert event.outcome == "rolled_back", (name, event)
            assert event.generation == faults.FIRST_GENERATION + number, (name, event)
            assert re.search(REASONS[name], event.reason), (name, event.reason)
            for step in range(begin, begin + APART):
                assert mine["record"].losses[step] == other["record"].losses[step], (name, rank, step)
                assert mine["record"].rates[step] == other["record"].rates[step], (name, rank, step)
        assert mine["snapshots"] == other["snapshots"] and len(mine["snapshots"]) == len(names) - 1
    for rank in range(max(start, target)):
        last = found[rank]["last"]
        assert last.outcome == "committed" and last.generation == faults.FIRST_GENERATION + len(names), last.reason
