"""The processes behind a pool whose ranks share one card: those of `tests.engine`, with collectives staged on gloo.

NCCL takes each card once, so the accelerator communicates by a back-end of the tests: DeepSpeed copies what it sends to
the host first (its own way for accelerators without collectives), and gloo carries it.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from typing import Any

BACKEND = "staged"


def stage_collectives() -> None:
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

    td.Backend.register_backend(BACKEND, make, devices=["cuda"])
    get_accelerator()._communication_backend_name = BACKEND
    backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute of its package it is torch itself
    vars(backend)["_needs_cpu_staging"] = lambda held: isinstance(held, torch.Tensor) and held.is_cuda


if __name__ == "__main__":
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked CUDA itself cannot fork ranks
    stage_collectives()
    from tests.device.batches import move_batches
    from tests.engine import rank_process

    move_batches()
    rank_process.main(int(sys.argv[1]), sys.argv[2:], backend=BACKEND)
