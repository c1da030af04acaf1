"""The process groups of one generation, as one of its members sees them: which there are, and whom they connect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore

from ds_dynatrain.adapters import parallel_state
from ds_dynatrain.adapters.communicators import Communicator, Connections, Endpoint, end, go_on, make_communicator
from ds_dynatrain.adapters.device import is_accelerated
from ds_dynatrain.adapters.held_groups import HeldGroup, HeldGroups
from ds_dynatrain.adapters.peers import tie
from ds_dynatrain.adapters.process_groups import OURS, tear_down
from ds_dynatrain.adapters.traffic import Said
from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.space import Layout

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
    communicators: what `connect` has made or kept, by members. moves_by_device: whether moves need one of all members
    of both worlds, which all know alike.
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
    _held: HeldGroups = field(default_factory=HeldGroups)
    _of_user: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The prefix of this world's groups."""
        return f"{OURS}{self.engine}_{self.generation}"

    def group(self, kind: str) -> td.ProcessGroup:
        """The group of a kind; RuntimeError on a member without a rank, and after `drop`."""
        if kind not in self._held:
            raise RuntimeError(f"generation {self.generation} has no {kind} group on this member: it holds no rank")
        return self._held[kind].group

    def ranks(self, kind: str) -> tuple[int, ...]:
        """The ranks of this world that are in the group of a kind, in its order; RuntimeError as in `group`."""
        self.group(kind)
        return self._held.ranks(kind)

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

    def hold(self, kind: str, ranks: tuple[int, ...], held: HeldGroup, is_of_user: bool = False) -> None:
        """Take a group in that was made for this world, or that stays from the one before."""
        self._of_user |= {kind} if is_of_user else set()
        self._held.hold(kind, ranks, held)

    def held(self, kind: str) -> HeldGroup:
        """The group of a kind, as worlds hand it on."""
        self.group(kind)
        return self._held[kind]

    def hands_on(self, kind: str, members: tuple[int, ...], unfit: Collection[str] = ()) -> HeldGroup | None:
        """The group of a kind for the next world, if it has these members in this order; all of them see that alike.

        unfit: names of groups that have to be built anew, which all know alike.
        """
        is_there = kind in self._held and self.between(kind)[1] == members
        return self._held[kind] if is_there and str(self.group(kind).group_name) not in unfit else None

    def says(self, apart: Collection[str] = ()) -> Said:
        """This member's word on each of its groups, from which all learn which may go on; see `traffic`.

        Nothing of a job of fixed size, where all may. apart: kinds whose groups are built anew in any case.
        """
        if self.status is None:
            return {}
        found = {}
        for kind, group, ranks in self._held.watched:
            said = group.traffic.said(len(ranks), self.status.is_lost)
            found[str(group.group_name)] = {**said, "has_failed": said["has_failed"] or kind in apart}
        return found

    def lose(self, known: Collection[str], there: Collection[int]) -> frozenset[str]:
        """Begin nothing in this world any more: a member of it is gone, or a collective of it has failed.

        The names of groups that may go on, in which nothing is under way here: nobody waits in these, and they need not
        be shut down. In any thread. known: those that could be left alone. there: the members that are not gone.
        """
        if self.status is None:
            return frozenset()
        self.status.is_lost, stay = True, set()
        for _, group, ranks in self._held.watched:
            rests, members = group.traffic.close(), {self.members[rank] for rank in ranks}
            if rests and str(group.group_name) in known and members <= {*there}:
                stay.add(str(group.group_name))
            else:
                group.traffic.fail()
        return frozenset(stay)

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
            held, between, found = self._held[kind], self.between(kind), self._known(kind, previous)
            if found is None:
                place = Endpoint(str(held.group.group_name), self._held.ranks(kind), held.group.rank(), held.store)
                found = make_communicator(place, seconds, stop)
                if self.status is not None:
                    self.communicators[between] = found
                    found.users += 1
                    self.status.gate.take_in(found)
            if between not in self.communicators and found not in self.communicators.values():
                self.communicators[between] = found
                found.users += 1
            if held.group.bound_device_id is None and kind != "transfer":
                found.serve(held.group)
        new = [each for between, each in self.communicators.items() if between not in there]
        kept = sum(each.users > 1 for each in new)
        return Connections(len(new) - kept, kept, 1e3 * (time.perf_counter() - begin))

    def _served(self) -> list[str]:
        """Kinds of the groups that serve the accelerator, or are to; none where there is none."""
        if not is_accelerated():
            return []
        served = {kind for kind in self.kinds if kind != "transfer" or self.moves_by_device}
        return [kind for kind in self.kinds if kind in served and len(self._held.ranks(kind)) > 1]

    def _known(self, kind: str, previous: World | None) -> Communicator | None:
        """The communicator that there is for a group, in this world or in one that may hand it on."""
        handed_on = {} if previous is None or previous.status is not None else previous.communicators
        alike = [self.between(kind)] + ([("", self.transfer_members)] if kind == "transfer" else [])
        return next((known[each] for known in (self.communicators, handed_on) for each in alike if each in known), None)

    @property
    def moving(self) -> Communicator | None:
        """What moves between devices go by, once all are connected: of all members of both worlds."""
        members = self.transfer_members
        return self.communicators.get(("transfer", members)) or self.communicators.get(("", members))

    def renew(self, ended: Communicator, again: str, seconds: float, stop: Callable[[], None] = go_on) -> None:
        """Make a communicator anew that was aborted while its members live; all of them call it. RuntimeError where
        that does not come about: nothing of the world can be used on the device then.

        again: of no other time.
        """
        between = next(each for each, found in self.communicators.items() if found is ended)
        kinds = [kind for kind in self._served() if self.between(kind) == between]
        held = self._held[kinds[0]]
        store = PrefixStore(f"{again}/", held.store)
        place = Endpoint(str(held.group.group_name), self._held.ranks(kinds[0]), held.group.rank(), store)
        found = make_communicator(place, seconds, stop)
        self.communicators[between], found.users = found, 1
        ended.users -= 1
        for group in {id(each.group): each.group for each in map(self.held, kinds)}.values():
            found.serve_anew(group, store)

    def disconnect(self, is_broken: bool) -> Callable[[], None]:
        """Let its communicators go; what ends those that no other world has kept, as all their members have to."""
        gone = [*self.communicators.values()]
        self.communicators.clear()
        return self._ending(gone, is_broken)

    def _ending(self, gone: Collection[Communicator], is_broken: bool) -> Callable[[], None]:
        """What ends those of communicators that no other world has."""
        for each in gone:
            each.users -= 1
        unused = [each for each in gone if each.users == 0]
        if self.status is not None:
            is_broken |= self.status.is_broken
            held = self.status.gate.communicators
            held[:] = [each for each in held if each not in gone]
        return partial(end, unused, is_broken=is_broken)

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

    def give_up(self, kinds: Sequence[str]) -> list[td.ProcessGroup]:
        """Let go of the groups of some kinds: those that no other world holds; all other references are gone."""
        return self._held.let_go(kinds)

    def retire_transfer(self) -> threading.Thread:
        """Take down a group that was made for the moves alone; see `drop`."""
        moving = self.communicators.pop(("transfer", self.transfer_members), None)
        self.transfer, self.transfer_members = None, ()
        return tear_down(self.give_up(["transfer"]), self._ending([moving] if moving else [], False))

    def register(self) -> None:
        """Make all groups of the world's own known to `torch.distributed`."""
        self._held.register(self.status)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the groups that it holds."""
        return self._held.kinds
