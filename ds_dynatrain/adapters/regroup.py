"""What of a model is trained, and in which optimizer groups: what has changed since, and the groups that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.errors import SwitchRefused

Group = dict[str, Any]
LIKE = "like"
"""Key of an asked group: number of the present group whose hyper-parameters and schedule it takes."""


@dataclass(frozen=True)
class NewGroup:
    """A group after a registration.

    origin: the present group that it is, or whose hyper-parameters it takes. fresh: whether its state begins anew.
    names: its parameters, frozen ones too. values: hyper-parameters that differ from the origin's.
    """

    origin: int
    fresh: bool
    names: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Regrouping:
    """All groups after a registration, and the parameters that require a gradient; equal on all members."""

    groups: tuple[NewGroup, ...]
    requires_grad: tuple[str, ...]

    @property
    def origins(self) -> list[int]:
        """The origin of each new group."""
        return [group.origin for group in self.groups]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"groups": [asdict(group) for group in self.groups], "requires_grad": list(self.requires_grad)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Regrouping:
        """The inverse of `to_json`."""
        groups = [NewGroup(**{**group, "names": tuple(group["names"])}) for group in record["groups"]]
        return Regrouping(tuple(groups), tuple(record["requires_grad"]))

    def groups_of(self, present: Sequence[Group], parameters: Mapping[str, nn.Parameter]) -> list[Group]:
        """The optimizer's groups, as new dictionaries."""
        return [
            {**present[group.origin], **group.values, "params": [parameters[name] for name in group.names]}
            for group in self.groups
        ]


