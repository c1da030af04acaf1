"""The carry: the extra state of a training run besides tensor elements, and how a member loads it.

`STATES` is the table of such states. To add a state, add a row: a switch, a checkpoint and members' copies all use the
table. *Shared* state is equal on all working members and is compared before a commit. The *rest* may differ between
members; a member that joins training loads that of rank 0. Two things are handled elsewhere. Optimizer scalars move
with the optimizer's buffers, and are only compared here. Random streams belong to a position in the layout (`streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ds_dynatrain.adapters.model.module_state import EMPTY, state_of, take_state
from ds_dynatrain.adapters.zero.state import Scalars
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.encoding import encode

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Names of DeepSpeed's counters that are part of the carry."""


# ---- the table -------------------------------------------------------------------------------------------------------


class LoadReason(IntEnum):
    """Reason for which a member loads extra state: its optimizer is new, a switch has failed, or it joins training."""

    NEW_OPTIMIZER = 1
    FAILED_SWITCH = 2
    START = 3


@dataclass(frozen=True)
class ExtraState:
    """An extra state (a state other than tensor elements): one row of the table `STATES`.

    keys: the keys of its values in the carry.
    is_shared: whether it is equal on all working members.
    taken: the lowest `LoadReason` for which the state is loaded; it is also loaded for all higher ones.
    state_dict: returns a map from key to value; `encoding.encode` must accept the values.
    load_state_dict: loads such a map, and may keep and change the containers in it. Values that an older checkpoint
        lacks are left out of the map; if all are missing, the function is not called.
    """

    keys: tuple[str, ...]
    is_shared: bool
    taken: LoadReason
    state_dict: Callable[[EngineCore], dict[str, Any]]
    load_state_dict: Callable[[EngineCore, dict[str, Any]], None]


def _progress(engine: EngineCore) -> dict[str, Any]:
    return {
        "counters": {name: int(getattr(engine.deepspeed, name)) for name in COUNTERS},
        "windows": engine.micro_steps // max(engine.accumulation, 1),
        "epoch": engine.job_epoch,
        "scaling": engine.host.scaling_state(),
        "compiled modules": engine.host.compiled_modules,
        "forward passes": engine.host.forward_passes,
        "stream seed": engine.stream_seed if engine.host.in_leaves else None,
    }


def _load_progress(engine: EngineCore, state: dict[str, Any]) -> None:
    """Load counters, epoch and loss scaling. The micro-step counter is set to a multiple of the gradient accumulation
    steps."""
    for name in COUNTERS:
        setattr(engine.deepspeed, name, state["counters"][name])
    engine.deepspeed.micro_steps = state["windows"] * engine.accumulation
    engine.job_epoch = state["epoch"]
    engine.host.take_scaling(state["scaling"])
    engine.host.forward_passes = state["forward passes"]
    if state.get("stream seed") is not None:  # checkpoints of jobs without leaves lack it
        engine.stream_seed = state["stream seed"]


def _schedule(engine: EngineCore) -> dict[str, Any]:
    """Return the states of the schedulers, and those values of the parameter groups that do not depend on the
    layout."""
    deepspeed, groups = engine.deepspeed, list[dict[str, Any]]()
    for group in engine.host.basic_optimizer.param_groups:
        left_out = ("params", "name") if group.get("moe") else ("params",)  # an expert group's name tells its ranks
        groups.append({name: value for name, value in group.items() if name not in left_out})
    return {
        "groups": groups,
        "scheduler": None if deepspeed.lr_scheduler is None else deepspeed.lr_scheduler.state_dict(),
        "random-LTD": deepspeed.random_ltd_scheduler.state_dict() if deepspeed.random_ltd_enabled() else None,
    }


def _load_schedule(engine: EngineCore, state: dict[str, Any]) -> None:
    groups, scheduler = engine.host.basic_optimizer.param_groups, engine.deepspeed.lr_scheduler
    for group, values in zip(groups, state["groups"], strict=True):
        group.update(values)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    if (
        hasattr(scheduler, "_last_lr") and "_last_lr" not in state["scheduler"]
    ):  # DeepSpeed's schedulers would leave it stale
        scheduler._last_lr = [group["lr"] for group in groups]
    if engine.deepspeed.random_ltd_enabled():
        engine.deepspeed.random_ltd_scheduler.load_state_dict(state["random-LTD"])


_HELD = {"loaders": attrgetter("train_loaders"), "objects": attrgetter("carried")}


def _state_of_each(what: str, engine: EngineCore) -> dict[str, Any]:
    return {what: {name: held.state_dict() for name, held in _HELD[what](engine).items()}}


def _load_each(what: str, engine: EngineCore, state: dict[str, Any]) -> None:
    """Load the states of all loaders or of all user objects. States of those that do not exist yet are kept in
    `engine.arrived`.

    what: "loaders" or "objects".
    """
    held, engine.arrived[what] = _HELD[what](engine), {}
    for name, value in state[what].items():
        if name in held:
            held[name].load_state_dict(value)
        else:
            engine.arrived[what][name] = value


