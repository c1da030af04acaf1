"""Streams, and samplers that draw from a generator: every rank reads the same, and trains its own part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from ds_dynatrain.data import Cursor, DataSource, TrainLoader
from ds_dynatrain.data.stream import SampleStream
from ds_dynatrain.errors import DataError
from tests.data.fakes import Job, Member, Team
from tests.data.test_changes import check, numbers, worlds


class Numbers(IterableDataset[int]):
    """The numbers from 100 x epoch up."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.reads = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.reads += 1
            yield 100 * self.epoch + number


class Piped:
    """A WebLoader of webdataset."""

    pipeline = (DataLoader(Numbers(8)),)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline[0])


class Seekable(Numbers):
    """A stream that can begin anywhere."""

    def iter_from(self, number: int) -> Iterator[int]:
        for each in range(number, self.length):
            self.reads += 1
            yield 100 * self.epoch + each


def team_of(streams: list[Any], batch: int = 8, limit: int = 2, world: tuple[int, ...] = (0, 1)) -> Team:
    """Members with a stream of their own each, as processes have."""
    job = Job([*world], batch, limit)
    sources = [DataSource.build(each, collate_fn=numbers) for each in streams]
    team = Team(job, sources[0], len(streams))
    team.loaders = [TrainLoader(source, host) for source, host in zip(sources, team.members, strict=True)]
    team.passes = [iter(loader) for loader in team.loaders]
    return team


@pytest.mark.parametrize("kind", [Numbers, Seekable])
@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 9),
    limit=st.integers(1, 3),
    changes=st.dictionaries(st.integers(0, 9), worlds),
)
def test_each_sample_once_in_every_world(
    kind: type[Numbers], length: int, batch: int, limit: int, changes: dict[int, list[int]]
) -> None:
    team = team_of([kind(length) for _ in range(4)], batch, limit)
    for epoch in range(2):
        for step, start in enumerate(range(0, length, batch)):
            team.job.pending = changes.get(step + epoch)
            check(team.turn(), [100 * epoch + number for number in range(start, min(start + batch, length))])
        team.job.pending = None
        assert team.turn() == []
    assert all(len(found) == 1 for found in team.job.digests.values()), "all members compare the same samples"


def test_a_member_that_joins_reads_only_what_follows_if_the_stream_can_begin_there() -> None:
    reads = {}
    for kind in (Numbers, Seekable):
        streams = [kind(64) for _ in range(3)]
        team = team_of(streams)
        for step in range(8):
            team.job.pending = [0, 1, 2] if step == 5 else None
            check(team.turn(), [*range(8 * step, 8 * step + 8)])
        reads[kind] = [stream.reads for stream in streams]
    assert reads == {Numbers: [64, 64, 64], Seekable: [64, 64, 32]}


@pytest.mark.parametrize("kind", [Numbers, Seekable])
def test_a_position_continues_in_a_new_process(kind: type[Numbers]) -> None:
    loader, other = (
        TrainLoader(DataSource.build(kind(30), collate_fn=numbers), Member(Job([0], 4, 4), 0)) for _ in "ab"
    )
    epoch = list(loader)
    assert epoch[-1] == [28, 29] and loader.cursor == Cursor(1, 0)
    turning = iter(loader)
    assert [next(turning) for _ in range(3)][-1] == [108, 109, 110, 111]
    saved = json.loads(json.dumps(loader.state_dict()))
    rest = list(turning)
    assert rest[0] == [112, 113, 114, 115]
    other.load_state_dict(saved)
    assert list(other) == rest and list(other) == list(loader)


def test_a_discarded_batch_is_read_again_without_reading_the_stream_again() -> None:
    stream = Numbers(40)
    loader = TrainLoader(DataSource.build(stream, collate_fn=numbers), Member(Job([0], 4, 2), 0))
    turning = iter(loader)
    assert [next(turning) for _ in range(4)][-1] == [6, 7]
    start = loader.state_dict()
    assert [next(turning), next(turning)] == [[8, 9], [10, 11]]
    loader.load_state_dict(start)
    assert [next(turning), next(turning)] == [[8, 9], [10, 11]] and stream.reads == 12


