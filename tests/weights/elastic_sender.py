"""`tests/elastic/doing.py` that sends its weights to receivers at `$RECEIVERS` after each step.

An update during which a member dies is lost; the loop goes on with the next batch, and sends again.
"""

from __future__ import annotations

import os
import sys

import deepspeed

from ds_dynatrain import WorldChanged
from ds_dynatrain.errors import TransferError
from ds_dynatrain.weights import send
from ds_dynatrain.weights.receivers import Group
from tests.elastic.doing import Doing


class Sending(Doing):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.group = Group(os.environ["RECEIVERS"], timeout_seconds=20)

    def is_through(self) -> bool:
        """Between two steps."""
        try:
            # a full update without deltas after it keeps no values: the next one has to be full, too
            update = send(self.engine, self.group, delta=int(self.engine.global_steps) % 3 > 0)
            self.say(event="update", version=update.version, step=update.step, delta=update.is_delta)
        except (WorldChanged, TransferError) as error:
            self.say(event="lost", error=str(error))
        return super().is_through()


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `tests/elastic/training.py`
    Sending().run()
    sys.exit(0)
