"""A root module that stays, and gets other children: what all rebuilds of a module have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.device import HOST, compute_device
from ds_dynatrain.adapters.no_alloc import stand_in
from ds_dynatrain.adapters.template import HOOKS

_TABLES = ("_modules", "_parameters")


@dataclass(frozen=True, eq=False)
class Made:
    """Children for a root module, in a module of their own on the meta device, and what is to be set on the root."""

    module: nn.Module
    on_root: Mapping[str, Any] = field(default_factory=dict)


def with_memory(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give every parameter on the meta device memory that nobody has written to, of type `dtype`.

    Tied parameters stay tied; flags and attributes of a parameter stay with it, its hooks do not. Memory of the host
    that is not touched costs no time, and no page of it exists yet; on an accelerator there is none either.
    """
    device = compute_device()

    def memory(held: nn.Parameter) -> torch.Tensor:
        return torch.empty(held.shape, dtype=dtype) if device == HOST else stand_in(held.shape, dtype, device)

    return _over(module, memory)


def without_memory(module: nn.Module) -> nn.Module:
    """Give every parameter its shape and one element: its values are elsewhere. Tied ones stay tied."""
    return _over(module, lambda held: stand_in(held.shape, held.dtype, compute_device()))


def _over(module: nn.Module, memory: Callable[[nn.Parameter], torch.Tensor]) -> nn.Module:
    """Put a new parameter over `memory(parameter)` in the place of each; what is set on it stays."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, held in part._parameters.items():
            if held is None:
                continue
            if id(held) not in made:
                made[id(held)] = nn.Parameter(memory(held), requires_grad=held.requires_grad)
                made[id(held)].__dict__.update(held.__dict__)
            part._parameters[name] = made[id(held)]
    return module


def adopt(root: nn.Module, made: nn.Module) -> None:
    """Give `root` the children and parameters of `made`, which must not be used afterwards; its buffers are its own."""
    for table in _TABLES:
        setattr(root, table, getattr(made, table))


def pass_hooks_on(old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    """Give modules the hooks that users put on those of the same name before them.

    They share one table, so the handle that removes a hook is good for both. A hook that is a method of one of the old
    modules becomes that of its heir.
    """
    heirs = {id(part): new[name] for name, part in old.items() if name in new}
    for name, part in old.items():
        for table in HOOKS:
            hooks = part.__dict__.get(table)
            if hooks and name in new:
                moved = {key: _moved(hook, heirs) for key, hook in hooks.items()}
                same = all(moved[key] is hook for key, hook in hooks.items())
                new[name].__dict__[table] = hooks if same else type(hooks)(moved)


def _moved(hook: Any, heirs: Mapping[int, nn.Module]) -> Any:
    if isinstance(hook, MethodType) and id(hook.__self__) in heirs:
        return MethodType(hook.__func__, heirs[id(hook.__self__)])
    return hook
