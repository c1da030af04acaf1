"""The processes behind a pool whose ranks compute on the device: those of `tests.engine`, with its accelerator in place
before anything of ds_dynatrain is imported. They begin as those of a user's script do: DeepSpeed makes the launch group
over the accelerator's own collectives.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as td
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils._pytree import tree_map_only

from tests.device import accelerator, lab


def pair_groups() -> None:
    """Give groups made by hand collectives for the device."""
    from ds_dynatrain.adapters import process_groups

    around = process_groups._around

    def pair(backends: Any, kind: Any, store: Any, name: str, *rest: Any) -> Any:
        group = around(backends, kind, store, name, *rest)
        if list(backends) == [torch.device("cpu")]:
            staged = lab.load().staged(backends[torch.device("cpu")])
            group._register_backend(torch.device(lab.NAME), td.ProcessGroup.BackendType.CUSTOM, staged)
            group._set_group_name(name)
        return group

    process_groups._around = pair


def move_batches() -> None:
    """Do for the tests what a user's script does: what an engine is called with goes to its device."""
    forward = DeepSpeedEngine.forward

    def moving(self: Any, *given: Any, **named: Any) -> Any:
        given, named = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), (given, named))
        return forward(self, *given, **named)

    DeepSpeedEngine.forward = moving


if __name__ == "__main__":
    accelerator.use()
    move_batches()
    pair_groups()
    from tests.engine import rank_process

    rank_process.main(int(sys.argv[1]), sys.argv[2:], backend=f"cpu:gloo,{lab.NAME}:{lab.BACKEND}")
