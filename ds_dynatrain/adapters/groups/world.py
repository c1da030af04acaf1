"""The process groups of one generation, as one member sees them: their kinds, and the ranks that they connect.

Ranks are numbered with the slowest axis first: pipe, data, sequence, tensor (`Layout.rank`). ZeRO's group of a rank
consists of the data x sequence ranks with the same pipe and tensor index. Experts are divided over a whole pipeline
stage, including its tensor ranks: neighbouring ranks share one set of experts, and ranks with equal expert index
(`Layout.expert_place`) hold the same experts. With one expert index and several tensor ranks, DeepSpeed trains no
experts; the expert-data group is then unused, and the same as ZeRO's group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, Store

from ds_dynatrain.adapters.groups.communicators import (
    Communicator,
    Connections,
    Endpoint,
    Stop,
    end,
    go_on,
    make_communicator,
)
from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.process_groups import OURS, register, tear_down
from ds_dynatrain.space import Layout
from ds_dynatrain.space.layout import RANK_ORDER

Ranks = tuple[int, ...]
"""Ranks of a world, or members, in the order of a group."""

VARYING: Mapping[str, tuple[str, ...]] = {
    "data": ("data", "sequence"),
    "data_only": ("data",),
    "sequence": ("sequence",),
    "tensor": ("tensor",),
    "pipe": ("pipe",),
    "model": ("pipe", "tensor"),
}
"""A map from each kind of group to the axes on which its ranks differ.

ZeRO partitions and reduces over `data`. The ranks of a `model` group together hold one whole model.
"""

KINDS = (*VARYING, "expert", "expert_data")
"""Every kind of group except the group of all ranks, in the order in which a world makes them."""

SAME_AS: Mapping[str, tuple[str, ...]] = {
    "data_only": ("data",),
    "model": ("tensor", "pipe"),
    "expert_data": ("data",),
}
"""A map from a kind of group to earlier kinds: if a group of an earlier kind has the same ranks, it serves this kind as
well.

Messages of the two kinds are never in flight at the same time.
"""


def peers(layout: Layout, rank: int) -> dict[str, Ranks]:
    """Return the ranks, in ascending order, of each group that contains `rank`, keyed by the group's kind.

    Raises LayoutError if `rank` is outside the world.
    """
    found = {}
    for kind, varying in VARYING.items():
        places = [layout.coordinate(rank)]
        for axis in RANK_ORDER:
            if axis in varying:
                places = [{**place, axis: index} for place in places for index in range(getattr(layout, axis))]
        found[kind] = tuple(layout.rank(**place) for place in places)
    index, _ = layout.expert_place(rank)
    start = rank - rank % layout.ranks_per_stage
    same = range(start + index, start + layout.ranks_per_stage, layout.expert)
    found["expert"] = tuple(range(rank - index, rank - index + layout.expert))
    found["expert_data"] = tuple(same) if layout.expert > 1 else found["data"]
    return found


def tie(stages: Ranks) -> str:
    """Return the kind (a name) of the group that connects pipeline stages with tied weights."""
    return "tie_" + "_".join(map(str, stages))


def tied_peers(layout: Layout, rank: int, ties: Iterable[Ranks]) -> dict[str, Ranks]:
    """Return the groups of stages with tied weights that contain `rank`, as a map from the group's kind to its ranks.

    Weights that are tied over all stages of the pipeline use the group of the pipe axis instead.
    """
    place = layout.coordinate(rank)
    return {
        tie(stages): tuple(layout.rank(**{**place, "pipe": stage}) for stage in stages)
        for stages in sorted(ties)
        if place["pipe"] in stages and 1 < len(stages) < layout.pipe
    }


Between = tuple[str, Ranks]
"""Identity of a communicator: a kind, and the members that it connects, in the order of the group.

