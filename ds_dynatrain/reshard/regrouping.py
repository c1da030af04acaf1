"""Implementation of `engine.update_param_groups`: changing trained parameters and optimizer groups in one layout.

All working members compare their requests. The change is then a restoration whose source is the state of these same
members: each fills new buffers, attaches a new optimizer to them, and reports digests per tensor; the outcome is
written once. A failure before the outcome is written restores the old optimizer with the old buffers. Idle members read
the record of the change when they join training (`registration.catch_up`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as td

from ds_dynatrain.adapters.deepspeed.support_checks import refuse_at_boundary
from ds_dynatrain.adapters.zero.incoming import Place, pieces_by_tensor
from ds_dynatrain.adapters.zero.optimizers import rule_of
from ds_dynatrain.adapters.zero.regroup import Regrouping, RegroupRequest, lists_per_group, regroup, wanted_of
from ds_dynatrain.adapters.zero.state import Buffers, Memory
from ds_dynatrain.errors import CertificateError, MemberMissing, SwitchFailed, SwitchRefused
from ds_dynatrain.membership.session import ASK_ALIKE, ASK_ALL, Session
from ds_dynatrain.reshard.certificate import agreed, side_digests, state_digest
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.registration import require_as
from ds_dynatrain.reshard.restoration import Goal, Restoration, StateSource
from ds_dynatrain.reshard.swap import Before, check_census
from ds_dynatrain.space import MASTER, WEIGHT, is_partitioned
from ds_dynatrain.transfer import digest


def register(engine: EngineCore, place: str, groups: Sequence[Mapping[str, Any]], is_open: str) -> bool:
    """Apply the change that `DynatrainEngine.update_param_groups` requests; return whether anything has changed.

    Raises SwitchRefused if the change is not possible, and SwitchFailed if it failed. In both cases no member is
    changed.

    place: name of the point in training at which the script makes the request; the same on all members.
    is_open: a description of what prevents the change on this member, such as an unfinished batch; "" if nothing does.
    """
    host = engine.host
    key = f"register/{place}"
    session = Session(engine.control, key, engine.members, "update_param_groups")
    refusal: SwitchRefused | None = None
    wanted, asked = RegroupRequest({}, (), False), None
    try:
        if is_open:
            raise SwitchRefused(is_open, "call it after engine.step(), with no switch pending")
        refuse_at_boundary(host)
        if engine.layout.order is not None:
            raise SwitchRefused(
                f"the order of tensors in {engine.layout} is that of the present groups",
                'leave "owners" out of the dynatrain block',
            )
        wanted = wanted_of(host.model_map, host.module, groups, _has_begun(engine))
    except SwitchRefused as refused:
        refusal = refused
    try:
        if is_partitioned(engine.layout):
            wanted = _with_others(session, wanted)
        if refusal is None:
            asked = _asked(engine, wanted)
    except SwitchRefused as refused:
        refusal = refusal or refused
    request = {"groups": None if asked is None else asked.to_json()}
    said = None if refusal is None else (refusal.reason, refusal.way_out)
    session.agree(
        request,
        SwitchRefused,
        lambda one, other, _: f"members {one} and {other} register different parameters or groups",
        said,
    )
    if asked is None:
        return False
    before = Before.of(engine)
    side = engine.layout, engine.members, before.world
    goal = Goal(*side, key, f"{key}/record", what="update_param_groups", is_patient=False)
    opener = partial(FromGroups, engine, goal, asked, wanted.begun, before)
    try:
        decision = Restoration(engine, goal, opener, "new parameter groups", before).vote()
    finally:
        require_as(engine.host.model_map)
    if not decision.commit:
        raise SwitchFailed(f"update_param_groups: {decision.reason}; the engine goes on as before it")
    return True


def _asked(engine: EngineCore, wanted: RegroupRequest) -> Regrouping | None:
    """Return the parameter groups to register; None if they are the current ones.

    Raises SwitchRefused if these groups cannot be registered.
    """
    host = engine.host
    asked = regroup(host.model_map, host.basic_optimizer, wanted)
    if asked is not None:
        flags = zip(host.model_map.tensors, host.model_map.requires_grad, strict=True)
        host.shaper.refuse_to_train(set(asked.requires_grad).difference(each.name for each, was in flags if was))
        lists_per_group(host.engine.lr_scheduler, len(host.basic_optimizer.param_groups))
    return asked


def _has_begun(engine: EngineCore) -> bool:
    """Return whether the optimizer has a state for any parameter, on this member or on others.

    An optimizer that does not split tensors may have no state on this member although others have some. The number of
    steps is therefore considered as well.
    """
    optimizer = engine.host.basic_optimizer
    stepped = bool(rule_of(optimizer).whole_tensors) and engine.global_steps > 0
    return stepped or any(bool(state) for state in optimizer.state.values())


def _with_others(session: Session, mine: RegroupRequest) -> RegroupRequest:
    """Combine this member's request with those of all other members, because a member can name only the parameters that
    it holds.

    Raises SwitchRefused if members that hold the same parameter disagree on it, if they give different numbers of
    groups, or (on all members) if one member does not make the request within the timeout.
    """
    said = {
        "requires_grad": dict(mine.requires_grad),
        "groups": [list(names) for names, _ in mine.groups],
        "begun": mine.begun,
    }
    try:
        doing = f"{session.what}: every working member has to ask for it"
        found = session.reduce("wanted", said, _joined_wishes, doing=doing)
    except MemberMissing as missing:
        raise SwitchRefused(str(missing), ASK_ALL) from None
    groups = found["groups"]
    if len(groups) != len(mine.groups):
        raise SwitchRefused(
            f"engine.update_param_groups: {len(mine.groups)} groups are given here and {len(groups)} on another member",
            "give every member all groups; {'params': []} where it holds none of the parameters",
        )
    held = mine.requires_grad
    differing = [name for name, flag in held.items() if found["requires_grad"][name] != flag]
    for (names, _), together in zip(mine.groups, groups, strict=True):
        differing += set(together).intersection(held).symmetric_difference(names)
    if differing:
        raise SwitchRefused(
            f"another member that holds {differing[0]!r} too gives it another requires_grad, or another group",
            ASK_ALIKE,
        )
    rests = (rest for _, rest in mine.groups)
    named = tuple((tuple(names), rest) for names, rest in zip(groups, rests, strict=True))
    return replace(mine, requires_grad=found["requires_grad"], groups=named, begun=found["begun"])


def _joined_wishes(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the requests of two members.

    If both name a parameter, the first member's value is used. The other member detects the difference itself.
    """
    pairs = zip_longest(one["groups"], other["groups"], fillvalue=())
    return {
        "requires_grad": {**other["requires_grad"], **one["requires_grad"]},
        "groups": [list(dict.fromkeys([*mine, *theirs])) for mine, theirs in pairs],
        "begun": one["begun"] or other["begun"],
    }


