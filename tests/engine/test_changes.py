"""`engine.on_change` in a launch of fixed size, and requests that no boundary comes for."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as td
from torch.utils.data import DataLoader

from ds_dynatrain import Change
from ds_dynatrain.report import logger, read_events
from ds_dynatrain.reshard.pending import Steps
from ds_dynatrain.space import Layout
from tests.engine import jobs
from tests.engine.models import Sequences
from tests.engine.pool import CaseFailed, RankPool
from tests.engine.test_late import injected, settings

Told = list[tuple[int, str, tuple[int, int, int, int], tuple[int, int, int, int]]]
"""(steps, reason, before, after) of each; a place as data, stage, members, rank."""


@contextmanager
def told(engine: Any) -> Iterator[Told]:
    """What a listener of this member hears inside of the block; what it hears is so when it hears it."""
    found: Told = []

    @engine.on_change
    def note(change: Change) -> None:
        now = change.after
        assert (now.layout, now.members, now.rank) == (engine.layout, engine.members, engine.rank)
        assert now.idle == engine.idle and now.generation == (0 if engine.idle else engine.generation)
        assert td.get_world_size() == (4 if engine.idle else len(now.members))
        assert not engine._parts.open_batch.is_dealt
        sides = [
            (each.layout.data, each.layout.zero_stage, len(each.members), each.rank)
            for each in (change.before, change.after)
        ]
        found.append((change.step, change.reason, sides[0], sides[1]))

    assert note.__name__ == "note"
    yield found


def told_case(schedule: jobs.Schedule) -> tuple[Told, list[tuple[int, ...]]]:
    """Train over a schedule; what was told, and the members that the script could see after it."""
    with jobs.job(jobs.config(start=(2, 1))) as made, told(made.engine) as found:
        jobs.train(made, 8, schedule)
    return found, [made.engine.members]


def test_every_member_is_told_where_it_is(pool: RankPool) -> None:
    """The world grows, keeps its members and changes its stage, shrinks; nothing is told of a step without a change."""
    ranks = [found for found, _ in pool.run(told_case, schedule={2: (4, 1), 4: (4, 3), 6: (3, 2)})]
    walk = [(2, 1, 2), (4, 1, 4), (4, 3, 4), (3, 2, 3)]
    for found in ranks:
        assert [step for step, *_ in found] == [2, 4, 6] and {why for _, why, *_ in found} == {"switch"}
        assert [before[:3] for *_, before, _ in found] == walk[:-1] and [after[:3] for *_, after in found] == walk[1:]
    for number, size in enumerate([2, 4, 4, 3]):
        places = [[before[3] for *_, before, _ in found] + [found[-1][3][3]] for found in ranks]
        working = sorted(rank[number] for rank in places if rank[number] >= 0)
        assert working == list(range(size)), (number, places)


def undone_case() -> Told:
    """A late switch from two ranks to four whose second vote is a no, and one that goes through."""
    record = jobs.Record()
    with jobs.job(settings("fp32")) as made, told(made.engine) as found, injected(["failing thread"]):
        engine, asked = made.engine, set[int]()
        while engine.idle or engine.global_steps < 6:
            for batch in made.loader:
                jobs.one_micro_batch(engine, batch, record)
                if not engine.is_discarded and engine.global_steps in (2, 4) and engine.global_steps not in asked:
                    asked.add(engine.global_steps)
                    jobs.ask(engine, (4, 1))
                if engine.global_steps >= 6:
                    break
    return found


@pytest.mark.not_on_device("late switches are refused on a device (docs/gpu.md)")
def test_a_world_that_was_entered_and_left_again(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(undone_case, seconds=120)):
        there, back, again = ((before[0], after[0]) for *_, before, after in found)
        assert (there, back, again) == ((2, 4), (4, 2), (2, 4)), (rank, found)
        assert [why.partition(":")[0] for _, why, *_ in found] == ["switch", "rolled back", "switch"]
        assert "injected" in found[1][1] and [step for step, *_ in found] == [2, 2, 4]


def failing_case() -> None:
    """A listener that raises."""
    with jobs.job(jobs.config(start=(2, 1))) as made:

        @made.engine.on_change
        def fail(change: Change) -> None:
            raise KeyError(f"of the script, on rank {change.after.rank}")

        jobs.train(made, 4, {2: (2, 2)})


def test_an_error_in_a_listener_is_the_script_s(pool: RankPool) -> None:
    with pytest.raises(CaseFailed, match="of the script, on rank 1"):
        pool.run(failing_case)


# ---- requests that no boundary comes for -----------------------------------------------------------------------------


class Heard(logging.Handler):
    """What was said as a warning, or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.said.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """All that this member says in the block."""
    handler = Heard()
    logger.addHandler(handler)
    try:
        yield handler.said
    finally:
        logger.removeHandler(handler)