def test_a_stream_that_has_changed() -> None:
    class Other(Numbers):
        def __iter__(self) -> Iterator[int]:
            return (number + (number == 7) for number in range(self.length))

    before, after = (
        TrainLoader(DataSource.build(each), Member(Job([0], 4, 4), 0)) for each in (Numbers(40), Other(40))
    )
    turning = iter(before)
    next(turning), next(turning)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    with pytest.raises(DataError, match=r"has other samples before global batch 2 of epoch 0 than those that were"):
        next(iter(after))


def test_a_world_that_is_lost_while_members_compare() -> None:
    """The batch is dealt in the world that follows."""
    host = Member(Job([0, 1], 4, 2), 0)
    loader = TrainLoader(DataSource.build(Numbers(16), collate_fn=numbers), host)
    compare = host.check_order

    def lose(loader: TrainLoader, digest: int) -> None:
        compare(loader, digest)
        if host.generation == 0:
            host.job.world, host.job.generation, host.generation = [0], 1, 1

    host.check_order = lose  # type: ignore[method-assign]
    assert list(loader)[:2] == [[0, 1], [2, 3]] and len(host.job.digests) == 2


def test_a_generation_that_comes_back_is_not_compared_again() -> None:
    """A late switch that is undone: members that took no part in it would not compare a second time."""
    host = Member(Job([0, 1], 4, 2), 0)
    loader = TrainLoader(DataSource.build(Numbers(16), collate_fn=numbers), host)
    turning = iter(loader)
    assert next(turning) == [0, 2]
    for generation in (1, 0):
        host.job.generation = host.generation = generation
        loader.load_state_dict(loader.state_dict())
        assert len(next(turning)) == 2
    assert [at for at, _ in host.job.digests] == [0, 1]


@pytest.mark.parametrize("fails_at", [2, 5])
def test_a_stream_that_fails_once_is_read_again(fails_at: int) -> None:
    class Failing(Numbers):
        has_failed = False

        def __iter__(self) -> Iterator[int]:
            for number in range(self.length):
                if number == fails_at and not self.has_failed:
                    self.has_failed = True
                    raise OSError("the network is gone")
                yield number

    loader = TrainLoader(DataSource.build(Failing(12), collate_fn=numbers), Member(Job([0], 4, 4), 0))
    turning, found = iter(loader), list[list[int]]()
    with pytest.raises(OSError, match="the network is gone"):
        while True:
            found.append(next(turning))
    assert [*found, *turning] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_drop_last_and_a_length() -> None:
    loader = TrainLoader(
        DataSource.build(DataLoader(Numbers(10), 3, drop_last=True), collate_fn=numbers), Member(Job([0], 4, 4), 0)
    )
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for what in (loader, loader.windows(), loader.sampler):
        with pytest.raises(TypeError, match="a stream has no length"):
            len(what)


def test_a_stream_with_fewer_samples_than_before() -> None:
    long, short = (TrainLoader(DataSource.build(Numbers(each)), Member(Job([0], 4, 4), 0)) for each in (40, 9))
    turning = iter(long)
    for _ in range(5):
        next(turning)
    short.load_state_dict(long.state_dict())
    with pytest.raises(
        DataError, match=r"has no more than 16 samples, and global batch 5 of epoch 0 begins at sample 20"
    ):
        next(iter(short))


