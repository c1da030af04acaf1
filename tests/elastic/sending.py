"""`training.py`, which sends its weights to `$RECEIVER` after each step, and asks for stage 2 at step `$SWITCH_AT`.

A line for each update, with its version and digests, and one for each that did not arrive.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch.distributed as td

from ds_dynatrain.errors import TransferError, WorldChanged
from ds_dynatrain.weights.receivers.group import Group
from ds_dynatrain.weights.update import send
from tests.elastic.training import Script

SWITCH_AT = int(os.environ.get("SWITCH_AT", "0"))


class Sending(Script):
    """See the module."""

    def __init__(self) -> None:
        self.group = Group(os.environ["RECEIVER"], timeout_seconds=20)
        super().__init__()

    def say(self, **what: Any) -> None:
        """Send after a step."""
        super().say(**what)
        if what.get("event") == "step":
            step = int(self.engine.global_steps)
            if step == SWITCH_AT:
                self.engine.switch(zero_stage=2, at=step + 1)
            self.send(step)

    def send(self, step: int) -> None:
        """Send the weights; if that fails the next update brings them."""
        try:
            update = send(self.engine, self.group, delta=step % 3 > 0)
        except (TransferError, WorldChanged, td.DistError) as error:
            super().say(event="unsent", step=step, why=f"{type(error).__name__}: {error}")
        else:
            super().say(event="sent", step=step, version=update.version, digests=update.digests)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    Sending().run()
    sys.exit(0)