The kind is "" if several groups share the communicator. Two sorts of groups have communicators of their own: a user's
group, which another thread may use, and the group for the moves of a switch.
"""


KIND_OF_NAME: Mapping[str, str] = {
    "data_parallel": "data_only",
    "sequence_parallel": "sequence",
    "sequence_data_parallel": "data",
    "tensor_model_parallel": "tensor",
    "slice_parallel": "tensor",
    "pipe_parallel": "pipe",
    "pipeline_model_parallel": "pipe",
    "model_parallel": "model",
}
"""A map from DeepSpeed's name for an axis, used in the methods of an `mpu`, to a kind of group."""


@dataclass(eq=False)
class HeldGroup:
    """A process group, and the store over which it was made.

    users: the number of worlds that hold the group. It is two while the next world is taking the group over; the
        connections stay, and only the ranks of the members may change.
    """

    group: td.ProcessGroup
    store: Store
    users: int = 0


@dataclass(eq=False)
class World:
    """The process groups of one generation, as one of its members sees them.

    The group of kind `default` is what `torch.distributed` calls WORLD; the other kinds are listed in `KINDS`. One
    group may serve several kinds.

    rank: this member's rank; None on a member that leaves with this world and has only the `transfer` group.
    ties: the sets of pipeline stages that share tied weights; each set has a group in every pipeline.
    status: the status shared by the world's groups, if members may join and leave; None in a job of fixed size.
    engine: the number, within this process, of the engine to which the world belongs.
    has_sequence: whether the model can have a sequence axis, even while its size is 1.
    transfer: the group, during a switch, of the members of this world and of the previous one; may be one of the other
        groups.
    communicators: the communicators that `connect` has made or kept, keyed by their members.
    moves_by_device: whether moves need a communicator of all members of both worlds; equal on all of them.
    """

    generation: int
    members: Ranks
    rank: int | None
    layout: Layout
    ties: tuple[Ranks, ...] = ()
    status: GroupStatus | None = None
    engine: int = 1
    has_sequence: bool = False
    transfer: td.ProcessGroup | None = None
    transfer_members: Ranks = ()
    communicators: dict[Between, Communicator] = field(default_factory=dict)
    moves_by_device: bool = False
    _held: dict[str, HeldGroup] = field(default_factory=dict)
    _ranks: dict[str, Ranks] = field(default_factory=dict)
    _of_user: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The common prefix of the names of this world's groups."""
        return f"{OURS}{self.engine}_{self.generation}"

    # ---- the groups

    def hold(self, kind: str, ranks: Ranks, held: HeldGroup, is_of_user: bool = False) -> None:
        """Add to this world a group that was made for it or kept from the previous world."""
        self._of_user |= {kind} if is_of_user else set()
        held.users += held not in self._held.values()
        self._held[kind], self._ranks[kind] = held, ranks

    def held(self, kind: str) -> HeldGroup:
        """Return the group of the given kind, with the store over which it was made.

        Raises RuntimeError on a member without a rank, and after `drop`.
        """
        if kind not in self._held:
            raise RuntimeError(f"generation {self.generation} has no {kind} group on this member: it holds no rank")
        return self._held[kind]

    def group(self, kind: str) -> td.ProcessGroup:
        """Return the group of a kind. Raises RuntimeError on a member without a rank, and after `drop`."""
        return self.held(kind).group

    def ranks(self, kind: str) -> Ranks:
        """Return this world's ranks in the group of a kind, in the group's order.

        Raises RuntimeError on a member without a rank, and after `drop`.
        """
        self.held(kind)
        return self._ranks[kind]

    def tie(self, stages: Ranks) -> td.ProcessGroup:
        """Return the group that connects the pipeline stages `stages`, which share tied weights, in this rank's
        pipeline.

        Raises RuntimeError on a member without a rank, and after `drop`.
        """
        return self.group("pipe") if len(stages) == self.layout.pipe else self.group(tie(stages))

    @property
    def kinds(self) -> list[str]:
        """Kinds of the groups that this world holds, in the order in which they were added."""
        return list(self._held)

    @property
    def default(self) -> td.ProcessGroup:
        """The group of all ranks."""
        return self.group("default")

    @property
    def data(self) -> td.ProcessGroup:
        """The group of the ranks over which ZeRO partitions and reduces: data x sequence."""
        return self.group("data")

    @property
    def mpu(self) -> SimpleNamespace | None:
        """The object that DeepSpeed asks for groups while the world lives; None if only data and expert sizes exceed 1.

        `model_parallel` means pipe x tensor. (DeepSpeed's own object for sequence parallelism uses this name for the
        sequence axis. ZeRO then counts gradient norms several times, and clips too much.) `get_data_parallel_group`
        returns ZeRO's group, over which stage 3 partitions parameters. The data-parallel size and rank are those of the
        data axis, whose ranks share a batch.
        """
        if self.layout.pipe * self.layout.sequence * self.layout.tensor == 1:
            return None
        asked: dict[str, Callable[[str], object]] = {
            "group": self.group,
            "group_ranks": self.ranks,
            "src_rank": lambda kind: self.ranks(kind)[0],
            "world_size": lambda kind: self.group(kind).size(),
            "rank": lambda kind: self.group(kind).rank(),
        }
        answers: dict[str, Callable[[], object]] = {
            f"get_{name}_{what}": partial(answer, kind)
            for name, kind in KIND_OF_NAME.items()
            for what, answer in asked.items()
        }
        return SimpleNamespace(**{**answers, "get_data_parallel_group": partial(self.group, "data")})

    def register(self) -> None:
        """Make all groups except `transfer` known to `torch.distributed`."""
        for kind, held in self._held.items():
            if kind != "transfer":
                register(held.group, held.store, self._ranks[kind])

    def give_up(self, kinds: Iterable[str]) -> list[td.ProcessGroup]:
        """Release the groups of the given kinds, and return those that no world holds any longer."""
        gone = {kind: self._held.pop(kind) for kind in kinds if kind in self._held}
        for kind in gone:
            del self._ranks[kind]
        ended = {id(held): held for held in gone.values() if held not in self._held.values()}
        for held in ended.values():
            held.users -= 1
        return [held.group for held in ended.values() if held.users == 0]

    def retire_transfer(self) -> threading.Thread:
        """Shut down the group that was made only for moving state in a switch, in a thread. Returns the thread."""
        moving = {self.between("transfer")} & self.communicators.keys()
        self.transfer, self.transfer_members = None, ()
        return tear_down(self.give_up(["transfer"]), self.disconnect(False, moving))

    # ---- communicators on the accelerator

    def between(self, kind: str) -> Between:
        """Return the key, in `communicators`, of the communicator that the group of a kind uses."""
        if kind == "transfer":
            return (kind, self.transfer_members)
        members = tuple(map(self.members.__getitem__, self.ranks(kind)))
        return (kind if kind in self._of_user else "", members)

    def lacks(self, previous: World | None) -> bool:
        """Return whether `connect` would have to make a new communicator on this member.

        previous: the world whose communicators can be kept, or None.
        """
        return any(self._known(kind, previous) is None for kind in self._served())

    def connect(self, seconds: float, previous: World | None = None, stop: Stop = go_on) -> Connections:
        """Connect the world's groups on the accelerator. All ranks must call this, while no collective is running.

        Communicators of `previous` are kept, in both worlds, if their members stay in the same order. All members come
        to the same choice. Does nothing on a member without a rank, or without an accelerator.

        seconds: timeout for the other ranks.
        stop: callback that is called repeatedly during waits; it may raise.

        Raises RuntimeError if a communicator cannot be made.
        """
        begin, there, kinds = time.perf_counter(), {**self.communicators}, self._served()
        if not kinds:
            return Connections()
        for kind in kinds:
            held, found = self._held[kind], self._known(kind, previous)
            is_new = found is None
            found = found or make_communicator(self._endpoint(kind, held.store), seconds, stop)
            if found not in self.communicators.values():
                self.communicators[self.between(kind)] = found
                found.users += 1
            if is_new and self.status is not None:
                self.status.gate.take_in(found)
            if held.group.bound_device_id is None and kind != "transfer":
                found.serve(held.group)
        new = [each for between, each in self.communicators.items() if between not in there]
        kept = sum(each.users > 1 for each in new)
        return Connections(len(new) - kept, kept, 1e3 * (time.perf_counter() - begin))

    def _endpoint(self, kind: str, store: Store) -> Endpoint:
        group = self.group(kind)
        return Endpoint(str(group.group_name), self._ranks[kind], group.rank(), store)

    def _served(self) -> list[str]:
        """Return the kinds of groups that use the accelerator, now or later; [] if there is no accelerator."""
        kinds = self.kinds if is_accelerated() else []
        return [kind for kind in kinds if len(self._ranks[kind]) > 1 and (kind != "transfer" or self.moves_by_device)]

    def _known(self, kind: str, previous: World | None) -> Communicator | None:
        """Return the existing communicator for a group, from this world or from `previous`; None if there is none."""
        handed_on = {} if previous is None or previous.status is not None else previous.communicators
        alike = [self.between(kind)] + ([("", self.transfer_members)] if kind == "transfer" else [])
        return next((known[each] for known in (self.communicators, handed_on) for each in alike if each in known), None)

    @property
    def moving(self) -> Communicator | None:
        """The communicator of all members of this world and the previous one, which moves state between devices.

        None before `connect`, or if none is needed.
        """
        members = self.transfer_members
        return self.communicators.get(("transfer", members)) or self.communicators.get(("", members))

    def renew(self, ended: Communicator, again: str, seconds: float, stop: Stop = go_on) -> None:
        """Replace a communicator that was aborted although its members are alive. All of these members must call this.

        again: a name that no other call has used.

        Raises RuntimeError if no new communicator can be made. The world can then no longer use the device.
        """
        between = next(each for each, found in self.communicators.items() if found is ended)
        kinds = [kind for kind in self._served() if self.between(kind) == between]
        store = PrefixStore(f"{again}/", self._held[kinds[0]].store)
        found = make_communicator(self._endpoint(kinds[0], store), seconds, stop)
        self.communicators[between], found.users = found, 1
        ended.users -= 1
        group: Any
        for group in {id(each): each for each in map(self.group, kinds)}.values():
            group.renew(store, found.device, found.kind, found.backend)

    def disconnect(self, is_broken: bool, which: Collection[Between] | None = None) -> Callable[[], None]:
        """Release communicators. Returns a function that ends those that no other world uses.

        All members of the released communicators must call the returned function.

        is_broken: whether to abort them, because some members may not take part in ending them.
        which: the keys of the communicators to release; None for all.
        """
        gone = [self.communicators.pop(each) for each in ([*self.communicators] if which is None else which)]
        for each in gone:
            each.users -= 1
        if self.status is not None:
            is_broken |= self.status.is_broken
            held = self.status.gate.communicators
            held[:] = [each for each in held if each not in gone]
        return partial(end, [each for each in gone if each.users == 0], is_broken=is_broken)

    @property
    def has_gate(self) -> bool:
        """Whether a collective may appear to succeed although a member has died, so that results must be confirmed."""
        return self.status is not None and is_accelerated() and len(self.members) > 1

    def agree(self, meet: Callable[[int], object] | None = None) -> None:
        """Wait until all ranks have their results of collectives on the accelerator. All ranks must call this.

        Does nothing without an accelerator, or if no member can be lost.

        meet: see `Gate.agree`; None for a reduction over all ranks in host memory.
        """
        if self.status is not None and self.has_gate:
            self.status.gate.agree(meet or (lambda _: self.default.allreduce([torch.zeros(1)]).wait()))
