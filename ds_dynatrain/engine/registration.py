"""`engine.update_param_groups`: what is trained, and in which groups, changes in the same world and layout.

Like a switch it is a transaction. All working members judge the same records; each fills new buffers, puts a new
optimizer over them, and reports digests per tensor; the outcome is written once. Before that a failure puts the old
optimizer back over the old buffers. Idle members read the record when they are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as td

from ds_dynatrain.adapters.incoming import Place, pieces_by_tensor
from ds_dynatrain.adapters.memory import provide, zeros
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.optimizers import rule_of
from ds_dynatrain.adapters.regroup import NewGroup, Regrouping, Wanted, regroup, wanted_of
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.adapters.schedulers import Lists, follow, lists_per_group, put_lists_back
from ds_dynatrain.adapters.state import Buffers, Scalars
from ds_dynatrain.adapters.support import refuse_at_boundary
from ds_dynatrain.engine import feasible
from ds_dynatrain.engine.carry import put_back, settle_counters, shared_carry
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.digests import Digests, SideDigests, side_digests
from ds_dynatrain.engine.encoding import fingerprint
from ds_dynatrain.engine.requires_grad import with_others
from ds_dynatrain.engine.space import space_of
from ds_dynatrain.engine.transaction.certificate import agreed
from ds_dynatrain.engine.transaction.session import Request, Session
from ds_dynatrain.engine.transaction.swap import Swap
from ds_dynatrain.errors import CertificateError, CheckpointError, OutcomeUnknown, SwitchFailed, SwitchRefused
from ds_dynatrain.space import MASTER, WEIGHT, LogicalTensor, VirtualParameterSpace, is_partitioned
from ds_dynatrain.transfer import digest

STAYS = ("counters", "windows", "epoch", "scaling", "loaders")
"""Parts of the carry that a registration leaves as they are."""


def register(engine: EngineCore, place: str, groups: Sequence[Mapping[str, Any]], is_open: str) -> bool:
    """Carry out what has changed; False if nothing has. See `DynatrainEngine.update_param_groups`.

    place: where in the training it is asked, the same on all members. is_open: what stands in the way on this member,
    in words.
    """
    host = engine.host
    key = f"register/{place}"
    session = Session(engine.control, key, engine.members, "update_param_groups")
    refusal: SwitchRefused | None = None
    wanted, asked = Wanted({}, (), False), None
    try:
        if is_open:
            raise SwitchRefused(is_open, "call it after engine.step(), with no switch pending")
        refuse_at_boundary(host)
        wanted = wanted_of(host.model_map, host.module, groups, _has_begun(engine))
    except SwitchRefused as refused:
        refusal = refused
    try:
        if is_partitioned(engine.layout):
            wanted = with_others(session, wanted)
        if refusal is None:
            asked = _asked(engine, wanted)
    except SwitchRefused as refused:
        refusal = refusal or refused
    request = Request(
        {"groups": None if asked is None else asked.to_json()},
        None if refusal is None else (refusal.reason, refusal.way_out),
    )
    session.agree(request, None, SwitchRefused, _differ)
    if asked is None:
        return False
    _Registration(engine, asked, session, wanted.begun).run()
    return True


def _asked(engine: EngineCore, wanted: Wanted) -> Regrouping | None:
    """The groups that are to be, None if they are already; SwitchRefused for what cannot be."""
    host = engine.host
    asked = regroup(host.model_map, host.basic_optimizer, wanted)
    if asked is not None:
        flags = zip(host.model_map.tensors, host.model_map.requires_grad, strict=True)
        host.shaper.refuse_to_train(set(asked.requires_grad).difference(each.name for each, was in flags if was))
        lists_per_group(host.lr_scheduler, len(host.basic_optimizer.param_groups))
    return asked


def _differ(one: int, other: int, asked: Mapping[int, Any]) -> str:
    return f"members {one} and {other} register different parameters or groups"


def catch_up(engine: EngineCore) -> None:
    """On an idle member: take over what the working members have registered meanwhile."""
    while (record := engine.control.read(f"registration/{len(engine.registered) + 1}")) is not None:
        repeat(engine, [record])


def repeat(engine: EngineCore, records: Sequence[dict[str, Any]]) -> None:
    """On an idle member: register what the job has registered, in its order."""
    for record in records:
        Adoption(engine, Regrouping.from_json(record)).make()
        engine.registered.append(record)


def note(engine: EngineCore, asked: Regrouping) -> None:
    """Count a registration that is committed; idle members read it on the board (`catch_up`)."""
    engine.registered.append(asked.to_json())
    engine.control.decide(f"registration/{len(engine.registered)}", asked.to_json())


def registration_of(engine: EngineCore) -> Regrouping:
    """What is trained and in which groups, as a checkpoint says it: origins are the groups that `initialize` made."""
    model = engine.host.model_map
    groups = [NewGroup(first, False, names) for first, names in zip(_origins(engine), model.group_names, strict=True)]
    flags = zip(model.tensors, model.requires_grad, strict=True)
    return Regrouping(tuple(groups), tuple(tensor.name for tensor, flag in flags if flag))


def regrouping_to(engine: EngineCore, saved: Regrouping) -> Regrouping | None:
    """The registration that leads from the present groups to those of a checkpoint; None if these are the same.

    None, too, for a checkpoint of another model. CheckpointError, naming the parameter, where it cannot be.
    """
    model, present = engine.host.model_map, registration_of(engine)
    flags = {tensor.name: flag for tensor, flag in zip(model.tensors, model.requires_grad, strict=True)}
    wanted = {name for group in saved.groups for name in group.names}.union(saved.requires_grad)
    listed = [group.names for group in saved.groups]
    trained = {name for name, flag in flags.items() if flag}
    is_same = listed == [group.names for group in present.groups] and trained == {*saved.requires_grad}
    if is_same or not wanted <= flags.keys():
        return None
    try:
        engine.host.shaper.refuse_to_train({*saved.requires_grad} - trained)
        lists_per_group(engine.host.lr_scheduler, len(model.groups))
    except SwitchRefused as refused:
        changed = sorted(trained.symmetric_difference(saved.requires_grad)) or sorted(wanted)
        raise CheckpointError(
            f"{changed[0]!r} was registered anew by the job that saved it, and this cannot be repeated here: "
            f"{refused.reason}; {refused.way_out}"
        ) from None
    origins, groups = _origins(engine), list[NewGroup]()
    for group in saved.groups:
        if group.origin not in origins:
            raise CheckpointError(
                f"{group.names[0]!r} is in an optimizer group that comes from group {group.origin} of initialize, "
                f"which this job does not have any more; start the job anew, with dynatrain.resume"
            )
        at = origins.index(group.origin)
        groups.append(NewGroup(at, any(at == each.origin for each in groups), group.names))
    return Regrouping(tuple(groups), tuple(name for name in flags if name in saved.requires_grad))


def _origins(engine: EngineCore) -> list[int]:
    """For each present group the number of the group of `initialize` that it comes from."""
    origins: list[int] | None = None
    for record in engine.registered:
        step = Regrouping.from_json(record).origins
        origins = step if origins is None else [origins[each] for each in step]
    return list(range(len(engine.host.model_map.groups))) if origins is None else origins


def _has_begun(engine: EngineCore) -> bool:
    """Whether the optimizer has states, on some member: one without a part of any whole tensor has none of these."""
    optimizer = engine.host.basic_optimizer
    stepped = bool(rule_of(optimizer).whole_tensors) and engine.global_steps > 0
    return stepped or any(bool(state) for state in optimizer.state.values())


def _model_after(engine: EngineCore, asked: Regrouping) -> ModelMap:
    return engine.host.model_map.regrouped([group.names for group in asked.groups], set(asked.requires_grad))


def _whole_tensors(vps: VirtualParameterSpace, model: ModelMap) -> tuple[LogicalTensor, ...]:
    """The logical tensors in the order and the groups of a rank's local ones."""
    return tuple(replace(vps.tensors[vps.line.index(each.name)], group=each.group) for each in model.tensors)


