"""State of modules other than parameters: buffers, `training`, extra state (`get_extra_state`), and plain attributes.

Buffers are transferred with their values at the time of the switch, even if their shape or type has changed since the
constructor made them, or if they were registered later.

torch does not know plain attributes (a counter, the longest length seen, a small tensor), and they are in no state
dict. Attributes that have changed since the first forward pass are transferred to members that have a module of the
same name and class. Three kinds are not transferred: attributes of DeepSpeed's modules and attributes that DeepSpeed
sets on other modules, because they belong to a layout; attributes of torchmetrics, because each rank counts for itself;
and Lightning's private attributes, which record the progress of a loop.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.groups.device import compute_device

logger = logging.getLogger("ds_dynatrain")

AttributeState = dict[str, dict[str, Any]]
"""Changed attributes, keyed by module name. Modules without changes are left out. Each entry has these keys:

class: the module's class.
values: the changed attributes.
left: names of attributes that cannot be transferred. If there are any, no values are transferred, because a partial
    cache is worse than none.
shared: names of attributes that are buffers.
"""

MOST_BYTES = 1 << 20
"""Maximum size in bytes of a tensor that is transferred as an attribute."""
MOST_PARTS = 1000
"""Maximum number of entries of a list, tuple or dictionary that is transferred as an attribute."""
_MOST_DEPTH = 4
_SIMPLE = (type(None), bool, int, float, str)
_MUTABLE = (torch.Tensor, list, tuple, dict)
_NOTED = "ds_dynatrain_noted"
_OTHERS = frozenset(
    {*nn.Module().__dict__, "_external_params", "_original_parameters", "applied_pre_backward_ref_cnt", "__class__"}
)
"""Attributes that torch and DeepSpeed set on any module. DeepSpeed's other attributes begin with ds_."""


class _Same:
    """Wrapper of a value. Two wrappers are equal only if they hold the same object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    __hash__ = object.__hash__


@dataclass(frozen=True)
class _Built:
    """An attribute at the time when training began.

    kept: a copy of the value if it can be transferred; otherwise the value itself.
    mark: a fingerprint of the value; see `_mark`.
    """

    value: Any
    kept: Any
    mark: Any


class _Noted(dict[str, _Built]):
    """The attributes of a module when training began, keyed by name.

    The record is stored on the module, and is left out when the module is copied or pickled.
    """

    def __reduce__(self) -> Any:
        return type(None), ()


def note(module: nn.Module) -> None:
    """Record the attributes of a module and of all its submodules, unless they are already recorded.

    Called before each forward pass. If the root is recorded, the call returns at once.
    """
    if module.__dict__.get(_NOTED) is None:
        for part in module.modules():
            note_one(part)


def note_one(part: nn.Module) -> Mapping[str, _Built]:
    """Record the attributes of one module, unless they are already recorded, and return the record.

    Submodules are not included.
    """
    noted: _Noted | None = part.__dict__.get(_NOTED)
    if noted is None:
        noted = _Noted()
        for name, held in part.__dict__.items():
            if _is_tracked(part, name, held):
                noted[name] = _Built(held, copy.deepcopy(held) if _is_transferable(held) else held, _mark(held))
        part.__dict__[_NOTED] = noted
    return noted


def forget(module: nn.Module) -> None:
    """Delete the recorded attributes of a module and all its submodules. Called when its engine releases the module."""
    for part in module.modules():
        part.__dict__.pop(_NOTED, None)


def changed_attributes(module: nn.Module) -> AttributeState:
    """Return the attributes of a module and all its submodules that have changed since they were recorded.

    Values are not copied.
    """
    buffers, found = {*map(id, module.buffers())}, AttributeState()
    for path, part in module.named_modules():
        values, left, shared = _changed(part), list[str](), list[str]()
        for name, held in sorted(part.__dict__.items()) if values or buffers else ():
            if id(held) in buffers:
                shared.append(name)
                values.pop(name, None)
            elif name in values and not _is_transferable(held):
                left.append(name)
        if values or shared:
            found[path] = {"class": _name(part), "values": {} if left else values, "left": left, "shared": shared}
    return found


def take_attributes(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Set the changed attributes in `state` on submodules of the same name, and reset all other attributes.

    Attributes are reset to their recorded values. Called before buffers are set. Logs a warning that names attributes
    that could not be transferred.
    """
    left: list[str] = []
    for path, part in module.named_modules():
        given = state.get(path, {"class": _name(part), "values": {}, "left": [], "shared": []})
        is_alike = given["class"] == _name(part) and not _is_foreign(type(part))
        values = {name: held for name, held in given["values"].items() if is_alike and _is_own(part, name)}
        # Buffers that are also attributes here, but not where the state comes from, are replaced: otherwise values
        # written into the buffers later would change the attributes.
        mine = part.__dict__.items()
        apart = {id(held) for name, held in mine if isinstance(held, torch.Tensor) and name not in given["shared"]}
        for each in module.modules() if apart else ():
            for key, held in each._buffers.items():
                if held is not None and id(held) in apart:
                    each._buffers[key] = held.clone()
        stale = {*given["left"], *given["values"]} - {*values}
        for name in [name for name in _changed(part) if name in note_one(part) and name not in values]:
            kept = note_one(part)[name].kept
            if _is_transferable(kept):
                part.__dict__[name] = _placed(kept, part.__dict__[name])
            else:
                stale.add(name)
        for name, value in values.items():
            part.__dict__[name] = _placed(value, part.__dict__.get(name))
        left += [f"{path}.{name}".lstrip(".") for name in sorted(stale)]
    if left:
        logger.warning(
            "attributes of modules have changed in training and cannot be carried, so this member may have others than "
            "the rest: %s. If the forward pass depends on them, make them buffers, or give them as extra state "
            "(get_extra_state)",
            ", ".join(left),
        )


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module defines both `get_extra_state` and `set_extra_state`.

    If so, the module's caches are assumed to be in its extra state.
    """
    kind, stock = type(module), nn.Module
    gives = kind.get_extra_state is not stock.get_extra_state
    return gives and kind.set_extra_state is not stock.set_extra_state


def _changed(part: nn.Module) -> dict[str, Any]:
    built, found = note_one(part), {}
    for name, value in part.__dict__.items():
        if name in _OTHERS:
            continue
        was = built.get(name)
        if was is not None and was.value is value and not isinstance(value, _MUTABLE):
            continue
        if not _is_tracked(part, name, value) or (was is not None and was.mark == _mark(value)):
            continue
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in _leaves(value)):
            continue  # a forward pass computed it for its own backward pass
        if _is_transferable(value) or not has_extra_state(part):
            found[name] = value
    return found


def _is_tracked(part: nn.Module, name: str, value: Any) -> bool:
    """Return whether an attribute is state of the module itself, rather than a function, a module or a parameter."""
    is_own = not _is_foreign(type(part)) and _is_own(part, name)
    return is_own and not callable(value) and not isinstance(value, nn.Parameter)


def _is_own(part: nn.Module, name: str) -> bool:
    """Return whether an attribute of this name may be state of the module."""
    if name in _OTHERS or name.startswith("ds_") or callable(getattr(type(part), name, None)):
        return False
    return not (name.startswith("_") and _packages(type(part)) & {"lightning", "pytorch_lightning"})


def _is_foreign(kind: type) -> bool:
    """Return whether attributes of modules of this class are never transferred; see this file's docstring."""
    return bool(_packages(kind) & {"deepspeed", "ds_dynatrain", "torchmetrics"})