@pytest.mark.parametrize(
    ("data", "arguments", "said"),
    [
        (iter([1, 2]), {}, "is an iterator, which can be read only once"),
        (Numbers(8), {"shuffle": True}, "a stream cannot be shuffled here"),
        (Numbers(8), {"seeds_samples": True}, "an exact job reads samples by their index"),
        (DataLoader(Numbers(8), batch_size=None), {}, "each item of its stream is a whole batch; give the stream"),
        (Piped(), {}, "Piped: each item is a whole batch of its own DataLoader; give the stream"),
    ],
)
def test_streams_that_are_refused(data: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        DataSource.build(data, **arguments)


def test_an_empty_stream() -> None:
    with pytest.raises(DataError, match="has no sample"):
        next(iter(TrainLoader(DataSource.build(Numbers(0)), Member(Job([0], 4, 4), 0))))


def test_a_worker_reads_ahead_and_gives_the_same_samples(caplog: pytest.LogCaptureFixture) -> None:
    """A pass, a position in another process, and a pass after that; several workers count as one."""
    epochs = {}
    for workers in (0, 3):
        source = DataSource.build(DataLoader(Numbers(70), num_workers=workers), collate_fn=numbers)
        loader, other = (TrainLoader(source, Member(Job([0], 4, 4), 0)) for _ in "ab")
        first = list(loader)
        turning = iter(loader)
        second = [next(turning) for _ in range(3)]
        other.load_state_dict(loader.state_dict())
        epochs[workers] = [first, second, list(other), source.num_workers]
    assert epochs[3][:3] == epochs[0][:3] and epochs[3][3] == 1
    assert "read by one worker on each rank, in the stream's order, not by 3" in caplog.text


SAMPLES = [
    {"x": torch.arange(3), "y": "a"},
    {"x": torch.arange(3.0), "y": "a"},
    {"x": torch.tensor([0, 1, 3]), "y": "a"},
    {"x": torch.arange(3), "y": "b"},
    {"x": np.arange(3), "y": "a"},
    (1, 2.0, None),
    (1, 2.5, None),
    [1, 2.0, None],
    b"12",
    True,
]


def test_a_digest_tells_samples_apart() -> None:
    digests = {SampleStream([sample]).digest(Cursor(), 1) for sample in SAMPLES}
    assert len(digests) == len(SAMPLES)
    assert digests == {SampleStream([sample]).digest(Cursor(), 1) for sample in SAMPLES}


@pytest.mark.parametrize(
    "sampler",
    [
        lambda generator: WeightedRandomSampler([1.0, 5.0, 1.0, 9.0] * 4, 12, generator=generator),
        lambda generator: SubsetRandomSampler(range(3, 16), generator=generator),
    ],
)
def test_a_sampler_with_a_generator(sampler: Any) -> None:
    """Its order of epoch k is that of a generator seeded by its seed + k, in every world and after a break."""
    wanted = [list(sampler(torch.Generator().manual_seed(7 + epoch))) for epoch in range(3)]
    assert wanted[0] != wanted[1]
    source = DataSource.build(
        DataLoader(range(16), 2, sampler=sampler(torch.Generator().manual_seed(7))),
        collate_fn=numbers,
        num_workers=0,  # type: ignore[arg-type]
    )
    team = Team(Job([0, 1], 4, 2), source, 3)
    for epoch in wanted:
        for start in range(0, len(epoch), 4):
            team.job.pending = [2, 0, 1] if start == 4 else [0, 1]
            check(team.turn(), epoch[start : start + 4])
        assert team.turn() == []
    assert all(len(found) == 1 for found in team.job.digests.values()) and team.job.digests
    again = DataSource.build(DataLoader(range(16), 2, sampler=source.drawn), collate_fn=numbers, num_workers=0)  # type: ignore[arg-type]
    assert next(again.order(4).batches(0, 0)).tolist() == wanted[0][:4], "another loader begins as the first did"


def test_a_sampler_without_a_seed() -> None:
    with pytest.raises(DataError, match=r"draws from torch's default generator; give it generator=torch.Generator"):
        DataSource.build(DataLoader(range(16), 2, sampler=WeightedRandomSampler([1.0] * 16, 16)))  # type: ignore[arg-type]
