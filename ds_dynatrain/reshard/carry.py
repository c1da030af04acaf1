"""The carry: everything of a training that is not a tensor element, and how a member takes it over.

*Shared* carry is equal on all working members and is compared before a commit: counters, hyper-parameters of all
parameter groups, optimizer scalars, the loss scale, the scheduler, the loaders' positions. The *rest* (modules' state
besides parameters, the user's own objects, the last gradient norm) may differ between members; a member that starts to
work takes rank 0's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynatrain.adapters.module_state import EMPTY, state_of, take_state
from ds_dynatrain.adapters.state import Scalars
from ds_dynatrain.errors import SwitchFailed, SwitchRefused
from ds_dynatrain.reshard.core import COUNTERS, EngineCore
from ds_dynatrain.reshard.encoding import decode, encode, fingerprint


@dataclass(frozen=True)
class Carried:
    """Carry that rank 0 sends to all members in a switch.

    rest: encoded, without its tensors, which travel apart. prints, rest_print: hashes of rank 0's values; the latter is
    "" unless a member starts to work. kinds: the state kinds that exist.
    """

    shared: dict[str, Any]
    rest: Any
    prints: dict[str, str]
    rest_print: str
    kinds: tuple[str, ...]

    @staticmethod
    def record(shared: dict[str, Any], rest: dict[str, Any], kinds: list[str], is_taken: bool) -> dict[str, Any]:
        """Return the carry of rank 0 as plain JSON; raise SwitchFailed if the shared part holds a tensor.

        is_taken: whether a member starts to work.
        """
        tensors: list[torch.Tensor] = []
        record = {"shared": encode(shared, tensors), "rest": encode(rest, []), "kinds": kinds}
        if tensors:  # they would have to travel apart from the record
            raise SwitchFailed("a hyper-parameter or the scheduler's state is a tensor or a numpy value: use numbers")
        return {**record, "prints": fingerprints(shared), "rest_print": fingerprint(rest) if is_taken else ""}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Carried:
        """Return the carry that `record` made JSON of."""
        shared, kinds = decode(record["shared"], []), tuple(record["kinds"])
        return Carried(shared, record["rest"], record["prints"], record["rest_print"], kinds)


def refuse_tensor_settings(engine: EngineCore) -> None:
    """Raise SwitchRefused if a hyper-parameter or the scheduler's state is a tensor: the shared carry has none.

    Called on working members where a switch is asked for.
    """
    groups = engine.host.basic_optimizer.param_groups
    named = [
        (f"{key!r} of parameter group {number}", value)
        for number, group in enumerate(groups)
        for key, value in _hyper_parameters(group).items()
    ]
    named.append(("the state of the scheduler", _scheduler_state(engine.host.lr_scheduler)))
    for what, value in named:
        tensors: list[torch.Tensor] = []
        encode(value, tensors)
        if tensors:
            raise SwitchRefused(
                f"{what} is, or holds, a tensor or a numpy value, and all members compare it as a number",
                "use a number: float(value)",
            )


def fingerprints(shared: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each part of the shared carry."""
    return {part: fingerprint(value) for part, value in shared.items()}


def shared_carry(engine: EngineCore, scalars: Scalars) -> dict[str, Any]:
    """Return the state that must be equal on all working members, as values that `encoding.encode` takes."""
    deepspeed, steps = engine.deepspeed, max(engine.accumulation, 1)
    return {
        "counters": {name: int(getattr(deepspeed, name)) for name in COUNTERS},
        "windows": engine.micro_steps // steps,
        "epoch": engine.job_epoch,
        "groups": [_hyper_parameters(group) for group in engine.host.basic_optimizer.param_groups],
        "scalars": {
            name: {str(tensor): value for tensor, value in table.items()} for name, table in scalars.values.items()
        },
        "scaling": engine.host.scaling_state(),
        "scheduler": _scheduler_state(engine.host.lr_scheduler),
        "loaders": {name: loader.state_dict() for name, loader in engine.train_loaders.items()},
        "compiled modules": engine.host.compiled_modules,
        "forward passes": engine.host.forward_passes,
        "stream seed": engine.stream_seed if engine.host.in_leaves else None,
        "random-LTD": deepspeed.random_ltd_scheduler.state_dict() if deepspeed.random_ltd_enabled() else None,
    }