def regroup(
    model: ModelMap,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    asked: Sequence[Mapping[str, Any]],
    begun: bool,
) -> Regrouping | None:
    """The groups that follow from the parameters' present `requires_grad` and the asked groups; None: as they are.

    A newly trainable parameter goes into a new group of its own, with the hyper-parameters of the group that it was
    listed in: ZeRO counts steps once per group. Before the first step (`begun` false) it stays in that group.
    SwitchRefused, naming the parameter, for what cannot be.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    strange = _strange(model, module)
    if strange is not None:
        raise SwitchRefused(strange, "add parameters before initialize, frozen if need be; change their data in place")
    trained = {id(parameter) for parameter in model.parameters[: model.trainable]}
    newly = {
        id(parameter)
        for parameter, was in zip(model.parameters, model.requires_grad, strict=True)
        if parameter.requires_grad and not was and id(parameter) not in trained
    }
    wanted = [_asked(group, names, trained, model, optimizer) for group in asked]
    explicit = {id(parameter) for parameters, *_ in wanted for parameter in parameters}
    kept, fresh = [], []
    for number, listed in enumerate(model.groups):
        moved = [each for each in listed if id(each) in newly - explicit] if begun else []
        gone = {id(each) for each in moved} | explicit
        stay = [each for each in listed if id(each) not in gone]
        if any(each.requires_grad for each in stay):
            kept.append(NewGroup(number, False, tuple(names[id(each)] for each in stay)))
        if moved:
            fresh.append(NewGroup(number, True, tuple(names[id(each)] for each in moved)))
    placed = {name for group in (*kept, *fresh) for name in group.names}
    lost = [names[key] for key in names if key in newly - explicit and names[key] not in placed]
    if lost:
        raise SwitchRefused(
            f"{lost[0]!r} requires a gradient now and is listed in no optimizer group",
            "name one: engine.update_param_groups(groups=[{'params': [...], 'like': 0}])",
        )
    fresh += [NewGroup(like, True, tuple(names[id(each)] for each in held), more) for held, like, more in wanted]
    if not kept and not fresh:
        raise SwitchRefused("no parameter requires a gradient any more", "leave one trainable")
    _check_fresh(optimizer, fresh, begun)
    after = Regrouping((*kept, *fresh), tuple(name for name, each in module.named_parameters() if each.requires_grad))
    return None if after == _present(model, names) else after


def changes(
    model: ModelMap, module: nn.Module, optimizer: torch.optim.Optimizer, plain: bool
) -> tuple[str, str] | None:
    """What is not as it was registered, if anything: (row of the support table, what it is about, by name).

    plain: whether the optimizer steps the parameters themselves (ZeRO stage 0 in fp32).
    """
    strange = _strange(model, module)
    if strange is not None:
        return "parameters", strange
    for tensor, parameter, was in zip(model.tensors, model.parameters, model.requires_grad, strict=True):
        if parameter.requires_grad != was:
            now = "requires a gradient now" if parameter.requires_grad else "is frozen now"
            return "requires_grad", f"{tensor.name!r} {now}"
    if len(optimizer.param_groups) != len(model.groups):
        have = f"the optimizer has {len(optimizer.param_groups)} groups and had {len(model.groups)}"
        return "optimizer groups", have
    known = {id(parameter): tensor.name for parameter, tensor in zip(model.parameters, model.tensors, strict=True)}
    for number, (group, listed) in enumerate(zip(optimizer.param_groups, model.groups, strict=True)):
        found = {id(each) for each in group["params"]} & known.keys()
        other = found ^ ({id(each) for each in listed} if plain else set())
        if other:
            return "optimizer groups", f"{known[min(other)]!r} was put into group {number}, or taken out"
    return None


def _strange(model: ModelMap, module: nn.Module) -> str | None:
    """A parameter that is not the object that was registered, in words."""
    known = {id(parameter): tensor.name for parameter, tensor in zip(model.parameters, model.tensors, strict=True)}
    seen = set()
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            return f"{name!r} is new in the model, or another object than at initialize"
        seen.add(id(parameter))
    elsewhere = {
        id(parameter) for tensor, parameter in zip(model.tensors, model.parameters, strict=True) if not tensor.numel
    }
    missing = [name for key, name in known.items() if key not in seen | elsewhere]
    return f"{missing[0]!r} is no longer in the model" if missing else None


def _asked(
    group: Mapping[str, Any],
    names: Mapping[int, str],
    trained: set[int],
    model: ModelMap,
    optimizer: torch.optim.Optimizer,
) -> tuple[list[nn.Parameter], int, dict[str, Any]]:
    """(parameters, origin, other hyper-parameters) of an asked group."""
    held = group.get("params", ())
    parameters: list[nn.Parameter] = [held] if isinstance(held, nn.Parameter) else list(held)
    more = {key: value for key, value in group.items() if key not in ("params", LIKE)}
    if not parameters:
        raise SwitchRefused("a group without parameters was given", "give {'params': [...]}")
    for each in parameters:
        if id(each) not in names:
            raise SwitchRefused(
                f"a group holds a parameter of shape {tuple(each.shape)} that is not in the model",
                "add parameters before initialize, frozen if need be",
            )
        if not each.requires_grad or id(each) in trained:
            state = "is trained already" if id(each) in trained else "is frozen"
            raise SwitchRefused(f"{names[id(each)]!r} {state}", "groups= is for newly trainable parameters")
    like = group.get(LIKE)
    if like is None:
        mine = {id(each) for each in parameters}
        listed = {number for number, old in enumerate(model.groups) if any(id(each) in mine for each in old)}
        like = listed.pop() if len(listed) == 1 else (0 if len(model.groups) == 1 else None)
    if isinstance(like, bool) or not isinstance(like, int) or not 0 <= like < len(model.groups):
        raise SwitchRefused(
            f"the group of {names[id(parameters[0])]!r} does not say which present group it is like ({like!r})",
            f"give 'like': a number from 0 to {len(model.groups) - 1}",
        )
    unknown = sorted(set(more) - set(optimizer.param_groups[like]))
    if unknown:
        raise SwitchRefused(f"group {like} of the optimizer has no {unknown[0]!r}", "leave it out")
    return parameters, like, more


def _check_fresh(optimizer: torch.optim.Optimizer, fresh: Sequence[NewGroup], begun: bool) -> None:
    """SwitchRefused where zeros are not how the optimizer begins."""
    for group in fresh:
        settings = {**optimizer.param_groups[group.origin], **group.values}
        if begun and settings.get("dampening"):
            raise SwitchRefused(
                f"{group.names[0]!r}: with dampening a momentum does not begin as zeros", "set dampening to 0"
            )


def _present(model: ModelMap, names: Mapping[int, str]) -> Regrouping:
    groups = [
        NewGroup(number, False, tuple(names[id(each)] for each in listed)) for number, listed in enumerate(model.groups)
    ]
    flags = {id(each): was for each, was in zip(model.parameters, model.requires_grad, strict=True)}
    return Regrouping(tuple(groups), tuple(name for key, name in names.items() if flags[key]))
