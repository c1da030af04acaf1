"""Registration of the trained parameters and optimizer groups of a model, and how changes of them are recorded and
applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_dynatrain.adapters.model.shaping import partition_of, rules_of
from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.adapters.zero.optimizers import moment_kinds
from ds_dynatrain.adapters.zero.regroup import Lists, NewGroup, Regrouping, follow, lists_per_group
from ds_dynatrain.errors import CheckpointError, SwitchRefused
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import STATE, Layout, LogicalTensor, Partition, VirtualParameterSpace, standard_kinds


def space_of(
    engine: EngineCore, layout: Layout, members: tuple[int, ...], tensors: tuple[LogicalTensor, ...] | None = None
) -> VirtualParameterSpace:
    """Return the Virtual Parameter Space of a model under a layout: all logical tensors, and the rules that cut them.

    The rules come from DeepSpeed's own reading of the configuration.

    tensors: the logical tensors, not cut along any axis; by default those of the module, which must not be cut yet.
    """
    tensors = tensors or engine.host.model_map.tensors
    names, shaper = tuple(tensor.name for tensor in tensors), engine.host.shaper
    types = engine.host.element_types
    moments, offloads = moment_kinds(engine.host.basic_optimizer, types), engine.deepspeed.zero_use_cpu_optimizer()
    there = [name for name, row in STATE.items() if row.is_gradient and (offloads or not row.is_offloaded)]
    gradients = {name: types.of(name).itemsize for name in there}
    kinds = standard_kinds(types.weight.itemsize, types.master.itemsize, moments, **gradients)

    def partition(target: Layout) -> Partition:
        return partition_of(shaper, names, target)

    return VirtualParameterSpace.of(tensors, rules_of(engine.host), kinds, layout, members, partition)


def catch_up(engine: EngineCore) -> None:
    """Apply the changes of trained parameters and groups that working members have made since this member became idle.
    Called on idle members."""
    while (record := engine.control.read(f"registration/{len(engine.registered) + 1}")) is not None:
        repeat(engine, [record])


def repeat(engine: EngineCore, records: Sequence[dict[str, Any]]) -> None:
    """Apply recorded changes of trained parameters and groups, in the order of the records. Called on idle members."""
    for record in records:
        Adoption(engine, Regrouping.from_json(record)).make()
        engine.registered.append(record)


def note(engine: EngineCore, asked: Regrouping) -> None:
    """Record a committed change of trained parameters and groups, and post it for idle members, which read it in
    `catch_up`."""
    engine.registered.append(asked.to_json())
    engine.control.decide(f"registration/{len(engine.registered)}", asked.to_json())


def registration_of(engine: EngineCore) -> Regrouping:
    """Return which parameters are trained and in which groups, in the form that a checkpoint stores.

    In the result, the origin of a group is the index of the group passed to `initialize` from which it descends.
    """
    model = engine.host.model_map
    groups = [NewGroup(first, False, names) for first, names in zip(_origins(engine), model.group_names, strict=True)]
    flags = zip(model.tensors, model.requires_grad, strict=True)
    return Regrouping(tuple(groups), tuple(tensor.name for tensor, flag in flags if flag))


def regrouping_to(engine: EngineCore, saved: Regrouping) -> Regrouping | None:
    """Return the change that turns the current parameter groups into those of a checkpoint.

    Returns None if the groups are the same, or if the checkpoint belongs to another model. Raises CheckpointError,
    naming the parameter, if no change can produce the checkpoint's groups.
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
        lists_per_group(engine.deepspeed.lr_scheduler, len(model.groups))
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
    """Return, for each current group, the index of the group passed to `initialize` from which it descends."""
    origins: list[int] | None = None
    for record in engine.registered:
        step = Regrouping.from_json(record).origins
        origins = step if origins is None else [origins[each] for each in step]
    return list(range(len(engine.host.model_map.groups))) if origins is None else origins


class Adoption:
    """Replacement of an engine's optimizer groups while its optimizer is detached, in a way that can be undone.

    The constructor saves the current groups: the model's tensors, the optimizer's dictionaries with their contents, and
    the scheduler's lists. It raises SwitchRefused for a scheduler of an unknown class.
    """

    def __init__(self, engine: EngineCore, asked: Regrouping) -> None:
        self._engine, self._asked, host = engine, asked, engine.host
        self.model, self.vps = host.model_map, engine.vps
        self._groups = [(group, dict(group)) for group in host.basic_optimizer.param_groups]
        self._lists: Lists = lists_per_group(host.engine.lr_scheduler, len(self._groups))

    def make(self) -> None:
        """Replace the optimizer's groups. A group that continues keeps its dictionary object.

        `requires_grad` is also set on parameters that this member does not hold.
        """
        engine, asked, host = self._engine, self._asked, self._engine.host
        model = host.model_map.regrouped([group.names for group in asked.groups], set(asked.requires_grad))
        require_as(model)
        present = host.basic_optimizer.param_groups
        groups = [
            {**present[group.origin], **group.values} if group.fresh else present[group.origin]
            for group in asked.groups
        ]
        host.adopt(model, groups)
        follow(self._lists, asked.origins)
        line = self.vps.line
        tensors = tuple(replace(self.vps.tensors[line.index(each.name)], group=each.group) for each in model.tensors)
        engine.adopt_space(space_of(engine, engine.layout, engine.members, tensors))

    def undo(self) -> None:
        """Restore the previous groups. The optimizer must be detached."""
        engine = self._engine
        require_as(self.model)
        for group, values in self._groups:
            group.clear()
            group.update(values)
        engine.host.adopt(self.model, [group for group, _ in self._groups])
        for scheduler, name, held in self._lists:
            setattr(scheduler, name, held)
        engine.adopt_space(self.vps)


def require_as(model: ModelMap) -> None:
    """Set `requires_grad` of every parameter to the value that is recorded in `model`."""
    for parameter, flag in zip(model.parameters, model.requires_grad, strict=True):
        parameter.requires_grad_(flag)
