"""The process groups of a world: built beside a running one, put in place of it, and taken away again.

`torch.distributed` and DeepSpeed both keep "the" world in private fields. Building happens in any thread and touches
none of them; `install` and `drop` do, and belong on the main thread between two steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as td
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters import parallel_state
from ds_dynatrain.adapters.communicators import Communicator, Connections, Endpoint, end, go_on, make_communicator
from ds_dynatrain.adapters.device import is_accelerated
from ds_dynatrain.adapters.pair import Pair
from ds_dynatrain.adapters.peers import SAME_AS, peers, tie, tied_peers
from ds_dynatrain.adapters.process_groups import (
    OURS,
    Made,
    is_ours,
    make_fake_group,
    make_group,
    register,
    tear_down,
    unregister,
)
from ds_dynatrain.adapters.watched import GroupStatus, watched
from ds_dynatrain.space import Layout

NOTHING: Mapping[str, tuple[int, ...]] = {}
GROUP_COUNT = 1000
"""Number from which later `new_group` calls are named: equal on members that were in different worlds before."""

Between = tuple[str, tuple[int, ...]]
"""Whom a communicator connects: members in the order of a group, and the kind of a group of the user's (one may be used
from a thread beside all others, and shares with none), or nothing."""


@dataclass(eq=False)
class World:
    """The process groups of one generation, as seen by one of its members.

    `default` is what `torch.distributed` calls WORLD; the others are those of `peers.KINDS`, where `data` is the one
    that ZeRO cuts and reduces over. `transfer` spans the members of this and of the previous world during a switch (it
    may be one of the others). rank: None on a member that leaves with this world; it has `transfer` alone. ties: the
    sets of pipeline stages that share tied weights, each of which has a group in every pipeline. status: of its
    groups, if members come and go; None in a job of fixed size. engine: number of the engine in this process
    whose world it is. has_sequence: whether its model can have a sequence axis, also while that has size 1.
    communicators: what `connect` has made or kept, by members.
    """

    generation: int
    members: tuple[int, ...]
    rank: int | None
    layout: Layout
    ties: tuple[tuple[int, ...], ...] = ()
    status: GroupStatus | None = None
    engine: int = 1
    has_sequence: bool = False
    transfer: td.ProcessGroup | None = None
    transfer_members: tuple[int, ...] = ()
    communicators: dict[Between, Communicator] = field(default_factory=dict)
    _groups: dict[str, td.ProcessGroup] = field(default_factory=dict)
    _ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _stores: dict[str, Store] = field(default_factory=dict)
    _of_user: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The prefix of this world's groups."""
        return f"{OURS}{self.engine}_{self.generation}"

    def group(self, kind: str) -> td.ProcessGroup:
        """The group of a kind; RuntimeError on a member without a rank, and after `drop`."""
        if kind not in self._groups:
            raise RuntimeError(f"generation {self.generation} has no {kind} group on this member: it holds no rank")
        return self._groups[kind]

    def ranks(self, kind: str) -> tuple[int, ...]:
        """The ranks of this world that are in the group of a kind, in its order; RuntimeError as in `group`."""
        self.group(kind)
        return self._ranks[kind]

    def tie(self, stages: tuple[int, ...]) -> td.ProcessGroup:
        """The group of these stages in this rank's pipeline; RuntimeError as in `group`."""
        return self.group("pipe") if len(stages) == self.layout.pipe else self.group(tie(stages))

    @property
    def default(self) -> td.ProcessGroup:
        """All ranks."""
        return self.group("default")

    @property
    def data(self) -> td.ProcessGroup:
        """The ranks that ZeRO cuts and reduces over: data x sequence."""
        return self.group("data")

    @property
    def mpu(self) -> SimpleNamespace | None:
        """What DeepSpeed gets as `mpu` in this world: None where data and expert are the only axes above 1."""
        return parallel_state.mpu_of(self) if parallel_state.is_wide(self.layout) else None

    def hold(self, kind: str, ranks: tuple[int, ...], made: Made, is_of_user: bool = False) -> None:
        """Take a group in that was made for this world."""
        self._ranks[kind] = ranks
        self._of_user |= {kind} if is_of_user else set()
        self._groups[kind], self._stores[kind] = made

    def made(self, kind: str) -> Made:
        """A group that it holds, and the store that it was made over."""
        return self.group(kind), self._stores[kind]

    def between(self, kind: str) -> Between:
        """Whom the group of a kind connects."""
        members = tuple(self.members[rank] for rank in self.ranks(kind))
        return (kind if kind in self._of_user else "", members)

    def lacks(self, previous: World | None) -> bool:
        """Whether `connect` would make a communicator on this member."""
        return any(self._known(kind, previous) is None for kind in self._unconnected())

    def connect(self, seconds: float, previous: World | None = None, stop: Callable[[], None] = go_on) -> Connections:
        """Let its groups serve the accelerator's device; all its ranks call it, while nothing else is under way.

        Communicators of `previous` are kept, in both, where their members stay in their order; which these are all
        members see alike. Nothing on a member without a rank, and where there is no accelerator. seconds: how long it
        waits for the others; stop: called meanwhile, may raise. RuntimeError where that does not come about.
        """
        begin, there, kinds = time.perf_counter(), {**self.communicators}, self._unconnected()
        if not kinds:
            return Connections()
        for kind in kinds:
            group, between, found = self._groups[kind], self.between(kind), self._known(kind, previous)
            if found is None:
                ranks = self._ranks[kind]
                place = Endpoint(str(group.group_name), ranks, ranks.index(self.rank or 0), self._stores[kind])
                found = make_communicator(place, seconds, stop)
            if between not in self.communicators:
                self.communicators[between] = found
                found.users += 1
            found.serve(group)
        new = [each for between, each in self.communicators.items() if between not in there]
        kept = sum(each.users > 1 for each in new)
        return Connections(len(new) - kept, kept, 1e3 * (time.perf_counter() - begin))

    def _unconnected(self) -> list[str]:
        """Kinds of the groups that do not serve the accelerator yet; none where there is none."""
        if self.rank is None or not is_accelerated():
            return []
        alone = {"transfer", *(kind for kind, ranks in self._ranks.items() if len(ranks) == 1)}
        return [kind for kind, group in self._groups.items() if kind not in alone and group.bound_device_id is None]

    def _known(self, kind: str, previous: World | None) -> Communicator | None:
        """The communicator that there is for a group, in this world or in one that may hand it on."""
        handed_on = {} if previous is None or previous.status is not None else previous.communicators
        between = self.between(kind)
        return self.communicators.get(between) or handed_on.get(between)

    def disconnect(self, is_broken: bool) -> Callable[[], None]:
        """Let its communicators go; what ends those that no other world has kept, as all their members have to."""
        gone = [*self.communicators.values()]
        self.communicators.clear()
        for each in gone:
            each.users -= 1
        unused = [each for each in gone if each.users == 0]
        has_failed = self.status is not None and self.status.failure is not None
        return partial(end, unused, is_broken=is_broken or has_failed)

    def give_up(self, kinds: Sequence[str]) -> list[td.ProcessGroup]:
        """Let go of the groups of some kinds, all other references to which are gone."""
        for table in (self._ranks, self._stores):
            for kind in kinds:
                table.pop(kind, None)
        gone = [self._groups.pop(kind) for kind in kinds if kind in self._groups]
        return list({id(group): group for group in gone}.values())

    def retire_transfer(self) -> threading.Thread:
        """Take down a group that was made for the moves alone; see `drop`."""
        self.transfer, self.transfer_members = None, ()
        return tear_down(self.give_up(["transfer"]))

    def register(self) -> None:
        """Make all groups of the world's own known to `torch.distributed`."""
        for kind, group in self._groups.items():
            if kind != "transfer":
                register(group, self._stores[kind], self._ranks[kind])

    @property
    def kinds(self) -> list[str]:
        """Kinds of the groups that it holds."""
        return list(self._groups)


