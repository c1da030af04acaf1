"""Building a world's process groups while another world runs, and installing and dropping them.

`torch.distributed` and DeepSpeed both keep the current world in private fields. Building may happen in any thread and
does not touch these fields. `install` and `drop` do, so call them on the main thread between two steps. A `LaunchWorld`
is the group to which processes belong before a world of ours exists, and while they are idle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as td
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, ManagedProcessGroup
from ds_dynatrain.adapters.groups.process_groups import (
    OURS,
    is_ours,
    make_fake_group,
    make_group,
    tear_down,
    unregister,
)
from ds_dynatrain.adapters.groups.world import KINDS, SAME_AS, HeldGroup, Ranks, World, peers, tied_peers
from ds_dynatrain.space import Layout

Make = Callable[[str, Ranks, int], HeldGroup]
"""Function (kind of group, ranks of the world in the group, this rank) that returns the group."""
GROUP_COUNT = 1000
"""First number in the names of groups that `new_group` makes later: the same on all members, whatever worlds they were
in before."""


@dataclass(frozen=True)
class WorldSpec:
    """Description of the world for which a member makes groups. The member is in `members`, in `previous`, or in both.

    previous: the members of the previous world.
    ties: see `World`.
    engine: see `World`.
    has_sequence: see `World`.
    own: the ranks of each of the user's groups that contain this member, keyed by kind. Every member must list the
        groups in the same order.
    moves_apart: whether the moves of a switch get a group of their own, because training continues during the moves.
    """

    generation: int
    member: int
    members: Sequence[int]
    previous: Sequence[int]
    layout: Layout
    ties: Sequence[Ranks] = ()
    own: Mapping[str, Ranks] = field(default_factory=dict)
    engine: int = 1
    has_sequence: bool = False
    moves_apart: bool = False

    @property
    def union(self) -> Ranks:
        """Members of either world, in ascending order."""
        return tuple(sorted({*self.members, *self.previous}))

    def world(self, status: GroupStatus | None) -> World:
        """Return a world without any groups yet."""
        rank = self.members.index(self.member) if self.member in self.members else None
        of_engine = self.engine, self.has_sequence
        return World(
            self.generation, tuple(self.members), rank, self.layout, tuple(map(tuple, self.ties)), status, *of_engine
        )


def build_world(
    store: Store,
    spec: WorldSpec,
    seconds: float,
    status: GroupStatus | None = None,
    present: World | None = None,
) -> World:
    """Build the groups of a world for one member.

    Blocks until every member of both worlds has built all of its groups, for at most `seconds` per group. Store keys
    contain the generation and are never used again. The groups serve the CPU; `World.connect` connects them on the
    accelerator. A group of one rank uses no connection and no thread.

    present: the world of `previous`, on a member that trains in it. Groups whose members stay in the same order are
        then reused. Either all members give it or none.
    """
    union, world = spec.union, spec.world(status)
    made = partial(_made, store, world, seconds)

    def make(kind: str, ranks: Ranks, rank: int) -> HeldGroup:
        members = tuple(world.members[each] for each in ranks)
        if present is not None and kind in present.kinds and present.between(kind)[1] == members:
            return present.held(kind)
        return made(kind, ranks, rank)

    try:
        _fill(world, make)
        _hold_own(world, spec.own, make)
        if {*union} == {*spec.members} and not spec.moves_apart and world.held("default").users == 1:
            world.transfer, world.transfer_members = world.default, world.members
        else:  # failed moves leave messages behind in their group
            world.hold("transfer", union, made("transfer", union, spec.member))
            world.transfer, world.transfer_members = world.group("transfer"), union
        world.transfer.barrier().wait(timedelta(seconds=seconds))  # so that no early drop interrupts a build
    except BaseException:
        world.transfer = None
        world.give_up(world.kinds)
        raise
    return world


def add_groups(store: Store, world: World, own: Mapping[str, Ranks], seconds: float) -> None:
    """Add the user's own groups to an installed world. All members of the world must call this."""
    _hold_own(world, own, partial(_made, store, world, seconds))
    world.connect(seconds)
    world.register()


