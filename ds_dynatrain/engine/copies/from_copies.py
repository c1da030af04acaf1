"""Restoration from copies, by a plan that moves state from the layout in which the copies were taken to the layout to
restore.

The copy of each rank has one holder, the member that carries out that rank's part of the plan. A member that holds
several copies acts under its own number for the first of them, and under numbers that no member has for the others. A
holder without a rank in the layout to restore calls `serve`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property, partial, reduce
from typing import Any

import torch

from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.engine.checkpoints.extra_state import merged_rest, rest_ranks
from ds_dynatrain.engine.copies.copy import Copy
from ds_dynatrain.engine.copies.kept import Kept
from ds_dynatrain.errors import CheckpointDamaged, TransferError
from ds_dynatrain.membership.session import Session
from ds_dynatrain.membership.whole import Frozen, WholeCopies
from ds_dynatrain.plan import SwitchPlan, has_one_holder, plan_switch, standing_in
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.certificate import (
    PARTS,
    Shares,
    SideDigests,
    certify,
    joined,
    joined_sides,
    only,
    shares,
    side_digests,
)
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.encoding import blank_tensors, decode
from ds_dynatrain.reshard.restoration import Goal, StateSource
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, BufferId, of_kind
from ds_dynatrain.transfer import GroupTransport, digest_pieces, execute_standing_in

REST_TAG = 2
DOING = "restoring from copies"


def serve(engine: EngineCore, goal: Goal, whole: WholeCopies, kept: Kept) -> None:
    """Send this member's copies to all members that need them. Called on a holder of copies that gets no rank itself.

    goal: the layout and members to restore.
    whole: the copies to use.
    kept: the copies of this process.

    Raises CheckpointError if the restoration fails on the other members.
    """
    try:
        source = FromCopies(engine, goal, whole, kept)
        source.give()
        source.report(None)
    except BaseException as error:
        _session(engine, goal, whole).give_up(error)
        raise


class FromCopies(StateSource):
    """Source for a restoration that takes the state from copies, which members keep in host memory.

    goal: the layout and members to restore. The group for transfers of its world must include all holders of copies.
    whole: the copies to use.
    kept: the copies of this process.
    """

    def __init__(self, engine: EngineCore, goal: Goal, whole: WholeCopies, kept: Kept) -> None:
        self._engine, self._goal, self._whole = engine, goal, whole
        self._layout, self._me = whole.mark.layout, engine.control.member
        self._session = _session(engine, goal, whole)
        self._names = _names(whole.holders, above=max(self._session.members))
        self._stand_ins = {name: one for name, one in zip(self._names, whole.holders, strict=True) if name != one}
        self._frozen, self._copies = kept.frozen, dict[int, Copy]()
        for rank in whole.held_by(self._me):
            copy = kept.find(whole.mark, rank)
            if copy is None:
                raise TransferError(f"member {self._me} has no copy of rank {rank} of step {whole.mark.step}")
            self._copies[rank] = copy
        self._target = engine.vps.with_layout(goal.layout, goal.members)
        self._rests: dict[int, dict[str, Any]] = {}
        for rank, copy in self._copies.items():
            self._session.say(f"said/{rank}", copy.said)

    def _extra_state(self, rank: int) -> dict[str, Any]:
        """Return the extra state in the copy of a rank (everything outside the buffers), as plain JSON."""
        found: dict[str, Any] = self._session.said_by(self._whole.holders[rank], f"said/{rank}", DOING)
        return found

    # ---- the interface of a state source -----------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> Sequence[str]:
        there = self._extra_state(0)["kinds"]
        return [kind for kind in self._target.present_kinds(self._layout) if kind in there]

    def fill(self, rank: int, buffers: Buffers) -> None:
        self.give(buffers)

    def shared(self) -> dict[str, Any]:
        found: dict[str, Any] = decode(self._extra_state(0)["shared"], [])
        return found

    def rest(self, rank: int) -> dict[str, Any]:
        source, layout = self._layout, self._goal.layout
        return merged_rest([self._rests[each] for each in rest_ranks(source, layout, rank)], source, layout)

    def streams(self, rank: int) -> streams.Streams:
        seed, generation = self._extra_state(0)["seed"], self._goal.world.generation
        layouts = self._layout, self._goal.layout
        return streams.continued(*layouts, rank, seed, generation, lambda each: self._extra_state(each)["streams"])

    def prove(self, rank: int, buffers: Buffers, kinds: Sequence[str]) -> str:
        vps, layout = self._target, self._goal.layout
        mine, _ = side_digests(vps, layout, rank, buffers, tuple(kinds))
        return self.report(shares(vps, layout, self._goal.members, rank, mine))

    # ---- the moves ---------------------------------------------------------------------------------------------------

    def give(self, target: Buffers | None = None) -> None:
        """Carry out this member's part of the restoration: send from its copies, and fill its own buffers.

        target: the buffers to fill; None on a member that gets no rank.
        """
        world = self._goal.world
        if world.transfer is None:
            raise TransferError("the world has no group for transfers")
        transport = GroupTransport(world.transfer, world.transfer_members, self._engine.control.watch)
        seconds, budget = self._engine.control.timeout_seconds, self._engine.settings.memory_budget_bytes
        played = [name for rank, name in enumerate(self._names) if rank in self._copies and name != self._me]
        sources = {
            self._names[rank]: {**copy.buffers, **{(WEIGHT, name): held for name, held in self._cast[rank].items()}}
            for rank, copy in self._copies.items()
        }
        how = transport, self._stand_ins, seconds, budget, not is_accelerated()
        for plan in self._plans():
            execute_standing_in(standing_in(plan, self._me, played), sources, target or {}, *how)
        if self._whole.frozen is not None:
            frozen = self._whole.frozen
            vps = self._target.with_layout(frozen.layout, frozen.members).with_groups(WEIGHT, [FROZEN])
            plan = plan_switch(vps, self._goal.layout, self._goal.members, (WEIGHT,))
            execute_standing_in(standing_in(plan, self._me, ()), {self._me: self._frozen}, target or {}, *how)
        self._give_rests(transport, time.monotonic() + seconds)

    def _plans(self) -> list[SwitchPlan]:
        """Return the plans of all moves: one for trained state, whose weights are cast from masters and, if copies
        contain frozen weights, another one for these."""
        vps = self._target.with_layout(self._layout, self._names)
        goal = self._goal.layout, self._goal.members
        trained = {tensor.group for tensor in vps.tensors if tensor.trainable}
        plans = [plan_switch(vps.with_groups(WEIGHT, trained), *goal, self.kinds, {WEIGHT: MASTER})]
        if has_one_holder(vps, self._layout, WEIGHT) and any(not tensor.trainable for tensor in vps.tensors):
            plans.append(plan_switch(vps.with_groups(WEIGHT, [FROZEN]), *goal, (WEIGHT,)))
        return plans

    @cached_property
    def _cast(self) -> dict[int, dict[BufferId, torch.Tensor]]:
        """Trained weights of each rank whose copy this member holds. They are cast from the masters in the copy, and
        divided in the same way."""
        dtype = self._engine.memory_in(self._goal.layout)[WEIGHT].dtype
        return {
            rank: {name: held.to(dtype) for name, held in of_kind(copy.buffers, MASTER).items()}
            for rank, copy in self._copies.items()
        }

    def _give_rests(self, transport: GroupTransport, deadline: float) -> None:
        """Exchange the tensors of ranks' own extra state: send them from copies to the members that continue with that
        state."""
        begun, wanted = [], dict[int, list[torch.Tensor]]()
        for rank, member in enumerate(self._goal.members):
            for each in dict.fromkeys(rest_ranks(self._layout, self._goal.layout, rank)):
                holder = self._whole.holders[each]
                if member == self._me:
                    local = holder == self._me
                    wanted[each] = (
                        self._copies[each].tensors if local else blank_tensors(self._extra_state(each)["rest"])
                    )
                if holder == member:
                    continue
                if holder == self._me:
                    begun += [transport.send(part, member, REST_TAG) for part in _flat(self._copies[each].tensors)]
                if member == self._me:
                    begun += [transport.receive(part, holder, REST_TAG) for part in _flat(wanted[each])]
        for handle in begun:
            handle.wait(deadline)
        self._rests = {each: decode(self._extra_state(each)["rest"], tensors) for each, tensors in wanted.items()}

    # ---- the proof ---------------------------------------------------------------------------------------------------

    def report(self, after: Shares | None) -> str:
        """Check that the digests of the state are the same before and after the moves; return the digest of the whole
        state.

        after: this member's part of the digests after the moves; None if the member gets no rank.

        Raises CheckpointDamaged on all members if the digests differ.
        """
        before = [self._shares_of(rank, copy) for rank, copy in self._copies.items()]
        if self._whole.frozen is not None and self._me in self._whole.frozen.members:
            before.append(self._shares_of_frozen(self._whole.frozen))
        mine = {"source": reduce(joined, before) if before else None, "target": after}
        judge = partial(certify, self._target, self._layout, self._goal.layout)
        said = self._session.reduce("digests", mine, joined_sides, judge)
        if "digest" not in said:
            raise CheckpointDamaged(
                f"the restored state differs between members: {said['doubts']}; start the job again from a checkpoint"
            )
        return str(said["digest"])

    def _shares_of(self, rank: int, copy: Copy) -> Shares:
        """Return the contribution of a copy to the digests of the whole state: that of its buffers, and that of its
        weights (cast from masters, or frozen)."""
        vps, layout = self._target.with_layout(self._layout, self._names), self._layout
        cast, pieces, of = self._cast[rank], vps.holding(layout, rank, MASTER), (vps, layout, self._names, rank)
        kinds = [kind for kind in self.kinds if kind != WEIGHT or has_one_holder(vps, layout, WEIGHT)]
        held = {kind: copy.digests[kind] for kind in kinds if kind in copy.digests}
        as_masters = shares(*of, SideDigests({MASTER: digest_pieces(only(pieces, tuple(cast)), cast, vps.bases)}))
        for part in PARTS:
            as_masters[part] = dict(zip([WEIGHT], as_masters[part].values(), strict=False))  # masters' digest or none
        total = joined(shares(*of, SideDigests(held)), as_masters)
        return {**total, "kinds": [(self._names[rank], sorted(self.kinds))]}

    def _shares_of_frozen(self, frozen: Frozen) -> Shares:
        """Return the contribution of this member's frozen weights to the digests of the whole state. Copies do not
        contain these weights."""
        vps, rank = self._target.with_layout(frozen.layout, frozen.members), frozen.members.index(self._me)
        held, pieces = of_kind(self._frozen, WEIGHT), vps.holding(frozen.layout, rank, WEIGHT)
        mine = SideDigests({WEIGHT: digest_pieces(only(pieces, tuple(held)), held, vps.bases)})
        return {**shares(vps, frozen.layout, frozen.members, rank, mine), "kinds": [(self._me, sorted(self.kinds))]}


def _session(engine: EngineCore, goal: Goal, whole: WholeCopies) -> Session:
    """Return a session for the joint steps of all members that restore the state or provide copies."""
    members = (*goal.members, *(one for one in whole.members if one not in goal.members))
    return Session(engine.control, f"{goal.key}/copies", members, DOING, record=goal.record, is_patient=True)


def _names(holders: Sequence[int], above: int) -> tuple[int, ...]:
    """Return, for each rank, the member number under which the holder of the rank's copy appears in the plan.

    A member has its own number for the first rank whose copy it holds. For each further rank it gets a number that no
    member has.

    holders: for each rank, the member that holds its copy.
    above: the highest number of any member.
    """
    return tuple(holder if holder not in holders[:rank] else above + 1 + rank for rank, holder in enumerate(holders))


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous().view(-1) for tensor in tensors if tensor.numel()]
