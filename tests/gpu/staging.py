"""How ranks that share one card communicate: NCCL takes a card once a host, so by a back-end of the tests.

DeepSpeed copies what it sends to the host first (its own way for accelerators without collectives), and gloo carries
it. With `$COLLECTIVES` "nccl" it is NCCL itself, to which each rank is a host of its own.
"""

from __future__ import annotations

import importlib
import os
import socket
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


OVER_SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_NTHREADS": "64",
}
"""How NCCL connects hosts that are processes of one machine. Small kernels: ranks of a card take turns on it."""


def be_a_host() -> None:
    """Let NCCL take this process for a host with a card of its own; call it before the first communicator.

    NCCL refuses two ranks on a card where their hosts have the same hash, and that is `$NCCL_HOSTID`'s.
    """
    os.environ.update(OVER_SOCKETS, NCCL_HOSTID=f"{socket.gethostname()}-{os.getpid()}")


def chosen_backend() -> str:
    """Choose by `$COLLECTIVES` how this process communicates, and those that it forks; return the back-end's name."""
    if os.environ.get("COLLECTIVES") == NCCL:
        be_a_host()
        os.register_at_fork(after_in_child=be_a_host)
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
