"""Global batches as objects: the same micro-batches as those of `next`, drawn at once."""

from __future__ import annotations

from typing import Any

import pytest

from ds_dynatrain.data import Cursor, DataSource, MicroBatch, TrainLoader
from ds_dynatrain.errors import DataError
from tests.data.fakes import Job, Member


def numbers(samples: list[int]) -> list[int]:
    return samples


def make(member: int = 0, world: int = 3, batch: int = 8, limit: int = 2) -> tuple[TrainLoader, Member]:
    source = DataSource.build(list(range(20)), collate_fn=numbers, num_workers=0, shuffle=False)
    host = Member(Job(list(range(world)), batch, limit), member)
    return TrainLoader(source, host), host


@pytest.mark.parametrize("member", range(3))
def test_they_hold_what_next_gives(member: int) -> None:
    (one_by_one, host), (at_once, other) = make(member), make(member)
    singles = [(batch, host.dealt[-1][0], host.dealt[-1][1]) for batch in one_by_one]
    windows = list(at_once.windows())
    assert [(one.data, one.slot, one.is_last) for window in windows for one in window] == singles
    assert len(at_once.windows()) == len(windows) == 3
    assert other.dealt == [] and other.opened == [tuple(one.slot for one in window) for window in windows]
    assert at_once.cursor == one_by_one.cursor == Cursor(1, 0)


def test_a_borrowed_one_counts_nothing() -> None:
    loader, _ = make(member=2, world=3, batch=4, limit=1)
    *_, last = loader.windows()
    assert [(one.samples, one.weight, one.is_borrowed) for one in last] == [(1, 1.5, False), (0, 0.0, True)]


def test_a_global_batch_is_drawn_in_one_way() -> None:
    loader, _ = make()
    turning = iter(loader)
    next(turning)
    with pytest.raises(DataError, match=r"1 micro-batches of global batch 0 were dealt one by one"):
        turning.next_window()
    next(turning)
    assert [one.data for one in turning.next_window()] == [[8, 11], [14]]


class Losing(Member):
    """The world is formed anew before the second micro-batch of the first global batch: it begins again on 2 ranks."""

    loader: Any = None
    asked = 0

    def before_micro_batch(self) -> None:
        self.asked += 1
        if self.asked == 2:
            self.job.world = [0, 1]
            self.generation = self.job.generation = 1
            self.loader.load_state_dict({**self.loader.state_dict(), "begun": True})


def test_a_world_that_is_lost_while_one_is_drawn() -> None:
    source = DataSource.build(list(range(20)), collate_fn=numbers, num_workers=0, shuffle=False)
    host = Losing(Job([0, 1, 2], 8, 2), 0)
    host.loader = TrainLoader(source, host)
    window, *others = host.loader.windows()
    assert [one.data for one in window] == [[0, 2], [4, 6]] and len(others) == 2
    assert {one.generation for one in window} == {1}


def test_what_it_says_is_plain() -> None:
    loader, _ = make()
    window = next(iter(loader.windows()))
    assert isinstance(window, tuple) and all(isinstance(one, MicroBatch) for one in window)
    assert [one.is_last for one in window] == [False, True]
