"""Changes of the registered trainable parameters and optimizer groups, and of the schedulers that depend on the groups.

Schedulers keep lists with one entry per optimizer group. These lists are adjusted when groups are added or dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.support import usage

Group = dict[str, Any]
LIKE = "like"
"""Key, in a requested group, of the number of the existing group whose hyper-parameters and schedule it copies."""


@dataclass(frozen=True)
class NewGroup:
    """An optimizer group after a registration.

    origin: number of the existing group that this group continues, or whose hyper-parameters it copies.
    fresh: whether the group's optimizer state starts anew.
    names: names of the group's parameters, frozen ones included.
    values: hyper-parameters that differ from the origin's.
    """

    origin: int
    fresh: bool
    names: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Regrouping:
    """The optimizer groups after a registration, and the parameters that require a gradient. Equal on all members."""

    groups: tuple[NewGroup, ...]
    requires_grad: tuple[str, ...]

    @property
    def origins(self) -> list[int]:
        """Numbers of the existing groups that the new groups continue or copy, one for each new group."""
        return [group.origin for group in self.groups]

    def to_json(self) -> dict[str, Any]:
        """Return this record in the form in which registrations and checkpoints store it: plain JSON."""
        return cast("dict[str, Any]", to_record(self))

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Regrouping:
        """Return the regrouping that `to_json` recorded."""
        return from_record(Regrouping, record)


@dataclass(frozen=True)
class RegroupRequest:
    """The changes that one registration of parameters requests.

    requires_grad: a map from tensor name to whether the parameter requires a gradient from now on. Parameters that are
        not listed keep their flag.
    groups: for each requested group, the names of its parameters, and its other entries.
    begun: whether the optimizer already has states.
    """

    requires_grad: Mapping[str, bool]
    groups: tuple[tuple[tuple[str, ...], Group], ...]
    begun: bool


def wanted_of(model: ModelMap, module: nn.Module, groups: Sequence[Mapping[str, Any]], begun: bool) -> RegroupRequest:
    """Return the changes that the caller's `groups` and the `requires_grad` flags of this rank's parameters request.

    begun: whether the optimizer already has states.

    Raises SwitchRefused, naming the parameter, if the model map does not know a parameter.
    """
    strange = _foreign_parameter(model, module)
    if strange is not None:
        way_out = "add parameters before initialize, frozen if necessary; change their data in place"
        raise SwitchRefused(strange, way_out)
    names = {key: model.tensors[number].name for key, number in model.numbers.items()}
    asked = []
    for group in groups:
        rest = dict(group)
        held = rest.pop("params", ())
        parameters: list[nn.Parameter] = [held] if isinstance(held, nn.Parameter) else list(held)
        strays = [tuple(each.shape) for each in parameters if id(each) not in names]
        if strays:
            raise SwitchRefused(
                f"engine.update_param_groups: a group holds a parameter of shape {strays[0]} that is not in the model",
                "add parameters before initialize, frozen if necessary",
            )
        asked.append((tuple(names[id(each)] for each in parameters), rest))
    return RegroupRequest({names[id(each)]: each.requires_grad for each in module.parameters()}, tuple(asked), begun)


def regroup(model: ModelMap, optimizer: torch.optim.Optimizer, wanted: RegroupRequest) -> Regrouping | None:
    """Return the optimizer groups that result from a request; None if the groups do not change.

    A newly trainable parameter goes into a new group, with the hyper-parameters of the group in which it was listed,
    because ZeRO counts steps once per group. Before the first step, the parameter stays in its group. Raises
    SwitchRefused, naming the parameter, if the request is invalid.
    """
    names = [tensor.name for tensor in model.tensors]
    was = dict(zip(names, model.requires_grad, strict=True))
    now = {name: wanted.requires_grad.get(name, was[name]) for name in names}
    trained = set(names[: model.trainable])
    newly = [name for name in names if now[name] and not was[name] and name not in trained]
    asked = [_asked(listed, rest, now, trained, model, optimizer) for listed, rest in wanted.groups]
    explicit = {name for group in asked for name in group.names}
    implied, kept, fresh = set(newly) - explicit, list[NewGroup](), list[NewGroup]()
    for number, listed in enumerate(model.group_names):
        moved = [name for name in listed if name in implied] if wanted.begun else []
        stay = [name for name in listed if name not in explicit and name not in moved]
        if any(now[name] for name in stay):
            kept.append(NewGroup(number, False, tuple(stay)))
        if moved:
            fresh.append(NewGroup(number, True, tuple(moved)))
    placed = {name for group in (*kept, *fresh) for name in group.names}
    lost = next((name for name in newly if name in implied - placed), None)
    if lost is not None:
        raise SwitchRefused(
            f"engine.update_param_groups: {lost!r} requires a gradient now and is listed in no optimizer group",
            "name one: engine.update_param_groups(groups=[{'params': [...], 'like': 0}])",
        )
    fresh += asked
    if not kept and not fresh:
        raise SwitchRefused(
            "engine.update_param_groups: no parameter requires a gradient any more",
            "leave one trainable: parameter.requires_grad_(True)",
        )
    for group in fresh if wanted.begun else ():  # new states must be all zeros
        if {**optimizer.param_groups[group.origin], **group.values}.get("dampening"):
            raise SwitchRefused(
                f"{group.names[0]!r}: with dampening a momentum does not begin as zeros", "set dampening to 0"
            )
    after = Regrouping((*kept, *fresh), tuple(name for name in names if now[name]))
    before = [NewGroup(number, False, listed) for number, listed in enumerate(model.group_names)]
    return None if after == Regrouping(tuple(before), tuple(name for name in names if was[name])) else after


def refuse_changes(host: Any) -> None:
    """Raise SwitchRefused, naming the parameter, if trained parameters or their groups differ from the registration."""
    model, optimizer = host.model_map, host.basic_optimizer
    strange = _foreign_parameter(model, host.module)
    if strange is not None:
        raise usage("parameters").refused(strange)
    for tensor, parameter, was in zip(model.tensors, model.parameters, model.requires_grad, strict=True):
        if parameter.requires_grad != was:
            now = "requires a gradient now" if parameter.requires_grad else "is frozen now"
            raise usage("requires_grad").refused(f"{tensor.name!r} {now}")
    if len(optimizer.param_groups) != len(model.groups):
        have = f"the optimizer has {len(optimizer.param_groups)} groups and had {len(model.groups)}"
        raise usage("optimizer groups").refused(have)
    is_plain = host.optimizer is optimizer  # steps the parameters (ZeRO stage 0 in fp32)
    for number, (group, listed) in enumerate(zip(optimizer.param_groups, model.groups, strict=True)):
        found = {*map(id, group["params"])} & model.numbers.keys()
        other = found ^ {*map(id, listed if is_plain else ())}
        if other:
            name = model.tensors[model.numbers[min(other)]].name
            raise usage("optimizer groups").refused(f"{name!r} was put into group {number}, or taken out")


def _foreign_parameter(model: ModelMap, module: nn.Module) -> str | None:
    """Return a description of a parameter that is not the object that was registered; None if there is none."""
    present = set()
    for name, parameter in module.named_parameters():
        if id(parameter) not in model.numbers:
            return f"{name!r} is new in the model, or another object than at initialize"
        present.add(id(parameter))
    for tensor, parameter in zip(model.tensors, model.parameters, strict=True):
        if tensor.numel and id(parameter) not in present:  # a tensor without elements belongs to another rank
            return f"{tensor.name!r} is no longer in the model"
    return None


def _asked(
    names: tuple[str, ...],
    rest: Group,
    now: Mapping[str, bool],
    trained: Collection[str],
    model: ModelMap,
    optimizer: torch.optim.Optimizer,
) -> NewGroup:
    """Check one requested optimizer group and return it. Raises SwitchRefused, with the reason, if it cannot be added.

    names: the names of the group's parameters.
    rest: the group's other entries.
    now: a map from tensor name to whether it requires a gradient after the change.
    trained: the names of the tensors that were trained before.
    """
    more = dict(rest)
    like = more.pop(LIKE, None)
    if not names:
        raise SwitchRefused(
            "engine.update_param_groups: a group without parameters was given", "give {'params': [...]}"
        )
    for name in names:
        if not now[name] or name in trained:
            raise SwitchRefused(
                f"engine.update_param_groups: {name!r} {'is trained already' if name in trained else 'is frozen'}",
                "leave it out of groups=, which is for newly trainable parameters",
            )
    if like is None:
        listed = {number for number, old in enumerate(model.group_names) if not set(names).isdisjoint(old)}
        like = listed.pop() if len(listed) == 1 else (0 if len(model.groups) == 1 else None)
    if isinstance(like, bool) or not isinstance(like, int) or not 0 <= like < len(model.groups):
        raise SwitchRefused(
            f"the group of {names[0]!r} does not say which present group it is like ({like!r})",
            f"give 'like': a number from 0 to {len(model.groups) - 1}",
        )
    unknown = sorted(set(more) - set(optimizer.param_groups[like]))
    if unknown:
        raise SwitchRefused(
            f"engine.update_param_groups: group {like} of the optimizer has no {unknown[0]!r}",
            f"leave {unknown[0]!r} out of the new group",
        )
    return NewGroup(like, True, names, more)


KNOWN_MODULES = ("torch.optim.lr_scheduler", "deepspeed.runtime.lr_schedules")
PER_GROUP = """
    base_lrs _last_lr lr_lambdas min_lrs max_lrs base_momentums max_momentums
    delta_lrs org_lrs min_lr min_moms max_moms