def _made(store: Store, world: World, seconds: float, kind: str, ranks: Ranks, rank: int) -> HeldGroup:
    """Make a group of one kind, of which this process is number `rank`.

    ranks: the ranks of the group; member numbers for the group that moves state in a switch.
    """
    name = f"{world.name}_{kind}_{min(ranks)}"
    if len(ranks) == 1 and (kind != "default" or is_accelerated()):
        return HeldGroup(*make_fake_group(name, 0, 1))
    group, made_over = make_group(store, name, ranks.index(rank), len(ranks), seconds)
    is_bare = world.status is None and kind in KINDS and not is_accelerated()
    if kind != "transfer" and not is_bare:  # pipeline stages send messages in `default` and in the groups of ties
        group = ManagedProcessGroup(group, world.status)
    return HeldGroup(group, made_over)


def _hold_own(world: World, own: Mapping[str, Ranks], make: Make) -> None:
    for kind, ranks in own.items():
        if world.rank is not None and world.rank in ranks:
            world.hold(kind, ranks, make(kind, ranks, world.rank), is_of_user=True)


def _fill(world: World, make: Make) -> None:
    """Give `world` its groups, in a fixed order that avoids deadlocks. Does nothing on a member without a rank."""
    if (rank := world.rank) is None:
        return
    everyone = tuple(range(world.layout.world_size))
    world.hold("default", everyone, make("default", everyone, rank))
    for kind, ranks in {**peers(world.layout, rank), **tied_peers(world.layout, rank, world.ties)}.items():
        serving = [other for other in SAME_AS.get(kind, ()) if world.ranks(other) == ranks]
        world.hold(kind, ranks, world.held(serving[0]) if serving else make(kind, ranks, rank))


def stand_in_world(rank: int, layout: Layout, ties: Sequence[Ranks] = ()) -> World:
    """Return a world without peers (torch's `fake` back-end), in which an idle member builds its engine."""
    world = World(0, tuple(range(layout.world_size)), rank, layout, tuple(ties))

    def make(kind: str, ranks: Ranks, rank: int) -> HeldGroup:
        return HeldGroup(*make_fake_group(f"{OURS}fake_{kind}", ranks.index(rank), len(ranks)))

    _fill(world, make)
    return world


def install(world: World) -> None:
    """Make `torch.distributed`, DeepSpeed and the environment variables refer to `world`.

    Also call this to return to a world that was installed before and has not been dropped.
    """
    if world.rank is None:
        raise RuntimeError(f"generation {world.generation} cannot be installed: this member holds no rank in it")
    c10d._update_default_pg(world.default)
    world.register()
    c10d._world.group_count = max(c10d._world.group_count, GROUP_COUNT)
    _point_at(world)
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(len(world.members)))


def is_ours_installed() -> bool:
    """Return whether the current default group of `torch.distributed` belongs to a world of this package."""
    return is_ours(c10d._get_default_group())


def drop(world: World, is_broken: bool = False) -> threading.Thread:
    """Unregister every group of `world` that no other world holds, and shut these groups down in a thread.

    Returns the thread; join it before the process ends. Communicators that another world has kept stay alive. All ranks
    of the world drop it, so all members of the other communicators shut them down together. The world need not have
    been installed. Gloo takes 20 to 40 ms to shut a group down, and longer if a peer is gone.

    is_broken: whether to abort the communicators instead, because some members may lack one that this member has.
    """
    world.transfer, world.transfer_members = None, ()
    if world.status is not None:
        world.status.is_closed = True
    gone, disconnected = world.give_up(world.kinds), world.disconnect(is_broken)
    if groups._WORLD_GROUP in gone:
        _forget_groups()
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP in gone:
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    for number in range(len(gone)):  # by index: no name here may keep a group alive
        unregister(gone[number])
    return tear_down(gone, disconnected)