def build_world(
    store: Store,
    generation: int,
    member: int,
    members: Sequence[int],
    previous: Sequence[int],
    seconds: float,
    layout: Layout,
    ties: Sequence[tuple[int, ...]] = (),
    status: GroupStatus | None = None,
    own: Mapping[str, tuple[int, ...]] = NOTHING,
    engine: int = 1,
    has_sequence: bool = False,
    moves_apart: bool = False,
) -> World:
    """The groups of generation `generation` for `member`, which is in `members`, in `previous`, or in both.

    Blocks until every member of both has called it (`seconds` at most for each group); store keys carry the generation
    and are never used again. The groups serve the CPU; `World.connect` does the rest. One of one rank costs no
    connection and no thread. own: groups of the user's that this member is in, kind -> ranks; every member has to name
    them in the same order. engine, has_sequence: see `World`. moves_apart: whether the moves have a group of their
    own in any case, as training runs beside them.
    """
    union = tuple(sorted({*members, *previous}))
    rank = members.index(member) if member in members else None
    world = World(generation, tuple(members), rank, layout, tuple(ties), status, engine, has_sequence)

    def make(kind: str, ranks: tuple[int, ...], place: int) -> Made:
        return _made(store, world, kind, ranks, place, seconds)

    if world.rank is not None:
        _fill(world, world.rank, make)
        _hold_own(world, own, make)
    if set(union) == set(members) and not moves_apart:
        world.transfer, world.transfer_members = world.default, tuple(members)
    else:
        world.hold("transfer", union, make("transfer", union, union.index(member)))
        world.transfer, world.transfer_members = world.group("transfer"), union
    return world


def add_groups(store: Store, world: World, own: Mapping[str, tuple[int, ...]], seconds: float) -> None:
    """More groups of the user's for a world that is installed; all its members call it."""
    _hold_own(world, own, lambda kind, ranks, place: _made(store, world, kind, ranks, place, seconds))
    world.connect(seconds)
    world.register()


