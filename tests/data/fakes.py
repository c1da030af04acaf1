"""A job without an engine: several members in one process, whose loaders are turned one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ds_dynatrain.data import BatchArithmetic, Cursor, DataSource, EvaluationLoader, Slot, TrainLoader


class Waiting(Exception):  # noqa: N818
    """Stands for a `before_batch` that blocks: the member that would wait is turned again once there is work."""


class Member:
    """One member's view of a `Job`: the `Host` of its loader."""

    def __init__(self, job: Job, member: int) -> None:
        self.job = job
        self.member = member
        self.dealt: list[tuple[Slot, bool]] = []
        self.opened: list[tuple[Slot, ...]] = []
        self.boundaries = 0
        self.takes_part = True
        self.idle = member not in job.world
        self.generation = job.generation

    @property
    def data_rank(self) -> int:
        return self.job.world.index(self.member)

    @property
    def data(self) -> int:
        return len(self.job.world)

    @property
    def batch(self) -> BatchArithmetic:
        return BatchArithmetic(self.job.train_batch_size, self.job.micro_batch_limit, self.data)

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_epoch(self, loader: TrainLoader) -> int | None:
        return loader.source.sampler_epoch if self.takes_part else None

    def begin_evaluation(self, loader: EvaluationLoader) -> bool:
        return self.takes_part

    def before_micro_batch(self) -> None:
        """Nothing fails here."""

    def before_batch(self, loader: TrainLoader) -> None:
        """A pending change takes effect in the first call that any working member makes."""
        self.boundaries += 1
        if not self.idle:
            self.job.change(loader)
        woken = self.idle and self.member in self.job.world
        self.idle = self.member not in self.job.world
        self.generation = self.job.generation
        if self.idle:
            raise Waiting
        if woken:
            loader.load_state_dict(self.job.state)

    def check_order(self, loader: TrainLoader, digest: int) -> None:
        self.job.digests.setdefault((self.generation, loader.cursor), set()).add(digest)

    def deal(self, slot: Slot, last: bool) -> None:
        self.dealt.append((slot, last))

    def note_slots(self, slots: Sequence[Slot]) -> None:
        self.opened.append(tuple(slots))


@dataclass
class Job:
    """The world of the fake members, and the change that waits for the next boundary."""

    world: list[int]
    train_batch_size: int
    micro_batch_limit: int
    generation: int = 0
    pending: list[int] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    digests: dict[tuple[int, Cursor], set[int]] = field(default_factory=dict)
    """Hashes of the order, by world and position, that members compare."""

    def change(self, loader: TrainLoader) -> None:
        if self.pending is not None:
            self.world, self.pending = self.pending, None
            self.state = loader.state_dict()
            self.generation += 1


@dataclass
class Taken:
    """What one member got in one global batch: per micro-batch its slot and the samples in it."""

    member: int
    slots: list[tuple[Slot, list[int]]]


class Team:
    """Members 0 to count-1 with a loader each, over one data set of consecutive integers."""

    def __init__(self, job: Job, source: DataSource, count: int) -> None:
        self.job = job
        self.members = [Member(job, member) for member in range(count)]
        self.loaders = [TrainLoader(source, host) for host in self.members]
        self.passes: list[Iterator[Any]] = [iter(loader) for loader in self.loaders]

    def turn(self) -> list[Taken]:
        """One global batch by all who work; an empty list if the epoch is over on every one of them.

        Who wakes calls `next` after the others have reached the boundary, as an idle member that waits there does.
        """
        before = [member.member for member in self.members if not member.idle]
        opened = [self._open(index) for index in before]
        if opened.count(None):
            if opened != [None] * len(before):
                raise AssertionError(f"the epoch ended on some of members {before} only: {opened}")
            return []
        opened += [self._open(index) for index in self.job.world if index not in before]
        return [self._finish(taken) for taken in opened if taken is not None and taken.slots]

    def _open(self, index: int) -> Taken | None:
        """The first micro-batch of a global batch: no slots if the member waits, None if the epoch is over for it."""
        try:
            samples = next(self.passes[index])
        except StopIteration:
            self.passes[index] = iter(self.loaders[index])
            return None
        except Waiting:
            return Taken(index, [])
        return Taken(index, [(self.members[index].dealt[-1][0], samples)])

    def _finish(self, taken: Taken) -> Taken:
        """The rest of the global batch."""
        host = self.members[taken.member]
        count = host.batch.accumulation
        for _ in range(count - 1):
            samples = next(self.passes[taken.member])
            taken.slots.append((host.dealt[-1][0], samples))
        if [last for _, last in host.dealt[-count:]] != [at == count - 1 for at in range(count)]:
            raise AssertionError(f"member {taken.member}: last is wrong: {host.dealt[-count:]}")
        return taken