def rest_carry(engine: EngineCore, has_module: bool = True) -> dict[str, Any]:
    """Return what a member that starts to work takes from rank 0 besides the shared carry.

    has_module: whether to include modules' state; without it only the root's mode is included.
    """
    norm, module = engine.deepspeed.get_global_grad_norm(), engine.host.module
    return {
        "grad_norm": float(norm) if norm is not None else None,
        **(state_of(module) if has_module else {**EMPTY, "modes": {"": module.training}}),
        "objects": {name: held.state_dict() for name, held in engine.carried.items()},
    }


def scalars_of(shared: dict[str, Any]) -> Scalars:
    """Return the optimizer scalars of a shared carry."""
    return Scalars(
        {name: {int(key): value for key, value in table.items()} for name, table in shared["scalars"].items()}
    )


def settle_counters(engine: EngineCore, shared: dict[str, Any]) -> None:
    """Set counters and loss scale of a working member in the new world.

    Micro-steps start anew on a multiple of the accumulation.
    """
    for name in COUNTERS:
        setattr(engine.deepspeed, name, shared["counters"][name])
    engine.deepspeed.micro_steps = shared["windows"] * engine.accumulation
    engine.host.take_scaling(shared["scaling"])
    if shared.get("stream seed") is not None:  # a checkpoint of a job without leaves has none
        engine.stream_seed = shared["stream seed"]
    engine.host.forward_passes = shared["forward passes"]


def put_back(engine: EngineCore, shared: dict[str, Any]) -> None:
    """Set counters, loss scale, hyper-parameters and the scheduler as they were before a switch that failed."""
    settle_counters(engine, shared)
    for group, values in zip(engine.host.basic_optimizer.param_groups, shared["groups"], strict=True):
        group.update(values)
    if engine.host.lr_scheduler is not None:
        engine.host.lr_scheduler.load_state_dict(_own(shared["scheduler"]))


def take_over(engine: EngineCore, shared: dict[str, Any], rest: dict[str, Any], casts: bool = False) -> None:
    """Take over a whole carry on a member that starts to work; its optimizer is attached already. casts: see
    `take_state`.
    """
    put_back(engine, shared)
    engine.job_epoch, scheduler = shared["epoch"], engine.host.lr_scheduler
    if hasattr(scheduler, "_last_lr"):  # DeepSpeed's own schedulers leave it stale
        scheduler._last_lr = [group["lr"] for group in engine.host.basic_optimizer.param_groups]
    for name, state in shared["loaders"].items():
        if name in engine.train_loaders:
            engine.train_loaders[name].load_state_dict(state)
    if engine.deepspeed.random_ltd_enabled():
        engine.deepspeed.random_ltd_scheduler.load_state_dict(_own(shared["random-LTD"]))
    engine.host.take_grad_norm(rest["grad_norm"])
    if "training" in rest and rest["training"] != engine.host.module.training:  # an old checkpoint: the root's alone
        engine.host.module.train(rest["training"])
    take_state(engine.host.module, rest, casts=casts)
    for name, state in rest["objects"].items():
        engine.carried[name].load_state_dict(_own(state))


def take_all(engine: EngineCore, shared: dict[str, Any], rest: dict[str, Any]) -> None:
    """Take over a whole carry; keep the parts of loaders and objects that do not exist yet until they do."""
    engine.keep_arrived({**shared["loaders"]}, {**rest["objects"]})
    objects = {name: state for name, state in rest["objects"].items() if name in engine.carried}
    take_over(engine, shared, {**rest, "objects": objects}, casts=True)


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's values without those that the layout decides: its parameters, and the name of a group of
    experts.
    """
    left_out = ("params", "name") if group.get("moe") else ("params",)
    return {name: value for name, value in group.items() if name not in left_out}


def _own(state: Any) -> Any:
    """Return a state in containers of its own, for a `load_state_dict` that may keep or change them.

    The original is compared and put back later. Tensors are not copied.
    """
    if type(state) is dict:
        return {key: _own(value) for key, value in state.items()}
    return type(state)(map(_own, state)) if type(state) in (list, tuple) else state


def _scheduler_state(scheduler: Any) -> Any:
    return None if scheduler is None else scheduler.state_dict()
