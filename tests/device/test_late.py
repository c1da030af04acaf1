"""Late switches on the device: what follows the pause is read, or goes by the host, and never by collectives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from ds_dynatrain.adapters.groups.device import compute_device, training_bytes
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.reshard.switch import Transaction
from ds_dynatrain.reshard.targets import needs
from ds_dynatrain.space import Layout
from tests.device import lab
from tests.device.test_batched import Count, counted
from tests.device.test_pulling import unable
from tests.engine import jobs, oracle
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(4, 1), (3, 3), (2, 2)]


@dataclass
class Seen:
    """state: at the end, if this member trains there. all, late: what went each way, and of it beside training.
    streams: of the device, on which that was queued.
    """

    state: Any
    all: Count
    late: Count
    streams: set[int]
    events: list[Any]


@contextmanager
def watched(count: Count) -> Iterator[tuple[Count, set[int]]]:
    """What is moved in the threads of late switches, and the streams on which they queue."""
    late, streams, execute = Count(), set[int](), Transaction._execute

    def executing(self: Any, *given: Any) -> Any:
        is_late = threading.current_thread().name.startswith("dynatrain-late")
        before = Count(**vars(count))
        stats = execute(self, *given)
        if is_late:
            streams.add(lab.current_stream().stream_id)
            for name, value in vars(count).items():
                setattr(late, name, getattr(late, name) + value - getattr(before, name))
        return stats

    with patch.object(Transaction, "_execute", executing):
        yield late, streams


def case(way: str, late: bool, cannot: int | None = None) -> Seen:
    settings = jobs.config("bf16", (2, 1))
    settings["dynatrain"] |= {"transport": way, "late": late}
    state, events = None, list[Any]()
    with counted() as count, watched(count) as (beside, streams), unable(cannot), jobs.job(settings) as made:
        made.engine.on_switch(events.append)
        jobs.train(made, 2 * len(PATH) + 2, {2 * number: sizes for number, sizes in enumerate(PATH, 1)})
        state = oracle.gather(made.engine)
    return Seen(state, count, beside, streams, events)


def total(counts: list[Count], name: str) -> int:
    return sum(getattr(count, name) for count in counts)


@pytest.mark.parametrize(
    ("way", "cannot", "ways"),
    [pytest.param("ipc", None, {"read"}, marks=pytest.mark.full), ("auto", 1, {"read", "sent"})],
)
def test_states_follow_beside_training(lab_pool: RankPool, way: str, cannot: int | None, ways: set[str]) -> None:
    """Where one member cannot be read, what the pause moves goes in batches, and the rest by the host."""
    expected = lab_pool.run(case, way="gloo", late=False)
    found = lab_pool.run(case, way=way, late=True, cannot=cannot)
    assert oracle.differences(found[0].state, expected[0].state) == []
    assert [event.certificate for event in found[0].events] == [event.certificate for event in expected[0].events]
    assert all(event.late_ms > 0 for event in found[0].events)
    late = [rank.late for rank in found]
    assert {name for name in ("read", "sent", "batched") if total(late, name)} == ways
    assert (total([rank.all for rank in found], "batched") > 0) == (cannot is not None)
    default = lab.default_stream().stream_id
    assert all(rank.streams and default not in rank.streams for rank in found)


def crowded() -> tuple[int, str, str]:
    """What training takes here, and what a switch and a late one are refused with where just the new state fits."""
    with jobs.job(jobs.config("bf16", (4, 1))) as made:
        jobs.train(made, 2)
        engine = made.engine._parts
        target, member = Layout(data=4, zero_stage=2), engine.control.member
        free = needs(engine, target, engine.members, engine.candidates.nodes)[member, compute_device().type]
        said = []
        with patch("ds_dynatrain.reshard.feasible.free_bytes", lambda: free):
            for late in (False, True):
                try:
                    engine.targets.assignment(target, late=late)
                    said.append("")
                except SwitchRefused as refusal:
                    said.append(refusal.reason)
    return training_bytes(), said[0], said[1]


def test_both_sides_and_training_have_to_fit(lab_pool: RankPool) -> None:
    for taken, plain, late in lab_pool.run(crowded):
        assert taken > 0 and not plain and "with training beside it" in late