""".split()
Lists = list[tuple[Any, str, list[Any]]]
"""Rows of (scheduler, name of an attribute, the list that is its value)."""


def lists_per_group(scheduler: Any, groups: int) -> Lists:
    """Return every list with one entry per group that a scheduler, or a scheduler inside it, holds.

    Raises SwitchRefused, naming the class, if a scheduler's lists are not known.
    """
    found: Lists = []
    for each in _all_of(scheduler):
        cls = type(each)
        if cls.__module__ not in KNOWN_MODULES:
            name = f"{cls.__module__}.{cls.__qualname__}"
            raise SwitchRefused(
                f"the scheduler is a {name}: what it keeps per optimizer group is not known",
                "use a scheduler of torch's or DeepSpeed's, or list all parameters in their groups at the start",
            )
        for name in PER_GROUP:
            held = each.__dict__.get(name)
            if isinstance(held, list):
                if len(held) != groups:
                    raise SwitchRefused(
                        f"{cls.__qualname__}.{name} has {len(held)} entries and the optimizer {groups} groups",
                        "add groups with engine.update_param_groups only",
                    )
                found.append((each, name, held))
    return found


def follow(lists: Lists, origins: Sequence[int]) -> None:
    """Adjust schedulers' lists to new optimizer groups: each new entry is a copy of the entry of the group's origin.

    origins: for each new group, the number of the existing group that it continues or copies.
    """
    for scheduler, name, held in lists:
        setattr(scheduler, name, [held[origin] for origin in origins])


def _all_of(scheduler: Any) -> Iterator[Any]:
    if scheduler is None:
        return
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all_of(inner)