def _packages(kind: type) -> set[str]:
    """Return the packages of a class and of its base classes."""
    return {each.__module__.partition(".")[0] for each in kind.__mro__}


def _name(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _mark(value: Any) -> list[Any]:
    """Return a fingerprint of a value that compares equal as long as the value is unchanged."""
    return [_mark_of_leaf(leaf) for leaf in _leaves(value)]


def _mark_of_leaf(value: Any) -> Any:
    if type(value) in _SIMPLE:
        return type(value), repr(value)
    if isinstance(value, nn.Parameter):
        return nn.Parameter
    if isinstance(value, torch.Tensor):
        return _Same(value), None if value.is_inference() else value._version
    return _Same(value)


def _is_transferable(value: Any) -> bool:
    """Return whether a value can be transferred to another member."""
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and value.nbytes <= MOST_BYTES and not value.requires_grad
    leaves = _leaves(value)
    return all(type(leaf) in _SIMPLE and (not isinstance(leaf, str) or len(leaf) <= MOST_BYTES) for leaf in leaves)


def _leaves(value: Any, depth: int = 0) -> list[Any]:
    """Return a value as a flat list; lists, tuples and dictionaries are replaced by their size and their content.

    A container with too many entries, or nested too deeply, counts as one value.
    """
    if type(value) not in (list, tuple, dict) or depth >= _MOST_DEPTH or len(value) > MOST_PARTS:
        return [value]
    entries = chain.from_iterable(value.items()) if isinstance(value, dict) else value
    inside = (leaf for entry in entries for leaf in _leaves(entry, depth + 1))
    return [f"{type(value).__name__} of {len(value)}", *inside]


def _placed(value: Any, present: Any) -> Any:
    """Return a copy of a value. If it is a tensor, the copy is on the device of `present`."""
    if isinstance(value, torch.Tensor):
        return value.to(present.device if isinstance(present, torch.Tensor) else compute_device(), copy=True)
    return copy.deepcopy(value)


ModuleState = dict[str, Any]
"""State of a module and all its submodules, as a dictionary with these keys:

buffers: the buffers, keyed by name.
transient: names of the buffers that are in no state dict.
extra: extra state, keyed by module name.
modes: a map from module name to `training`, for the module itself ("") and each submodule whose mode differs from its
    parent's; empty if unknown.
attributes: see `AttributeState`; missing if unknown.
resized: whether the state comes from modules of another tensor or expert size, so that only the module itself can
    interpret the content of a buffer whose shape differs; may be missing.
"""

EMPTY: Mapping[str, Any] = {"buffers": {}, "transient": [], "extra": {}, "modes": {}}


def state_of(module: nn.Module) -> ModuleState:
    """Return the state of a module and all its submodules. Values are not copied."""
    parts = dict(module.named_modules())
    transient = [(name, key) for name, part in parts.items() for key in part._non_persistent_buffers_set]
    above = {name: parts[name.rpartition(".")[0]] for name in parts}
    return {
        "buffers": {name: held.detach() for name, held in module.named_buffers()},
        "transient": sorted(f"{name}.{key}".lstrip(".") for name, key in transient),
        "extra": {name: part.get_extra_state() for name, part in parts.items() if has_extra_state(part)},
        "modes": {
            name: part.training for name, part in parts.items() if not name or part.training != above[name].training
        },
        "attributes": changed_attributes(module),
    }


def take_state(module: nn.Module, state: Mapping[str, Any], casts: bool = False) -> None:
    """Give a module and its submodules the state of modules with the same names.

    casts: whether floating-point buffers keep their current element type.

    State of modules that do not exist here is skipped. A state from an older checkpoint may lack everything but
    buffers.
    """
    if "attributes" in state:
        take_attributes(module, state["attributes"])
    transient, written = set(state.get("transient", ())), set[int]()
    with torch.no_grad():
        for name, value in state["buffers"].items():
            parent, _, key = name.rpartition(".")
            part = _part(module, parent)
            held = None if part is None else part._buffers.get(key)
            if part is not None and held is not None and id(held) in written:  # shared here, but separate in the state
                held = part._buffers[key] = held.clone()
            is_cast = casts and held is not None and held.is_floating_point() and value.is_floating_point()
            if held is not None and held.shape == value.shape and (held.dtype == value.dtype or is_cast):
                held.copy_(value)
                written.add(id(held))
            elif part is not None and not state.get("resized", False):
                _replace(module, part, key, value, held, is_persistent=name not in transient)
    for name, value in state.get("extra", {}).items():
        part = _part(module, name)
        if part is not None and has_extra_state(part):
            part.set_extra_state(value)
    modes, found = state.get("modes", {}), dict[str, bool]()
    for name, part in module.named_modules() if modes else ():  # parents first, as a class may have its own `train`
        found[name] = part.training = modes[name] if name in modes else found[name.rpartition(".")[0]]


def merged(states: Iterable[Mapping[str, Any]]) -> ModuleState:
    """Merge the states of several modules of the same model. The first state with an entry for a module or buffer
    counts.
    """
    found = copy.deepcopy(dict(EMPTY))
    for state in reversed([*states]):
        found["transient"] = sorted({*found["transient"], *state.get("transient", ())})
        for key in ("buffers", "extra", "modes", "attributes"):
            if key in state:
                found[key] = {**found.get(key, {}), **state[key]}
    return found


def pass_on(old: nn.Module, new: nn.Module, is_resized: bool) -> None:
    """Give a module, without its submodules, the mode, attributes, buffers and extra state of its predecessor.

    Buffers are shared, not copied.

    is_resized: whether the tensor or expert size differs. If so, only attributes that are numbers or strings are passed
        on, and only buffers of equal shape.
    """
    new.training = old.training
    note_one(new)
    if type(old) is type(new):
        changed = _changed(old).items()
        new.__dict__.update({name: held for name, held in changed if type(held) in _SIMPLE or not is_resized})
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
    """Context manager in which a forward pass writes into copies of the buffers, which are dropped at the end.

    The original buffers are then put back. The copies are not changed afterwards, because autograd may have saved one
    for the backward pass. If the pass itself replaces a buffer, the new buffer stays.
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


def _part(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _replace(
    root: nn.Module, part: nn.Module, key: str, value: torch.Tensor, held: torch.Tensor | None, is_persistent: bool
) -> None:
    """Replace a buffer with a copy of `value`, in all modules that share the buffer."""
    device = compute_device() if held is None else held.device
    made = value.detach().to(device, copy=True)
    if held is None:
        part.register_buffer(key, made, persistent=is_persistent)
        return
    for each in root.modules():
        for name, other in each._buffers.items():
            if other is held:
                each._buffers[name] = made