class Adoption:
    """Other optimizer groups on an engine whose optimizer is off, and the present ones back again.

    The constructor notes the present ones: model and space, the optimizer's dictionaries with what is in them, and the
    scheduler's lists. SwitchRefused for a scheduler of another class.
    """

    def __init__(self, engine: EngineCore, asked: Regrouping) -> None:
        self._engine, self._asked, host = engine, asked, engine.host
        self.model, self.vps = host.model_map, engine.vps
        self._groups = [(group, dict(group)) for group in host.basic_optimizer.param_groups]
        self._lists: Lists = lists_per_group(host.lr_scheduler, len(self._groups))

    def make(self, vps: VirtualParameterSpace | None = None) -> None:
        """Make the new groups those of the optimizer; a group that lives on is the same dictionary.

        What requires a gradient is set for parameters of other members, too. vps: the new space, if it is known.
        """
        engine, asked, host = self._engine, self._asked, self._engine.host
        model = _model_after(engine, asked)
        for parameter, flag in zip(model.parameters, model.requires_grad, strict=True):
            parameter.requires_grad_(flag)
        present = list(host.basic_optimizer.param_groups)
        wanted = asked.groups_of(present, model.named)
        for group, values in zip(asked.groups, wanted, strict=True):
            if not group.fresh:
                present[group.origin].update(values)
        groups = [
            values if group.fresh else present[group.origin] for group, values in zip(asked.groups, wanted, strict=True)
        ]
        host.adopt(model, groups)
        follow(self._lists, asked.origins)
        tensors = _whole_tensors(self.vps, model)
        engine.adopt_space(space_of(engine, engine.layout, engine.members, tensors) if vps is None else vps)

    def undo(self) -> None:
        """Put back what was there; the optimizer is off again, or still."""
        engine = self._engine
        self.require_as_before()
        for (group, values), listed in zip(self._groups, self.model.groups, strict=True):
            group.clear()
            group.update({**values, "params": list(listed)})
        engine.host.adopt(self.model, [group for group, _ in self._groups])
        put_lists_back(self._lists)
        engine.adopt_space(self.vps)

    def require_as_before(self) -> None:
        """Set what requires a gradient as it was registered."""
        for parameter, was in zip(self.model.parameters, self.model.requires_grad, strict=True):
            parameter.requires_grad_(was)


