"""The process groups of one generation, as one of its members sees them: which there are, and whom they connect."""

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

from ds_dynatrain.adapters.communicators import Communicator, Connections, Endpoint, end, go_on, make_communicator
from ds_dynatrain.adapters.device import is_accelerated
from ds_dynatrain.adapters.peers import tie
from ds_dynatrain.adapters.process_groups import OURS, register, tear_down
from ds_dynatrain.adapters.traffic import Said
from ds_dynatrain.adapters.watched import GroupStatus, ManagedProcessGroup
from ds_dynatrain.space import Layout

Between = tuple[str, tuple[int, ...]]
"""Whom a communicator connects: members in the order of a group, and the kind of a group of the user's (one may be used
from a thread beside all others, and shares with none), or nothing."""


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
"""DeepSpeed's name for an axis in the methods of an `mpu` -> the kind of group that answers."""


class ForwardedStore(Store):
    """A key-value store in front of another one, which may change. (It is no group, so no `ManagedProcessGroup`.)

    A group keeps the store that it was made over as long as it lives. One that goes on from world to world would keep
    the connection of the first, in this process and in the coordinator's; it goes over to the next world's store
    instead.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def go_over(self, store: Store) -> None:
        """Ask another one from here on, with other keys: what was written does not come along."""
        self._store = store


def _asked(name: str) -> Callable[..., Any]:
    def call(self: ForwardedStore, *arguments: Any, **named: Any) -> Any:
        return getattr(self._store, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name in (
    *("set", "get", "add", "check", "wait", "append", "compare_set", "delete_key", "num_keys", "multi_get"),
    *("multi_set", "has_extended_api", "set_timeout", "clone"),
):
    setattr(ForwardedStore, _name, _asked(_name))


@dataclass(eq=False)
class HeldGroup:
    """A group, and the store that it was made over.

    over: what that store is in front of, if it goes along to the next world's. users: how many worlds hold the group,
    two while it is handed on. It is the same group then, over the same connections; only the ranks of its members may
    be others.
    """

    group: td.ProcessGroup
    store: Store
    over: ForwardedStore | None = None
    users: int = 0


@dataclass(eq=False)
class World:
    """The process groups of one generation, as seen by one of its members.

    `default` is what `torch.distributed` calls WORLD; the others are those of `peers.KINDS`, where `data` is the one
    that ZeRO cuts and reduces over. A group may serve several kinds. `transfer` spans the members of this and of the
    previous world during a switch (it may be one of the others). rank: None on a member that leaves with this world; it
    has `transfer` alone. ties: the sets of pipeline stages that share tied weights, each of which has a group in every
    pipeline. status: of its groups, if members come and go; None in a job of fixed size. engine: number of the engine
    in this process whose world it is. has_sequence: whether its model can have a sequence axis, also while that has
    size 1. communicators: what `connect` has made or kept, by members. moves_by_device: whether moves need one of all
    members of both worlds, which all know alike.
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
    moves_by_device: bool = False
    _held: dict[str, HeldGroup] = field(default_factory=dict)
    _ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _of_user: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The prefix of this world's groups."""
        return f"{OURS}{self.engine}_{self.generation}"

    # ---- its groups

    def hold(self, kind: str, ranks: tuple[int, ...], held: HeldGroup, is_of_user: bool = False) -> None:
        """Take a group in that was made for this world, or that stays from the one before."""
        self._of_user |= {kind} if is_of_user else set()
        held.users += held not in self._held.values()
        self._held[kind], self._ranks[kind] = held, ranks

    def held(self, kind: str) -> HeldGroup:
        """Return the group of a kind, to hand it on; RuntimeError on a member without a rank, and after `drop`."""
        if kind not in self._held:
            raise RuntimeError(f"generation {self.generation} has no {kind} group on this member: it holds no rank")
        return self._held[kind]

    def group(self, kind: str) -> td.ProcessGroup:
        """Return the group of a kind; RuntimeError as in `held`."""
        return self.held(kind).group

    def ranks(self, kind: str) -> tuple[int, ...]:
        """Return the ranks of this world that are in the group of a kind, in its order; RuntimeError as in `held`."""
        self.held(kind)
        return self._ranks[kind]

    def tie(self, stages: tuple[int, ...]) -> td.ProcessGroup:
        """Return the group of these stages in this rank's pipeline; RuntimeError as in `held`."""
        return self.group("pipe") if len(stages) == self.layout.pipe else self.group(tie(stages))

    @property
    def kinds(self) -> list[str]:
        """Kinds of the groups that it holds, in the order in which they were held."""
        return list(self._held)

    @property
    def default(self) -> td.ProcessGroup:
        """Group of all ranks."""
        return self.group("default")

    @property
    def data(self) -> td.ProcessGroup:
        """The ranks that ZeRO cuts and reduces over: data x sequence."""
        return self.group("data")

    @property
    def mpu(self) -> SimpleNamespace | None:
        """Object that DeepSpeed asks for groups, while the world lives; None where only data and expert are above 1.

        `model_parallel` is pipe x tensor. (DeepSpeed's own for sequence parallelism says sequence there: ZeRO then adds
        norms of gradients up that are whole already, and clips too much.) `get_data_parallel_group` is ZeRO's group,
        which stage 3 cuts parameters over; size and rank are those of the data axis, which share a batch.
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
        """Make all groups but the one for the moves known to `torch.distributed`, with the ranks that they have here.

        They serve the status of this world from here on.
        """
        for kind, held in self._held.items():
            if kind != "transfer":
                register(held.group, held.store, self._ranks[kind])
            if self.status is not None and isinstance(held.group, ManagedProcessGroup):
                held.group.serve(self.status)

    def give_up(self, kinds: Iterable[str]) -> list[td.ProcessGroup]:
        """Let go of the groups of some kinds: those that no other world holds; all other references are gone."""
        gone = {kind: self._held.pop(kind) for kind in kinds if kind in self._held}
        for kind in gone:
            del self._ranks[kind]
        ended = {id(held): held for held in gone.values() if held not in self._held.values()}
        for held in ended.values():
            held.users -= 1
        return [held.group for held in ended.values() if held.users == 0]

    def retire_transfer(self) -> threading.Thread:
        """Take down a group that was made for the moves alone; see `drop`."""
        moving = [each for each in self.communicators if each == ("transfer", self.transfer_members)]
        self.transfer, self.transfer_members = None, ()
        return tear_down(self.give_up(["transfer"]), self.disconnect(False, moving))

    # ---- which of them may go on

    def hands_on(self, kind: str, members: tuple[int, ...], unfit: Collection[str] = ()) -> HeldGroup | None:
        """Return the group of a kind for the next world, if it has these members in this order; all see that alike.

        unfit: names of groups that have to be built anew, which all know alike.
        """
        is_there = kind in self._held and self.between(kind)[1] == members
        return self._held[kind] if is_there and str(self.group(kind).group_name) not in unfit else None

    def says(self, apart: Collection[str] = ()) -> Said:
        """Return this member's word on each of its groups, from which all learn which may go on; see `traffic`.

        Nothing of a job of fixed size, where all may. apart: kinds whose groups are built anew in any case.
        """
        if self.status is None:
            return {}
        found = {}
        for kind, group, ranks in self._watched():
            said = group.traffic.said(len(ranks), self.status.is_lost)
            found[str(group.group_name)] = {**said, "has_failed": said["has_failed"] or kind in apart}
        return found

    def lose(self, known: Collection[str], there: Collection[int]) -> frozenset[str]:
        """Begin nothing in this world any more: a member of it is gone, or a collective of it has failed.

        Return the names of groups that may go on, in which nothing is under way here: nobody waits in these, and they
        need not be shut down. In any thread. known: those that could be left alone. there: the members that are not
        gone.
        """
        if self.status is None:
            return frozenset()
        self.status.is_lost, stay = True, set()
        for _, group, ranks in self._watched():
            rests, members = group.traffic.close(), {self.members[rank] for rank in ranks}
            if rests and str(group.group_name) in known and members <= {*there}:
                stay.add(str(group.group_name))
            else:
                group.traffic.fail()
        return frozenset(stay)

    def _watched(self) -> list[tuple[str, ManagedProcessGroup, tuple[int, ...]]]:
        """Return each group that tells what was begun and ended in it: a kind that it serves, the group, its ranks."""
        found: dict[int, tuple[str, ManagedProcessGroup, tuple[int, ...]]] = {}
        for kind, ranks in list(self._ranks.items()):
            held = self._held.get(kind)  # another thread may let go of it meanwhile
            if held is not None and isinstance(held.group, ManagedProcessGroup):
                found.setdefault(id(held), (kind, held.group, ranks))
        return list(found.values())

    # ---- what they have for the accelerator

    def between(self, kind: str) -> Between:
        """Whom the group of a kind connects."""
        if kind == "transfer":
            return (kind, self.transfer_members)
        members = tuple(self.members[rank] for rank in self.ranks(kind))
        return (kind if kind in self._of_user else "", members)

    def lacks(self, previous: World | None) -> bool:
        """Whether `connect` would make a communicator on this member."""
        return any(self._known(kind, previous) is None for kind in self._served())

    def connect(self, seconds: float, previous: World | None = None, stop: Callable[[], None] = go_on) -> Connections:
        """Let its groups serve the accelerator's device; all its ranks call it, while nothing else is under way.

        Communicators of `previous` are kept, in both, where their members stay in their order; which these are all
        members see alike. Nothing on a member without a rank, and where there is no accelerator. seconds: how long it
        waits for the others; stop: called meanwhile, may raise. RuntimeError where that does not come about.
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
        """Kinds of the groups that serve the accelerator, or are to; none where there is none."""
        kinds = self.kinds if is_accelerated() else []
        return [kind for kind in kinds if len(self._ranks[kind]) > 1 and (kind != "transfer" or self.moves_by_device)]

    def _known(self, kind: str, previous: World | None) -> Communicator | None:
        """The communicator that there is for a group, in this world or in one that may hand it on."""
        handed_on = {} if previous is None or previous.status is not None else previous.communicators
        alike = [self.between(kind)] + ([("", self.transfer_members)] if kind == "transfer" else [])
        return next((known[each] for known in (self.communicators, handed_on) for each in alike if each in known), None)

    @property
    def moving(self) -> Communicator | None:
        """Communicator that moves between devices go by, once all are connected: of all members of both worlds."""
        members = self.transfer_members
        return self.communicators.get(("transfer", members)) or self.communicators.get(("", members))

    def renew(self, ended: Communicator, again: str, seconds: float, stop: Callable[[], None] = go_on) -> None:
        """Make a communicator anew that was aborted while its members live; all of them call it. RuntimeError where
        that does not come about: nothing of the world can be used on the device then.

        again: of no other time.
        """
        between = next(each for each, found in self.communicators.items() if found is ended)
        kinds = [kind for kind in self._served() if self.between(kind) == between]
        store = PrefixStore(f"{again}/", self._held[kinds[0]].store)
        found = make_communicator(self._endpoint(kinds[0], store), seconds, stop)
        self.communicators[between], found.users = found, 1
        ended.users -= 1
        for group in {id(each): each for each in map(self.group, kinds)}.values():
            found.serve_anew(group, store)

    def disconnect(self, is_broken: bool, which: Collection[Between] | None = None) -> Callable[[], None]:
        """Let communicators go, by default all; return what ends those that no other world has kept.

        All their members have to call that.
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
        """Whether collectives of its ranks may end as if they were well when a member has died."""
        return self.status is not None and is_accelerated() and len(self.members) > 1

    def agree(self, meet: Callable[[int], object] | None = None) -> None:
        """See `Gate.agree`; all ranks call it. Nothing where no members are lost, and where there is no accelerator.

        meet: by default a reduction over the group for host memory.
        """
        if self.status is not None and self.has_gate:
            self.status.gate.agree(meet or (lambda _: self.default.allreduce([torch.zeros(1)]).wait()))
