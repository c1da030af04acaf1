"""The rules of `iter`, positions, random streams, and the evaluation loader."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ds_dynatrain.data import Cursor, DataSource, EvaluationLoader, TrainLoader
from ds_dynatrain.errors import DataError
from tests.data.fakes import Job, Member


def numbers(samples: list[int]) -> list[int]:
    return samples


def make(length: int = 20, batch: int = 4, limit: int = 4, **arguments: Any) -> TrainLoader:
    source = DataSource.build(list(range(length)), collate_fn=numbers, num_workers=0, **arguments)
    return TrainLoader(source, Member(Job([0], batch, limit), 0))


def test_whole_epochs() -> None:
    loader = make(18, limit=2, shuffle=False)
    assert len(loader) == 10 and loader.batch_size == 2 and len(loader.sampler) == 18
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15], [16], [17]]
    assert loader.cursor == Cursor(1, 0)
    assert len(list(loader)) == 10 and loader.cursor == Cursor(2, 0)


def test_a_samplers_epoch_decides_the_order() -> None:
    """As torch's own, pass by pass; a position has it, and wins over what the script has set since."""
    sampler: DistributedSampler[Any] = DistributedSampler(range(20), 1, 0, seed=3)
    loader, other = (
        TrainLoader(DataSource.build(DataLoader(range(20), 4, sampler=each)), Member(Job([0], 4, 4), 0))
        for each in (sampler, DistributedSampler(range(20), 1, 0, seed=3))
    )
    for epoch in (0, 0, 5, 2):
        sampler.set_epoch(epoch)
        assert torch.cat(list(loader)).tolist() == list(sampler)
    sampler.set_epoch(7)
    wanted, turning = list(sampler), iter(loader)
    first = next(turning).tolist()
    sampler.set_epoch(1)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [first, *(batch.tolist() for batch in other)] == [wanted[at : at + 4] for at in range(0, 20, 4)]
    without = TrainLoader(
        DataSource.build(DataLoader(range(20), 4, sampler=sampler), reshuffle=False), Member(Job([0], 4, 4), 0)
    )
    assert torch.cat(list(without)).tolist() == list(DistributedSampler(range(20), 1, 0, seed=3))


def test_an_exhausted_iterator_stays_exhausted() -> None:
    loader = make()
    turning = iter(loader)
    assert len(list(turning)) == 5 and list(turning) == []
    assert loader.cursor == Cursor(1, 0)


def test_a_break_ends_the_pass_and_iter_begins_the_next_epoch() -> None:
    loader = make(shuffle=False)
    for batch in loader:
        if batch[0] == 4:
            assert loader.cursor == Cursor(0, 2)
            break
    assert loader.cursor == Cursor(1, 0)
    assert next(iter(loader)) == [0, 1, 2, 3]


def test_a_window_must_be_dealt_in_full() -> None:
    loader = make(limit=2)
    turning = iter(loader)
    next(turning)
    assert (loader.mid_window, loader.cursor) == (True, Cursor(0, 0))
    with pytest.raises(DataError, match=r"in the middle of global batch 0, epoch 0: 1 of 2 micro-batches"):
        iter(loader)
    next(turning)
    assert (loader.mid_window, loader.cursor) == (False, Cursor(0, 1))


def test_one_iterator_at_a_time() -> None:
    loader = make()
    old = iter(loader)
    iter(loader)
    with pytest.raises(DataError, match="replaced by a later iter"):
        next(old)


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("inside", [True, False])
def test_a_saved_position_goes_on_as_the_first_run_would(steps: int, inside: bool) -> None:
    arguments = {"length": 20, "reshuffle": True}
    loader = make(**arguments)
    turning = iter(loader)
    for _ in range(steps):
        next(turning)
    if not inside:
        del turning
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [*turning] if inside else []
    rest += [*loader]
    resumed = make(**arguments)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    again = [*resumed]
    again += [*resumed] if inside else []
    assert again == rest and resumed.cursor == loader.cursor


def test_a_position_in_the_middle_of_a_window_is_its_start() -> None:
    loader = make(limit=2, shuffle=False)
    turning = iter(loader)
    seen = [next(turning) for _ in range(3)]
    state = loader.state_dict()
    assert seen[-1] == [4, 5] and state["cursor"] == {"epoch": 0, "step": 1}
    loader.load_state_dict(state)
    assert next(turning) == [4, 5], "a live iterator goes back too"
    del turning
    loader.load_state_dict(loader.state_dict())
    assert next(iter(loader)) == [4, 5]


def test_a_resumed_pass_can_be_left_too() -> None:
    loader = make(shuffle=False)
    loader.load_state_dict({**loader.state_dict(), "cursor": {"epoch": 2, "step": 3}, "begun": True})
    assert loader.cursor == Cursor(2, 3)
    assert next(iter(loader)) == [12, 13, 14, 15]
    assert loader.cursor == Cursor(3, 0)
    assert next(iter(loader)) == [0, 1, 2, 3]


def test_a_position_counted_in_another_order_is_refused() -> None:
    state = make(20).state_dict()
    with pytest.raises(DataError, match="length 20 there and 24 here"):
        make(24).load_state_dict(state)
    with pytest.raises(DataError, match="seed 0 there and 1 here"):
        make(20, seed=1).load_state_dict(state)
    beyond = {**state, "cursor": {"epoch": 0, "step": 6}}
    with pytest.raises(DataError, match="behind the end"):
        make(20).load_state_dict(beyond)