def without_boundaries_case(folder: Path) -> tuple[list[str], Any, Any]:
    """A loop over a stock loader, which asks for a switch; (what was said, the last event, the one of the request)."""
    config = jobs.config(start=(2, 1))
    config["dynatrain"]["report"] = {"jsonl": str(folder / "events.jsonl")}
    pending = None
    with heard() as said:
        with jobs.job(config) as made:
            engine = made.engine
            if engine.idle:
                next(iter(made.loader))  # waits, until the others have ended
            for batch in DataLoader(Sequences(), batch_size=6):
                if engine.global_steps == 3 and pending is None:
                    pending = engine.switch(data=4, at=6)
                engine.backward(engine(*batch))
                engine.step()
                if engine.global_steps == 8:
                    break
        return said, engine.last_switch, pending and pending.event


def test_a_loop_without_boundaries_is_told_so(pool: RankPool, tmp_path: Path) -> None:
    """Once, after the step in which it was asked; at the end all know that it came to nothing, and one file has it."""
    ranks = pool.run(without_boundaries_case, folder=tmp_path)
    first, *others = [said for said, *_ in ranks]
    warned = [line for line in first if "is pending" in line]
    assert len(warned) == 1 and "next(loader)" in warned[0] and "engine.boundary()" in warned[0]
    assert "data=4 zero_stage=1" in warned[0] and "in 4 optimizer steps" in warned[0]
    assert not any("is pending" in line for said in others for line in said)
    for rank, (_, last, asked) in enumerate(ranks):
        assert last.outcome == "cancelled" and last.generation == 2 and last.target.layout["data"] == 4, rank
        assert asked == (last if rank < 2 else None)
    assert "cancelled: the job ended" in first[-1] and first[-1] == ranks[0][1].line()
    assert [event.outcome for event in read_events(tmp_path / "events.jsonl")] == ["cancelled"]


def with_boundaries_case(how: str) -> list[str]:
    """A request that waits for many boundaries, in a loop that has some."""
    with heard() as said, jobs.job(jobs.config(start=(2, 1))) as made:
        engine, batches = made.engine, iter(DataLoader(Sequences(), batch_size=6))
        if how == "loader":

            def ask(_: jobs.Job) -> None:
                if engine.global_steps == 3:
                    engine.switch(data=4, at=7)

            jobs.train(made, 9, each=ask)
            assert engine.data == 4
            return said
        engine.boundary()
        for number in range(1, 13):  # a boundary for each three steps, once the loop has found its pace
            engine.backward(engine(*next(batches)))
            engine.step()
            if number == 4:
                engine.switch(data=2, zero_stage=2, at=9)
            if number % 3 == 0:
                engine.boundary()
        assert engine.layout == Layout(data=2, zero_stage=2)
    return said


@pytest.mark.parametrize("how", ["loader", "every third step"])
def test_a_loop_with_boundaries_is_not_warned(pool: RankPool, how: str) -> None:
    found = pool.run(with_boundaries_case, how=how)
    assert not [line for said in found for line in said if "pending" in line or "cancelled" in line]


def inside_case(folder: str) -> list[str]:
    """A loop of its own that leaves out one micro-batch and comes to a boundary before each pair of them."""
    block = {"path": folder, "every_steps": 2, "background": False, "on_sigterm": True}
    made = jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=3)
    made["dynatrain"]["fallback"] = block
    with heard() as said, jobs.job(made) as job:
        engine, batches = job.engine, iter(DataLoader(Sequences(), batch_size=3))
        while engine.global_steps < 12:
            engine.boundary()
            for _ in range(1 if engine.micro_steps == 4 else 2):
                engine.backward(engine(*next(batches)))
                engine.step()
            if engine.micro_steps == 9:
                engine.switch(zero_stage=2)
                os.kill(os.getpid(), signal.SIGTERM)
        return said
    return []


def test_boundaries_that_do_nothing_are_told(pool: RankPool, tmp_path: Path) -> None:
    """What waits is named once, with the open window that keeps it waiting."""
    first, second, *_ = pool.run(inside_case, folder=str(tmp_path))
    waiting = [line for line in first if "there was no boundary in" in line]
    assert [line.split(",")[0] for line in waiting] == [
        "a switch to data=2 zero_stage=2 is pending",
        "SIGTERM has come",
        "a fallback checkpoint is due",
    ]
    assert all("an accumulation window is open, 1 of 2 micro-batches" in line for line in waiting), waiting
    assert [line.split(",")[0] for line in second if "no boundary in" in line] == ["SIGTERM has come"]


def test_steps_between_boundaries() -> None:
    steps = Steps()
    assert [steps.past_boundary([]) for _ in range(3)] == [[], [], []]
    assert steps.past_boundary(["a"]) == ["a"] and steps.count == 4
    assert steps.past_boundary(["a", "b"]) == ["b"], "once of each"
    steps.at_boundary("a window is open")
    assert steps.count == 5 and "came to 1" in steps.reason and "a window is open" in steps.reason
    steps.at_boundary()
    found = [steps.past_boundary(["a"]) for _ in range(6)]
    assert found == [[], [], [], [], [], ["a"]], "a loop that comes after five"
    assert "engine.boundary()" in steps.reason
