"""Replacement of `deepspeed.initialize` for libraries that call it with a `dynatrain` block.

Accelerate, and with it Trainer and TRL, looks up `deepspeed.initialize` when it is needed, so replacing one attribute
reaches all of them. A configuration without the block gets DeepSpeed's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn

import ds_dynatrain
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.engine.initialize import join_at_zero_init
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.integrations.shared.refusal import BLOCK

_IS_OURS = "is_of_dynatrain"


def install() -> None:
    """Replace `deepspeed.initialize` and `deepspeed.comm.init_distributed` with ours. A second call does nothing.

    If members may join and leave, building the first model that is partitioned while it is built also brings the
    process into the job.
    """
    join_at_zero_init()
    for place, name, ours in ((deepspeed, "initialize", _initialize), (deepspeed.comm, "init_distributed", _join)):
        stock = getattr(place, name)
        if not getattr(stock, _IS_OURS, False):
            setattr(place, name, _around(ours, stock))


def _around(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return ours(stock, *arguments, **named)

    setattr(call, _IS_OURS, True)
    return call


def _join(stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Join the job, or wait beside it while it runs, in a process of an elastic launch.

    Other processes call DeepSpeed's own function.
    """
    if worker_place() is None:
        return stock(*arguments, **named)
    with replaced(deepspeed.comm, init_distributed=stock):
        return ds_dynatrain.init_distributed(*arguments, **named)


def _initialize(stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    key = "config_params" if named.get("config") is None else "config"
    config = named.get(key)
    with replaced(deepspeed, initialize=stock):
        if not (isinstance(config, dict) and BLOCK in config):
            return stock(*arguments, **named)
        if named.get("optimizer") is None and named.get("model_parameters") is None:
            return _for_inference(named["model"], config)
        # libraries fill this in for one world; here it follows from the global batch
        named[key] = {name: value for name, value in config.items() if name != "gradient_accumulation_steps"}
        return ds_dynatrain.initialize(*arguments, **named)


def _for_inference(model: nn.Module, config: dict[str, Any]) -> tuple[nn.Module, None, None, None]:
    """Return a model that is not trained, such as DPO's reference, whole on each member.

    No change of the world thus concerns it.
    """
    if config.get("zero_optimization", {}).get("stage") == 3:
        raise UnsupportedError(
            f"a {type(model).__name__} that is not trained, at ZeRO stage 3: its shards would stay in the world of the "
            "start; take a stage below 3, or compute what it says ahead (precompute_ref_log_probs=True)"
        )
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    wanted = [kind for name, kind in kinds.items() if config.get(name, {}).get("enabled") is True]
    device = deepspeed.get_accelerator().current_device_name()
    return model.to(device=device, dtype=next(iter(wanted), None)), None, None, None