def test_a_batch_size_that_changes_is_refused() -> None:
    loader = make()
    loader._host.job.train_batch_size = 5  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="train_batch_size became 5"):
        next(iter(loader))


class Flaky(list[int]):
    """A data set whose sample 6 cannot be read the first time."""

    broken = True

    def __getitem__(self, index: Any) -> Any:
        if index == 6 and self.broken:
            self.broken = False
            raise OSError("disk")
        return super().__getitem__(index)


def test_after_an_error_the_same_batch_is_read_again() -> None:
    source = DataSource.build(Flaky(range(8)), collate_fn=numbers, num_workers=0, shuffle=False)
    host = Member(Job([0], 4, 2), 0)
    turning = iter(TrainLoader(source, host))
    assert [next(turning), next(turning), next(turning)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(OSError, match="disk"):
        next(turning)
    assert next(turning) == [6, 7] and len(host.dealt) == 4


class Noisy(list[int]):
    """A data set that draws from the user's random stream for every sample."""

    def __getitem__(self, index: Any) -> Any:
        return index, torch.rand(()).item()


def test_random_stream_is_that_of_stock_torch() -> None:
    data = Noisy(range(16))
    torch.manual_seed(3)
    sampler = DistributedSampler(data, 1, 0)  # type: ignore[var-annotated, arg-type]
    stock: DataLoader[Any] = DataLoader(data, 4, sampler=sampler, collate_fn=numbers)  # type: ignore[arg-type]
    expected = [*stock, *stock, torch.rand(()).item()]
    torch.manual_seed(3)
    loader = TrainLoader(DataSource.build(data, collate_fn=numbers, num_workers=0), Member(Job([0], 4, 4), 0))
    assert [*loader, *loader, torch.rand(()).item()] == expected


def test_a_change_of_generation_draws_nothing_from_the_users_stream() -> None:
    results = []
    for changes in (False, True):
        torch.manual_seed(3)
        host = Member(Job([0], 4, 4), 0)
        loader = TrainLoader(DataSource.build(Noisy(range(16)), collate_fn=numbers, num_workers=0), host)
        batches = []
        for batch in loader:
            batches.append(batch)
            host.job.pending = [0] if changes else None
        results.append((batches, torch.rand(()).item()))
        assert host.generation == (3 if changes else 0)
    assert results[0] == results[1]


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_resumed_pass_draws_what_the_first_run_would(steps: int) -> None:
    source = DataSource.build(Noisy(range(16)), collate_fn=numbers, num_workers=0)
    first, second = (TrainLoader(source, Member(Job([0], 4, 4), 0)) for _ in range(2))
    turning = iter(first)
    for _ in range(steps):
        next(turning)
    state, stream = first.state_dict(), torch.get_rng_state()
    rest = [*turning, *first, torch.rand(())]
    second.load_state_dict(state)
    torch.set_rng_state(stream)
    assert [*second, *second, torch.rand(())] == rest


def evaluation(world: int, member: int, length: int, batch_size: int | None = None) -> EvaluationLoader:
    source = DataSource.build(list(range(length)), collate_fn=numbers, num_workers=0, shuffle=False)
    return EvaluationLoader(source, Member(Job([*range(world)], 8, 2), member), batch_size)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 8, 9])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_evaluation_reads_each_sample_once_in_equally_many_batches(
    world: int, length: int, batch_size: int | None
) -> None:
    own, counts = [], set()
    for member in range(world):
        loader = evaluation(world, member, length, batch_size)
        batches = []
        for batch in loader:
            batches.append(batch)
            own += batch[: loader.samples]
            assert loader.samples in (0, len(batch)) and batch
        assert len(batches) == len(loader)
        counts.add(len(batches))
    assert sorted(own) == list(range(length)) and len(counts) == 1


def test_evaluation_follows_the_world() -> None:
    loader = evaluation(2, 0, 8)
    assert [*loader] == [[0, 2], [4, 6]]
    job = loader._host.job  # type: ignore[attr-defined]
    job.world = [0, 1, 2, 3]
    assert [*loader] == [[0, 4]] and job.generation == 0


def test_a_member_that_came_late_has_no_batch_where_the_others_are_elsewhere() -> None:
    """Nothing is drawn and no position moves: the next pass is the one that it would have been."""
    loader, other = make(limit=2), make(limit=2)
    host, held_out = loader._host, evaluation(2, 0, 8)
    for one in (loader, other):
        list(one)
    before = torch.get_rng_state(), loader.state_dict()
    host.takes_part = held_out._host.takes_part = False  # type: ignore[attr-defined]
    for _ in range(2):
        assert list(loader) == [] and list(held_out) == []
        assert torch.equal(torch.get_rng_state(), before[0]) and loader.state_dict() == before[1]
    host.takes_part = held_out._host.takes_part = True  # type: ignore[attr-defined]
    assert list(loader) == list(other) and len(list(held_out)) == 2
    for one in (loader, other):
        for _ in one:
            if one.cursor.step == 2 and not one.mid_window:
                break
    host.takes_part = False  # type: ignore[attr-defined]
    assert list(loader) == [] and loader.cursor == other.cursor == Cursor(3, 0)


def test_an_idle_member_cannot_evaluate() -> None:
    with pytest.raises(DataError, match="idle member holds no state"):
        iter(evaluation(2, 5, 8))