@dataclass
class _Old:
    """What is put back if it fails."""

    model: ModelMap
    vps: VirtualParameterSpace
    buffers: Buffers
    scalars: Scalars
    shared: dict[str, Any]


class _Registration:
    """The transaction on one working member."""

    def __init__(self, engine: EngineCore, asked: Regrouping, session: Session, begun: bool) -> None:
        self.engine, self.asked, self.session, host = engine, asked, session, engine.host
        self.control, self.layout = engine.control, engine.layout
        if engine.world is None:
            raise RuntimeError("an idle member has nothing to register")
        self.world = engine.world
        self.adoption = Adoption(engine, asked)
        host.settle_parameters()
        buffers, scalars = host.state_buffers()
        self.old = _Old(host.model_map, engine.vps, buffers, scalars, shared_carry(engine, scalars))
        self.kinds: tuple[str, ...] = ()
        self.begun = begun
        self.new_kinds: tuple[str, ...] = ()
        self.swap = Swap(engine)
        self.swap.on_undo(self.adoption.require_as_before)

    def run(self) -> None:
        """Everything or nothing, on all members alike; SwitchFailed if it is nothing."""
        try:
            decision = self.session.vote(self._carry_out)
        except OutcomeUnknown:
            self.swap.undo()
            raise
        if decision.commit:
            note(self.engine, self.asked)
            self.swap.keep()
        else:
            self.swap.undo()
        if self.swap.has_begun and self.engine.host.compilations.count:
            self.engine.host.compilations.forget()
        decision.raise_interrupt()
        if not decision.commit:
            raise SwitchFailed(f"update_param_groups: {decision.reason}; the engine goes on as before it")

    def _carry_out(self) -> None:
        """Rebuild, and compare both sides."""
        engine, host, old = self.engine, self.engine.host, self.old
        self.kinds = self._kinds_held()
        check_census(host, old.vps, engine.rank, old.buffers, "before registering")
        digests, _ = side_digests(old.vps, self.layout, engine.rank, old.buffers, self.kinds)
        model = _model_after(engine, self.asked)
        groups = self.asked.groups_of(host.basic_optimizer.param_groups, model.named)
        with replaced(host.basic_optimizer, "param_groups", groups):
            vps = space_of(engine, self.layout, engine.members, _whole_tensors(old.vps, model))
            scalars = self._scalars_after(model)
        self.new_kinds = self._kinds_of(vps)
        self._check_memory(vps)
        target, expected = self._filled(vps)
        self.swap.off(self._back)
        self.adoption.make(vps)
        self.swap.on_undo(host.detach)
        host.attach(self.layout, self.world, host.present_config, target, scalars)
        settle_counters(engine, old.shared)
        held, found = host.state_buffers()
        check_census(host, vps, engine.rank, held, "after registering")
        if found.values != scalars.values:
            raise CertificateError("the optimizer's counts are not those that were put in")
        shared = shared_carry(engine, found)
        lost = [part for part in STAYS if fingerprint(shared[part]) != fingerprint(old.shared[part])]
        if lost:
            raise CertificateError(f"{', '.join(lost)}: not the same after registering")
        after, _ = side_digests(vps, self.layout, engine.rank, held, self.new_kinds)
        self._verify(digests, after, expected, fingerprint(shared))

    def _kinds_held(self) -> tuple[str, ...]:
        """The kinds that some member holds now."""
        mine = sorted({kind for kind, _ in self.old.buffers})
        held = self.session.reduce("kinds", mine, lambda one, other: sorted({*one, *other}))
        return tuple(kind for kind in self.old.vps.present_kinds() if kind in held)

    def _kinds_of(self, vps: VirtualParameterSpace) -> tuple[str, ...]:
        """What the new side holds: a moment that only new groups have begins with them."""
        known = {kind.name for kind in self.old.vps.kinds}
        return tuple(kind for kind in vps.present_kinds() if kind in self.kinds or (self.begun and kind not in known))

    def _check_memory(self, vps: VirtualParameterSpace) -> None:
        memory, need = self.engine.host.memory(self.new_kinds, self.layout), Counter[str]()
        for (kind, _), size in vps.local(self.layout, self.engine.rank).sizes().items():
            if kind in memory:
                need[memory[kind].place.device.type] += size * memory[kind].dtype.itemsize
        largest = max(tensor.numel for tensor in vps.tensors) * max(each.dtype.itemsize for each in memory.values())
        for device in {each.place.device.type for each in memory.values()}:
            need[device] += 2 * largest
        room = {(member, device): size for member in self.engine.members for device, size in need.items()}
        feasible.check_memory(self.control.member, room, self.engine.candidates.nodes)

    # ---- filling -------------------------------------------------------------------------------------------------

    def _filled(self, vps: VirtualParameterSpace) -> tuple[Buffers, dict[str, int]]:
        """(new buffers, with zeros for the moments of what is trained anew; digests of the latter's masters).

        The digests are of the part that this rank owns.
        """
        old, rank = self.old, self.engine.rank
        local = vps.local(self.layout, rank)
        target = provide(local, self.engine.host.memory(self.new_kinds, self.layout), set(), {}, zeros)
        weights = pieces_by_tensor(old.vps, self.layout, rank, WEIGHT)
        masters = pieces_by_tensor(vps, self.layout, rank, MASTER, owned=True) if MASTER in self.new_kinds else {}
        expected: dict[str, int] = {}
        for kind in self.new_kinds:
            if kind not in self.kinds:
                continue
            here = weights if kind == WEIGHT else pieces_by_tensor(old.vps, self.layout, rank, kind)
            there = pieces_by_tensor(vps, self.layout, rank, kind)
            for number, tensor in enumerate(vps.tensors):
                before = old.vps.line.index(tensor.name)
                anew = tensor.trainable and not old.vps.tensors[before].trainable and kind != WEIGHT
                if not (tensor.trainable or kind == WEIGHT) or not vps.has(kind, tensor.group):
                    continue
                if (anew and kind != MASTER) or before not in weights:  # of other stages, or other experts
                    continue
                source, rows = (WEIGHT, weights) if anew else (kind, here)
                first, value = self._value(source, before, rows.get(before, []))
                for start, numel, name, offset in there.get(number, ()):
                    target[kind, name].narrow(0, offset, numel).copy_(value.narrow(0, start - first, numel))
                for start, numel, name, _ in masters.get(number, ()) if anew else ():
                    values = value.narrow(0, start - first, numel).to(target[kind, name].dtype)
                    expected[tensor.name] = (expected.get(tensor.name, 0) + digest(values, start)) % (1 << 64)
        return target, expected

    def _value(self, kind: str, number: int, rows: Sequence[Place]) -> tuple[int, torch.Tensor]:
        """(first index, elements) of a tensor: under stage 3 this rank's part, which stays the same, else all that the
        ranks have among which ZeRO cuts it. What lies between parts is zeros.
        """
        vps, buffers = self.old.vps, self.old.buffers
        tensor, is_cut = vps.tensors[number], self.layout.zero_stage == 3
        first = min((row[0] for row in rows), default=0) if is_cut else 0
        stop = max((row[0] + row[1] for row in rows), default=0) if is_cut else tensor.numel
        value = torch.zeros(stop - first, dtype=self.engine.host.element_types.of(kind))
        for row in rows:
            value.narrow(0, row[0] - first, row[1]).copy_(_run(buffers, kind, row))
        group = self.world.group("expert_data" if tensor.expert else "data")
        if group.size() > 1 and not is_cut and not vps.is_replicated(self.layout, kind):
            # several may have an element, who has it not has zeros: the largest bytes are the value's
            td.all_reduce(value.view(torch.uint8), td.ReduceOp.MAX, group=group)
        return first, value

    def _scalars_after(self, model: ModelMap) -> Scalars:
        """The counts of each tensor; those of what is trained anew begin as the optimizer begins."""
        old, optimizer = self.old, self.engine.host.basic_optimizer
        values: dict[str, dict[int, float]] = {}
        for number, tensor in enumerate(model.tensors[: model.trainable]):
            before = old.vps.line.index(tensor.name)
            held = old.scalars.of(before)
            if self.begun and not old.vps.tensors[before].trainable:
                first = rule_of(optimizer).scalars_of(optimizer.param_groups[tensor.group])
                held = {name: float(value) for name, value in first.items()}
            for name, value in held.items():
                values.setdefault(name, {})[number] = value
        return Scalars(values)

    # ---- the end -------------------------------------------------------------------------------------------------

    def _verify(self, source: SideDigests, target: SideDigests, expected: Mapping[str, int], carry: str) -> None:
        """CertificateError unless every tensor has the digests that it had, per state kind, on all members."""
        carries = self.session.reduce("carry", [carry], lambda one, other: sorted({*one, *other})[:2])
        if len(carries) != 1:
            raise CertificateError("hyper-parameters, counts or the scheduler differ between members")
        new, old, rank = self.engine.vps, self.old.vps, self.engine.rank
        before = agreed(self.session, "before", old, self.layout, rank, source, "before")
        after = agreed(self.session, "after", new, self.layout, rank, target, "after")
        masters = self._masters(expected)
        for kind in self.new_kinds:
            for number, tensor in enumerate(new.tensors):
                if not (tensor.trainable or kind == WEIGHT) or not new.has(kind, tensor.group):
                    continue
                was = old.line.index(tensor.name)
                wanted = int(before[kind][was]) if kind in before else 0
                if kind != WEIGHT and not old.tensors[was].trainable:
                    wanted = 0 if kind != MASTER else int(masters[number])
                if int(after[kind][number]) != wanted:
                    raise CertificateError(f"{kind} of {tensor.name!r} is not what it was, or is to be")

    def _masters(self, expected: Mapping[str, int]) -> Digests:
        """The digests of new masters, which are their weights in the masters' type, from those of all owners."""
        new, mine = self.engine.vps, np.zeros(len(self.engine.vps.tensors), np.uint64)
        for name, value in expected.items():
            mine[new.line.index(name)] = value
        found: Digests = self.session.reduce("masters", mine, np.add)
        return found

    def _back(self) -> None:
        """The old optimizer over the old memory."""
        engine, old = self.engine, self.old
        self.adoption.undo()
        engine.host.attach(self.layout, self.world, engine.host.present_config, old.buffers, old.scalars)
        put_back(engine, old.shared)


def _run(buffers: Buffers, kind: str, place: Place) -> torch.Tensor:
    _, numel, name, offset = place
    return buffers[kind, name].narrow(0, offset, numel)