def _grad_norm(engine: EngineCore) -> dict[str, Any]:
    norm = engine.deepspeed.get_global_grad_norm()
    return {"grad_norm": float(norm) if norm is not None else None}


def _load_grad_norm(engine: EngineCore, state: dict[str, Any]) -> None:
    engine.host.take_grad_norm(state["grad_norm"])


def _modules(engine: EngineCore) -> dict[str, Any]:
    return state_of(engine.host.module)


def _load_modules(engine: EngineCore, state: dict[str, Any]) -> None:
    """Load the state that modules keep besides parameters.

    The values "resized" and "casts" are not part of the state but options of `take_state`.
    """
    module = engine.host.module
    if "training" in state and state["training"] != module.training:  # an old checkpoint has only the root's mode
        module.train(state["training"])
    take_state(module, state, casts=state.get("casts", False))


_MODULES = ExtraState(
    ("buffers", "transient", "extra", "modes", "attributes", "training", "resized", "casts"),
    False,
    LoadReason.START,
    _modules,
    _load_modules,
)
STATES = [
    ExtraState(
        ("counters", "windows", "epoch", "scaling", "compiled modules", "forward passes", "stream seed"),
        True,
        LoadReason.NEW_OPTIMIZER,
        _progress,
        _load_progress,
    ),
    ExtraState(("groups", "scheduler", "random-LTD"), True, LoadReason.FAILED_SWITCH, _schedule, _load_schedule),
    ExtraState(
        ("loaders",), True, LoadReason.START, partial(_state_of_each, "loaders"), partial(_load_each, "loaders")
    ),
    ExtraState(("grad_norm",), False, LoadReason.START, _grad_norm, _load_grad_norm),
    _MODULES,
    ExtraState(
        ("objects",), False, LoadReason.START, partial(_state_of_each, "objects"), partial(_load_each, "objects")
    ),
]
"""The table of extra states, in the order in which they are loaded."""


def shared_carry(engine: EngineCore, scalars: Scalars) -> dict[str, Any]:
    """Return the extra state that must be equal on all working members."""
    found: dict[str, Any] = {
        "scalars": {
            name: {str(number): value for number, value in table.items()} for name, table in scalars.values.items()
        }
    }
    for state in STATES:
        if state.is_shared:
            found |= state.state_dict(engine)
    return found


def rest_carry(engine: EngineCore, has_module: bool = True) -> dict[str, Any]:
    """Return the extra state that need not be equal on all members. A member that joins training loads that of rank 0.

    has_module: whether to include the state of modules; if false, only the root module's training mode is included.
    """
    found: dict[str, Any] = {} if has_module else {**EMPTY, "modes": {"": engine.host.module.training}}
    for state in STATES:
        if not state.is_shared and (has_module or state is not _MODULES):
            found |= state.state_dict(engine)
    return found


def take(engine: EngineCore, carry: Mapping[str, Any], after: LoadReason) -> None:
    """Load those extra states that have to be loaded for a given reason.

    carry: the extra states, by key.
    after: the reason.

    The optimizer of a working member must be attached.
    """
    for state in STATES:
        if state.taken <= after and not carry.keys().isdisjoint(state.keys):
            state.load_state_dict(engine, _own({key: carry[key] for key in state.keys if key in carry}))


def _own(state: Any) -> Any:
    """Return a copy of a state with new containers; its tensors are not copied."""
    if type(state) is dict:
        return {key: _own(value) for key, value in state.items()}
    return type(state)(map(_own, state)) if type(state) in (list, tuple) else state


def scalars_of(shared: dict[str, Any]) -> Scalars:
    """Return the values that an optimizer keeps per parameter (such as step counts), given the shared extra state."""
    return Scalars(
        {name: {int(key): value for key, value in table.items()} for name, table in shared["scalars"].items()}
    )


# ---- in a switch -----------------------------------------------------------------------------------------------------


def refuse_tensor_settings(engine: EngineCore) -> None:
    """Raise SwitchRefused if a hyper-parameter or the scheduler's state contains a tensor or a numpy value.

    All members compare these values as numbers. Called on working members when a switch is requested.
    """
    schedule = _schedule(engine)
    named = [("the state of the scheduler", schedule["scheduler"])]
    for number, group in enumerate(schedule["groups"]):
        named += [(f"{key!r} of parameter group {number}", value) for key, value in group.items()]
    for what, value in named:
        tensors: list[torch.Tensor] = []
        encode(value, tensors)
        if tensors:
            raise SwitchRefused(
                f"{what} is, or holds, a tensor or a numpy value, and all members compare it as a number",
                "use a number: float(value)",
            )
