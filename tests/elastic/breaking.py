"""`training.py`, in which a collective of each member fails in the step whose number stands in `$OUT/break`, once."""

from __future__ import annotations

import sys

import deepspeed
import torch

from tests.elastic.training import OUT, Script

LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
"""What gloo says."""


class Breaking(Script):
    def __init__(self) -> None:
        super().__init__()
        self.has_broken = False
        self.engine.module.register_forward_pre_hook(self.fail)

    def fail(self, module: torch.nn.Module, inputs: object) -> None:
        told = OUT / "break"
        if self.has_broken or not told.exists() or int(self.engine.global_steps) != int(told.read_text()):
            return
        self.has_broken = True
        self.say(event="broken")
        raise RuntimeError(LOST)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    Breaking().run()
    sys.exit(0)