class FromGroups(StateSource):
    """Source of a state for a change of parameter groups: the state that the same members hold now, in the same
    layout."""

    compared = ("counters", "windows", "epoch", "scalars", "scaling", "loaders")
    is_proved_at_the_end = True

    def __init__(self, engine: EngineCore, goal: Goal, asked: Regrouping, begun: bool, before: Before) -> None:
        self._engine, self._goal, self._asked, self._begun, self._before = engine, goal, asked, begun, before
        self._old, self._layout, self._session = engine.vps, goal.layout, goal.session(engine.control)
        self._masters = np.zeros(len(self._old.tensors), np.uint64)
        check_census(engine.host, self._old, engine.rank, before.buffers, "before registering")
        mine = sorted({kind for kind, _ in before.buffers})
        held = self._session.reduce("kinds", mine, lambda one, other: sorted({*one, *other}))
        self._held = self._old.present_kinds(among=held)
        self._digests, _ = side_digests(self._old, self._layout, engine.rank, before.buffers, self._held)

    @property
    def regrouping(self) -> Regrouping:
        return self._asked

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """State kinds of the new groups. They include moments that no group needed before."""
        known = {kind.name for kind in self._old.kinds}
        return tuple(
            kind
            for kind in self._engine.vps.present_kinds()
            if kind in self._held or (self._begun and kind not in known)
        )

    def memory(self, memory: Mapping[str, Memory]) -> dict[str, Memory]:
        return {kind: memory[kind] for kind in self.kinds}

    def fill(self, rank: int, buffers: Buffers) -> None:
        """Fill the new buffers. Moments of newly trained tensors stay zero, and their masters are cast from the
        weights."""
        vps, old, layout, was_held = self._engine.vps, self._old, self._layout, self._held
        weights = pieces_by_tensor(old, layout, rank, WEIGHT)
        masters = pieces_by_tensor(vps, layout, rank, MASTER, owned=True) if MASTER in self.kinds else {}
        for kind in self.kinds:
            if kind not in was_held:
                continue
            here = weights if kind == WEIGHT else pieces_by_tensor(old, layout, rank, kind)
            there = pieces_by_tensor(vps, layout, rank, kind)
            for number, before, anew in self._tensors(kind):
                if (anew and kind != MASTER) or before not in weights:  # held by other stages or experts
                    continue
                source, rows = (WEIGHT, weights) if anew else (kind, here)
                first, value = self._value(source, before, rows.get(before, []))
                for start, numel, name, offset in there.get(number, ()):
                    buffers[kind, name].narrow(0, offset, numel).copy_(value.narrow(0, start - first, numel))
                for start, numel, name, _ in masters.get(number, ()) if anew else ():
                    values = value.narrow(0, start - first, numel).to(buffers[kind, name].dtype)
                    self._masters[[number]] += np.uint64(digest(values, start))

    def _tensors(self, kind: str) -> Iterator[tuple[int, int, bool]]:
        """Yield, for each tensor that has a state kind, its new index, its old index, and whether its values in this
        kind are newly created."""
        vps, old = self._engine.vps, self._old
        for number, tensor in enumerate(vps.tensors):
            if (tensor.trainable or kind == WEIGHT) and vps.kind(kind).is_of(tensor.group):
                before = old.line.index(tensor.name)
                yield number, before, kind != WEIGHT and not old.tensors[before].trainable

    def _value(self, kind: str, number: int, rows: Sequence[Place]) -> tuple[int, torch.Tensor]:
        """Return the elements of one tensor in one state kind, and the index of the first of them. Elements that no
        rank of the ZeRO group holds are zero.

        Under stage 3 the result contains only the part that this rank holds, which does not change. Under other stages
        it contains all elements, gathered from the ranks among which ZeRO divides the tensor.

        number: the index of the tensor.
        rows: the parts of the tensor that this rank holds.
        """
        vps, buffers = self._old, self._before.buffers
        tensor, is_cut = vps.tensors[number], self._layout.zero_stage == 3
        first = min((row[0] for row in rows), default=0) if is_cut else 0
        stop = max((row[0] + row[1] for row in rows), default=0) if is_cut else tensor.numel
        value = torch.zeros(stop - first, dtype=self._engine.host.element_types.of(kind))
        for row in rows:
            start, numel, name, offset = row
            value.narrow(0, start - first, numel).copy_(buffers[kind, name].narrow(0, offset, numel))
        group = self._goal.world.group("expert_data" if tensor.expert else "data")
        if group.size() > 1 and not is_cut and not vps.is_replicated(self._layout, kind):
            # ranks that lack an element have zeros there, so the maximum of each byte is that of the value
            td.all_reduce(value.view(torch.uint8), td.ReduceOp.MAX, group=group)
        return first, value

    def shared(self) -> dict[str, Any]:
        """Return the extra state that is equal on all members. Newly trained tensors get the step counts of a new
        optimizer's state."""
        old, optimizer, model = self._old, self._engine.host.basic_optimizer, self._engine.host.model_map
        scalars: dict[str, dict[str, float]] = {}
        for number, tensor in enumerate(model.tensors[: model.trainable]):
            before = old.line.index(tensor.name)
            held: Mapping[str, float] = self._before.scalars.of(before)
            if self._begun and not old.tensors[before].trainable:
                first = rule_of(optimizer).scalars_of(optimizer.param_groups[tensor.group])
                held = {name: float(value) for name, value in first.items()}
            for name, value in held.items():
                scalars.setdefault(name, {})[str(number)] = value
        return {**self._before.shared, "scalars": scalars}

    def prove(self, rank: int, buffers: Buffers, kinds: Sequence[str]) -> str:
        """Return the digest of the whole state, after proving that all its tensors are unchanged on all members.

        Raises CertificateError unless each tensor has the same digest as before, in each state kind. Newly trained
        tensors must have zero moments, and masters that equal their weights.
        """
        new, old, layout, session = self._engine.vps, self._old, self._layout, self._session
        mine, _ = side_digests(new, layout, rank, buffers, tuple(kinds))
        before = agreed(session, "before", old, layout, rank, self._digests, "before")
        after = agreed(session, "after", new, layout, rank, mine, "after")
        masters = session.reduce("masters", self._masters, np.add)
        for kind in kinds:
            for number, was, anew in self._tensors(kind):
                wanted = int(before[kind][was]) if kind in before else 0
                if anew:
                    wanted = 0 if kind != MASTER else int(masters[number])
                if int(after[kind][number]) != wanted:
                    raise CertificateError(f"{kind} of {new.tensors[number].name!r} is not what it was, or is to be")
        return state_digest(after)