_EXPERT_TABLES = (
    ("expert", groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
    ("expert_data", groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
)
"""A map from each kind of group to DeepSpeed's two tables of such groups, whose keys are "ep_size_N".

An engine keeps references to the tables.
"""


def _point_at(world: World) -> None:
    """Set the process groups that DeepSpeed keeps in its modules to the groups of `world`.

    With only data (and expert) axes, the modules then hold what DeepSpeed itself would set without an `mpu`.
    """
    _forget_groups()
    layout, mpu = world.layout, world.mpu
    spans = len(world.ranks("data")) == layout.world_size
    groups._WORLD_GROUP = world.group("data" if spans else "default")
    name = f"ep_size_{layout.expert}"
    for kind, table, ranks in _EXPERT_TABLES:
        table[name] = world.group(kind)
        ranks[name] = list(world.ranks(kind))
    if world.has_sequence or layout.sequence > 1:
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = world.group("sequence")
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = world.group("data")
    if mpu is not None:
        groups.mpu = mpu
        groups._TENSOR_MODEL_PARALLEL_GROUP = world.group("tensor")
        groups._MODEL_PARALLEL_GROUP = world.group("model")
        groups._DATA_PARALLEL_GROUP = world.group("data")


def _forget_groups() -> None:
    """Clear everything that `_point_at` sets, and related fields of DeepSpeed. The tables stay the same objects.

    `parallel_state_sp` is left unchanged, because scripts use it between the calls of several engines; see `drop`.
    """
    for _, *tables in _EXPERT_TABLES:
        for table in tables:
            table.clear()
    groups._WORLD_GROUP = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = groups._MPU_TENSOR_MODEL_PARALLEL_RANK = None
    groups.mpu = groups.mesh_device = None
    groups.expert_tensor_parallel_world_size = 1


@dataclass(frozen=True)
class LaunchWorld:
    """The group that the launcher's processes have formed. Idle members are in it.

    own: the group as a `World`, if this package made it.
    """

    group: Any
    member: int
    size: int
    own: World | None = None

    @staticmethod
    def current() -> LaunchWorld:
        """Return the current default group, with its size. Call this before any world of ours is installed."""
        return LaunchWorld(c10d._get_default_group(), td.get_rank(), td.get_world_size())

    @staticmethod
    def formed(store: Store, name: str, member: int, size: int, seconds: float, status: GroupStatus) -> LaunchWorld:
        """Form a group of the launched processes that survives the loss of members, and register it with
        `torch.distributed`.
        """
        if size == 1 and is_accelerated():  # a group of one serves the CPU and the accelerator
            group, made_over = make_fake_group(name, 0, 1)
        else:
            gloo, made_over = make_group(store, name, member, size, seconds)
            group = ManagedProcessGroup(gloo, status)
        world = World(0, tuple(range(size)), member, Layout(zero_stage=0, data=size), status=status)
        world.hold("default", world.members, HeldGroup(group, made_over))
        world.register()
        return LaunchWorld(group, member, size, world)

    def connect(self, seconds: float, stop: Callable[[], None]) -> None:
        """Connect the launch group on the accelerator as well, for code that uses it before a world exists.

        Works for a group made by `formed`. All processes of the group must call this. Does nothing without an
        accelerator, or in a second call.

        seconds, stop: see `World.connect`.

        Raises RuntimeError if a communicator cannot be made.
        """
        if self.own is not None and self.own.lacks(None):
            self.own.connect(seconds, stop=stop)
            unregister(self.group)  # torch records a group's back-ends when the group is registered
            self.own.register()

    def retire(self) -> threading.Thread:
        """Shut down a launch group that is no longer used, in a thread, and return the thread. All its processes must
        call this.
        """
        unregister(self.group)
        if self.own is None:
            return tear_down([self.group])
        return tear_down(self.own.give_up(["default"]), self.own.disconnect(False))

    def install(self) -> None:
        """Make `torch.distributed` use the launch group again, on a member that trains in no world."""
        c10d._update_default_pg(self.group)
        _forget_groups()
        os.environ.update(RANK=str(self.member), WORLD_SIZE=str(self.size))


def launch_store() -> Store:
    """Return a new client of the key-value store that the launched processes share."""
    store: Any = c10d._get_default_store()
    own: Store = store.clone()
    return own


@contextmanager
def installed(world: World, launch: LaunchWorld) -> Iterator[None]:
    """Context manager that installs `world`, and at the end installs the launch group and drops `world`."""
    install(world)
    try:
        yield
    finally:
        launch.install()
        drop(world).join()
