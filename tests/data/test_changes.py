"""The world changes while an epoch runs: every global batch has the samples of a run that never changed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.data import Cursor, DataSource, Slot, TrainLoader
from ds_dynatrain.errors import DataError
from tests.data.fakes import Job, Member, Taken, Team


def numbers(samples: list[int]) -> list[int]:
    return samples


def check(batch: list[Taken], expected: list[int]) -> None:
    """One global batch over all members: its samples once each at their places, weights that sum to the slots."""
    slots = [pair for taken in batch for pair in taken.slots]
    own = dict(pair for slot, samples in slots for pair in zip(slot.positions, samples, strict=True))
    assert [own[position] for position in range(len(expected))] == expected
    assert sum(slot.samples for slot, _ in slots) == len(expected)
    assert sum(slot.weight for slot, _ in slots) == pytest.approx(len(slots))


def test_two_four_three() -> None:
    source = DataSource.build(list(range(70)), collate_fn=numbers, num_workers=0)
    job = Job([0, 1], train_batch_size=8, micro_batch_limit=2)
    team = Team(job, source, 4)
    order = source.order(8)
    worlds = {2: [0, 1, 2, 3], 5: [3, 0, 2], 8: [1, 2, 3]}
    for step in range(order.steps):
        job.pending = worlds.get(step)
        check(team.turn(), next(order.batches(0, step)).tolist())
    assert job.generation == 3 and job.world == [1, 2, 3]
    job.pending = [0, 1]
    boundaries = [member.boundaries for member in team.members]
    assert team.turn() == [] and job.generation == 3, "a change never takes effect in a next() that ends the epoch"
    assert [member.boundaries for member in team.members] == boundaries
    check(team.turn(), next(order.batches(1, 0)).tolist())
    assert job.generation == 4


worlds = st.permutations(range(4)).flatmap(lambda order: st.integers(1, 4).map(lambda size: list(order[:size])))


@settings(deadline=None, max_examples=60)
@given(
    start=worlds,
    history=st.lists(st.tuples(st.integers(0, 3), worlds), max_size=8),
    length=st.integers(1, 40),
    batch=st.integers(1, 12),
    limit=st.integers(1, 5),
    shuffle=st.booleans(),
    reshuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_any_history_of_worlds_trains_the_same_batches(
    start: list[int],
    history: list[tuple[int, list[int]]],
    length: int,
    batch: int,
    limit: int,
    shuffle: bool,
    reshuffle: bool,
    drop_last: bool,
) -> None:
    if drop_last and length < batch:
        drop_last = False
    source = DataSource.build(
        list(range(length)),
        collate_fn=numbers,
        num_workers=0,
        shuffle=shuffle,
        reshuffle=reshuffle,
        drop_last=drop_last,
        seed=length,
    )
    order = source.order(batch)
    team = Team(Job(start, batch, limit), source, 4)
    waits = iter(history)
    wait, target = next(waits, (99, start))
    for epoch in range(2):
        for step in range(order.steps):
            if wait == 0:
                team.job.pending = target
                wait, target = next(waits, (99, start))
            else:
                wait -= 1
            check(team.turn(), next(order.batches(epoch, step)).tolist())
            working = [team.loaders[member] for member in team.job.world]
            assert len({str(loader.state_dict()) for loader in working}) == 1
        assert team.turn() == []


def test_an_idle_member_judges_no_end_and_goes_on_where_the_others_stand() -> None:
    source = DataSource.build(list(range(12)), collate_fn=numbers, num_workers=0, reshuffle=True)
    job = Job([0, 1], train_batch_size=4, micro_batch_limit=4)
    team = Team(job, source, 3)
    order = source.order(4)
    for _ in range(order.steps):
        team.turn()
    job.pending = [0]
    assert team.turn() == []
    for step in range(order.steps):
        check(team.turn(), next(order.batches(1, step)).tolist())
    assert team.turn() == []
    check(team.turn(), next(order.batches(2, 0)).tolist())
    assert team.members[1].idle and team.loaders[1].cursor.epoch == 1
    job.pending = [2, 0, 1]
    check(team.turn(), next(order.batches(2, 1)).tolist())
    assert team.members[2].boundaries == 1, "its first next() went straight to the boundary"
    assert {str(loader.cursor) for loader in team.loaders} == {"Cursor(epoch=2, step=2)"}


class Away(Member):
    """A member whose boundary before step 1 returns much later: in another world, at another rank, in another epoch."""

    def before_batch(self, loader: TrainLoader) -> None:
        if loader.cursor == Cursor(0, 1):
            self.job.world = [5, 6, 0]
            self.generation = self.job.generation = 7
            loader.load_state_dict({**loader.state_dict(), "cursor": {"epoch": 3, "step": 2}})


def test_everything_may_have_changed_when_the_boundary_returns() -> None:
    source = DataSource.build(list(range(12)), collate_fn=numbers, num_workers=0, reshuffle=True)
    job = Job([0], train_batch_size=3, micro_batch_limit=3)
    loader = TrainLoader(source, Away(job, 0))
    order = source.order(3)
    expected = [
        next(order.batches(0, 0)).tolist(),
        next(order.batches(3, 2)).tolist()[2:],
        next(order.batches(3, 3)).tolist()[2:],
    ]
    assert [*loader] == expected
    assert loader.cursor == Cursor(4, 0)


def inside(loader: TrainLoader, epoch: int, step: int) -> dict[str, Any]:
    """A position inside a pass."""
    return {**loader.state_dict(), "cursor": {"epoch": epoch, "step": step}, "begun": True}


class Woken(Member):
    """An idle member that wakes in epoch 3 at its first boundary."""

    step = 0

    def before_batch(self, loader: TrainLoader) -> None:
        if self.idle:
            self.idle = False
            loader.load_state_dict(inside(loader, 3, self.step))


@pytest.mark.parametrize("step", range(5))
def test_an_idle_member_asks_for_work_even_where_its_own_epoch_is_over(step: int) -> None:
    source = DataSource.build(list(range(12)), collate_fn=numbers, num_workers=0, shuffle=False)
    host = Woken(Job([0], train_batch_size=3, micro_batch_limit=3), 0)
    host.idle, host.step = True, step
    loader = TrainLoader(source, host)
    loader.load_state_dict(inside(loader, 0, 4))
    assert [sample for batch in loader for sample in batch] == list(range(3 * step, 12)) and loader.cursor == Cursor(
        4, 0
    )


class Restless(Member):
    """A member whose generation changes without a boundary."""

    def deal(self, slot: Slot, last: bool) -> None:
        self.generation += 1


def test_a_change_in_the_middle_of_a_window_is_refused() -> None:
    source = DataSource.build(list(range(12)), collate_fn=numbers, num_workers=0)
    turning = iter(TrainLoader(source, Restless(Job([0], train_batch_size=4, micro_batch_limit=2), 0)))
    next(turning)
    with pytest.raises(DataError, match="generation 0 became 1 in the middle of a global batch"):
        next(turning)