def _made(store: Store, world: World, kind: str, ranks: tuple[int, ...], place: int, seconds: float) -> Made:
    name = f"{world.name}_{kind}_{min(ranks)}"
    if len(ranks) == 1 and (kind != "default" or is_accelerated()):
        return make_fake_group(name, 0, 1)
    made = make_group(store, name, place, len(ranks), seconds)
    if kind == "transfer":
        return made
    if world.status is not None:
        return watched(made, world.status)
    return (Pair(made[0]), made[1]) if is_accelerated() else made


def _hold_own(
    world: World, own: Mapping[str, tuple[int, ...]], make: Callable[[str, tuple[int, ...], int], Made]
) -> None:
    for kind, ranks in own.items():
        if world.rank is not None and world.rank in ranks:
            world.hold(kind, ranks, make(kind, ranks, ranks.index(world.rank)), is_of_user=True)


def _fill(world: World, rank: int, make: Callable[[str, tuple[int, ...], int], Made]) -> None:
    """Give `world` its groups, in the one order in which no two members can wait for each other."""
    everyone = tuple(range(world.layout.world_size))
    world.hold("default", everyone, make("default", everyone, rank))
    for kind, ranks in {**peers(world.layout, rank), **tied_peers(world.layout, rank, world.ties)}.items():
        serving = [other for other in SAME_AS.get(kind, ()) if world.ranks(other) == ranks]
        world.hold(kind, ranks, world.made(serving[0]) if serving else make(kind, ranks, ranks.index(rank)))


def stand_in_world(rank: int, layout: Layout, ties: Sequence[tuple[int, ...]] = ()) -> World:
    """A world without peers (torch's `fake` backend), for building an engine on a member that does not train yet."""
    world = World(0, tuple(range(layout.world_size)), rank, layout, tuple(ties))
    _fill(world, rank, lambda kind, ranks, place: make_fake_group(f"{OURS}fake_{kind}", place, len(ranks)))
    return world


def install(world: World) -> None:
    """Make `world` the one that `torch.distributed`, DeepSpeed and the environment variables speak of.

    Also to go back to a world that was installed before and not dropped.
    """
    if world.rank is None:
        raise RuntimeError(f"generation {world.generation} cannot be installed: this member holds no rank in it")
    c10d._update_default_pg(world.default)
    world.register()
    c10d._world.group_count = max(c10d._world.group_count, GROUP_COUNT)
    parallel_state.point_at(world, world.mpu)
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(len(world.members)))


def is_ours_installed() -> bool:
    """Whether `torch.distributed` speaks of a world of ours at present."""
    return is_ours(c10d._get_default_group())


def drop(world: World, is_broken: bool = False) -> threading.Thread:
    """Forget and shut down every group of `world`; harmless for groups that were never installed.

    Communicators of the accelerator's device that another world has kept live on. All ranks of the world drop it: the
    others are shut down together; is_broken: or aborted, as some may lack one that this member has.

    Gloo takes 20 to 40 ms to take a group down, longer if a peer is gone: that happens in the thread that is returned.
    Join it before the process ends.
    """
    world.transfer, world.transfer_members = None, ()
    if world.status is not None:
        world.status.is_closed = True
    gone, disconnected = world.give_up(world.kinds), world.disconnect(is_broken)
    if parallel_state.points_at(gone):
        parallel_state.forget()
    _unregister(gone)
    return tear_down(gone, disconnected)


def _unregister(groups: Iterable[td.ProcessGroup]) -> None:
    """In a frame of its own, so that no name keeps the last of them."""
    for group in groups:
        unregister(group)


@dataclass(frozen=True)
class LaunchWorld:
    """The group that the launcher's processes formed; idle members stand in it."""

    group: Any
    member: int
    size: int

    @staticmethod
    def current() -> LaunchWorld:
        """The present default group, before any world of ours is installed."""
        return LaunchWorld(c10d._get_default_group(), td.get_rank(), td.get_world_size())

    @staticmethod
    def around(made: Made, member: int, size: int) -> LaunchWorld:
        """A group that was made by hand, known to `torch.distributed` from here on."""
        register(*made, range(size))
        return LaunchWorld(made[0], member, size)

    def retire(self) -> threading.Thread:
        """Take down a group of `around`, in which nobody stands any more; see `drop`."""
        unregister(self.group)
        return tear_down([self.group])

    def install(self) -> None:
        """Speak of the launch group again: on a member that trains in no world."""
        c10d._update_default_pg(self.group)
        parallel_state.forget()
        os.environ.update(RANK=str(self.member), WORLD_SIZE=str(self.size))


def launch_store() -> Store:
    """A client of its own of the key-value store that the launch group was formed over."""
    store: Any = c10d._get_default_store()
    own: Store = store.clone()
    return own


@contextmanager
def installed(world: World, launch: LaunchWorld) -> Iterator[None]:
    """`world` inside the block, the launch group after it; `world` is dropped."""
    install(world)
    try:
        yield
    finally:
        launch.install()
        drop(world).join()
