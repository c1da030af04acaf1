"""What modules keep besides parameters: buffers, `training`, extra state (`get_extra_state`), and attributes.

Buffers are taken as they are now: of another shape or type than the constructor made them, or registered since.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters import attributes
from ds_dynatrain.adapters.attributes import has_extra_state
from ds_dynatrain.adapters.device import compute_device

ModuleState = dict[str, Any]
"""buffers: by name; transient: the names of those that are in no state dict; extra: by name of the module.

modes: `training`, by name, of the module itself ("") and of each one below it whose mode is not its parent's. Empty if
nobody knows the modes. attributes: see `attributes.AttributeState`; not there if nobody knows them.

resized, if it is there: whether it is for modules of another tensor or expert size, so that of a buffer of another
shape only the module itself knows what is to be in it.
"""

EMPTY: Mapping[str, Any] = {"buffers": {}, "transient": [], "extra": {}, "modes": {}}


def state_of(module: nn.Module) -> ModuleState:
    """Return the state of a module and all below it, not copied."""
    parts = dict(module.named_modules())
    return {
        "buffers": {name: held.detach() for name, held in module.named_buffers()},
        "transient": sorted(
            f"{name}.{key}".lstrip(".") for name, part in parts.items() for key in part._non_persistent_buffers_set
        ),
        "extra": {name: part.get_extra_state() for name, part in parts.items() if has_extra_state(part)},
        "modes": {
            name: part.training
            for name, part in parts.items()
            if not name or part.training != parts[_parent(name)].training
        },
        "attributes": attributes.changed_of(module),
    }


def take_state(module: nn.Module, state: Mapping[str, Any], casts: bool = False) -> None:
    """Give a module, and those below it, what others of their names had.

    casts: whether floating-point buffers stay of the type that they have here. What the state says of modules that are
    not there is passed over; one from a checkpoint of before may lack all but buffers.
    """
    if "attributes" in state:
        attributes.take(module, state["attributes"])
    transient, written = set(state.get("transient", ())), set[int]()
    with torch.no_grad():
        for name, value in state["buffers"].items():
            key = name.rpartition(".")[2]
            part = _part(module, _parent(name))
            held = None if part is None else part._buffers.get(key)
            if part is not None and held is not None and id(held) in written:  # one buffer here, and two there
                held = part._buffers[key] = held.clone()
            if held is not None and held.shape == value.shape and _fits(held, value, casts):
                held.copy_(value)
                written.add(id(held))
            elif part is not None and not state.get("resized", False):
                _replace(module, part, key, value, held, is_persistent=name not in transient)
    for name, value in state.get("extra", {}).items():
        part = _part(module, name)
        if part is not None and has_extra_state(part):
            part.set_extra_state(value)
    if state.get("modes"):
        _take_modes(module, state["modes"])


def _take_modes(module: nn.Module, modes: Mapping[str, bool]) -> None:
    """Set each module's mode, without a call of `train`, which a class may have made its own."""
    found: dict[str, bool] = {}
    for name, part in module.named_modules():  # parents first
        found[name] = part.training = modes[name] if name in modes else found[_parent(name)]


def merged(states: Iterable[Mapping[str, Any]]) -> ModuleState:
    """Return for each module and buffer what the first of these states says that knows it."""
    found = copy.deepcopy(dict(EMPTY))
    for state in reversed([*states]):
        found["buffers"] |= state["buffers"]
        found["transient"] = sorted({*found["transient"], *state.get("transient", ())})
        found["extra"] |= state.get("extra", {})
        found["modes"] |= state.get("modes", {})
        if "attributes" in state:
            found["attributes"] = {**found.get("attributes", {}), **state["attributes"]}
    return found


def pass_on(old: nn.Module, new: nn.Module, is_resized: bool) -> None:
    """Let a module, not those below it, have the mode, attributes, buffers and extra state of its predecessor.

    Buffers are shared. is_resized: see `ModuleState`.
    """
    new.training = old.training
    attributes.pass_on(old, new, is_resized)
    for key, value in old._buffers.items():
        held = new._buffers.get(key)
        is_alike = value is not None and held is not None and value.shape == held.shape
        if is_alike or not is_resized:
            new._buffers[key] = value
            new._non_persistent_buffers_set |= {key} & old._non_persistent_buffers_set
    if has_extra_state(new) and has_extra_state(old):
        new.set_extra_state(old.get_extra_state())


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Have a forward pass inside the block write into copies of the buffers, which are dropped at its end.

    Autograd may have saved a buffer for the backward pass, so none is written to afterwards. A buffer that the pass
    itself puts in another's place stays.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    places = [(part, key, held) for part in module.modules() for key, held in part._buffers.items() if held is not None]
    for part, key, held in places:
        held, copied = copies.setdefault(id(held), (held, held.detach().clone()))
        part._buffers[key] = copied
    try:
        yield
    finally:
        for part, key, held in places:
            if part._buffers.get(key) is copies[id(held)][1]:
                part._buffers[key] = held


def _fits(held: torch.Tensor, value: torch.Tensor, casts: bool) -> bool:
    return held.dtype == value.dtype or (casts and held.is_floating_point() and value.is_floating_point())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _part(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _replace(
    root: nn.Module, part: nn.Module, key: str, value: torch.Tensor, held: torch.Tensor | None, is_persistent: bool
) -> None:
    """Put a buffer in the place of another one, wherever modules share that."""
    device = compute_device() if held is None else held.device
    made = value.detach().to(device, copy=True)
    if held is None:
        part.register_buffer(key, made, persistent=is_persistent)
        return
    for each in root.modules():
        for name, other in each._buffers.items():
            if other is held:
                each._buffers[name] = made
