"""The processes behind a pool whose ranks compute on the device: those of `tests.engine`, with its accelerator in place
before anything of ds_dynatrain is imported. They begin as those of a user's script do: DeepSpeed makes the launch group
over the accelerator's own collectives.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils._pytree import tree_map_only

from tests.device import accelerator, lab


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
    from tests.engine import rank_process

    rank_process.main(int(sys.argv[1]), sys.argv[2:], backend=lab.BACKEND)
