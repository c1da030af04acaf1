"""How ranks that share one card communicate: NCCL takes a card once, so by a back-end of the tests.

DeepSpeed copies what it sends to the host first (its own way for accelerators without collectives), and gloo carries
it. With `$COLLECTIVES` "nccl" it is NCCL itself, from 2.30 on, which shares a card where
`$NCCL_MULTI_RANK_GPU_ENABLE` is 1.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

BACKEND = "by_gloo"
NCCL = "nccl"
INPUTS = {
    "all_gather": (1, "tensor"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_base", "reduce_scatter_tensor"), (1, "input_tensor")),
    "all_gather_coalesced": (1, "input_tensors"),
    "reduce_scatter": (1, "input_list"),
    "all_to_all_single": (1, "input"),
    "all_to_all": (1, "input_tensor_list"),
    "scatter": (1, "scatter_list"),
    "send": (0, "tensor"),
    "gather": (0, "tensor"),
}
"""Methods of DeepSpeed's back-end -> (place, name) of what they read and do not write."""


def chosen_backend() -> str:
    """By which the ranks communicate: `$COLLECTIVES` decides."""
    if os.environ.get("COLLECTIVES") == NCCL:
        return NCCL
    stage_collectives()
    return BACKEND


def stage_collectives(device: str = "cuda") -> None:
    """Let DeepSpeed's accelerator communicate by gloo, over the host."""
    import torch
    import torch.distributed as td
    from deepspeed.accelerator import get_accelerator

    class Staged(td.ProcessGroupGloo):
        """Not one that torch splits others from: gloo has no such function, and torch asks for it on a card."""

        supports_splitting = False

    kept = []  # else torch would find the class of C++ alone

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        kept.append(Staged(store, rank, size, timeout=timeout))
        return kept[-1]

    def is_staged(held: Any) -> bool:
        return isinstance(held, torch.Tensor) and held.device.type == device

    td.Backend.register_backend(BACKEND, make, devices=[device])
    get_accelerator()._communication_backend_name = BACKEND
    module: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute of its package it is torch itself
    module._needs_cpu_staging = is_staged
    for name, (place, key) in INPUTS.items():
        setattr(module.TorchBackend, name, _reading(getattr(module.TorchBackend, name), place, key, is_staged))


def _reading(method: Callable[..., Any], place: int, key: str, is_staged: Callable[[Any], bool]) -> Callable[..., Any]:
    """The method with its input on the host already.

    DeepSpeed copies inputs back, too: over what has come, where that is a part of the input, as in the reductions of
    stage 3; and autograd would find them changed.
    """

    def host(held: Any) -> Any:
        if isinstance(held, list):
            return [host(each) for each in held]
        return held.cpu() if is_staged(held) else held

    @wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        if key in named:
            named[key] = host(named[key])
        elif len(given) > place:
            given = (*given[:place], host(given[place]), *given[place + 1 :])
        return method(self, *given, **named)

    return call
