"""`idling.py` that saves a checkpoint, and loads it later, once.

"saves": the step after which. "loads", of who has saved: at the first step from that one on in a world of so many
working members, with which call ("load", or "load_checkpoint" for one of DeepSpeed's), and "dies" where all that work
die right after it.
"""

from __future__ import annotations

import os
import sys

import deepspeed

from tests.elastic import faulted
from tests.elastic.idling import Idling
from tests.elastic.training import OUT

SAVED = str(OUT / "saved")


class Loading(Idling):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.has_saved = self.has_loaded = False

    def is_through(self) -> bool:
        """Between two steps."""
        saves, loads = OUT / "saves", OUT / "loads"
        if saves.exists() and not self.has_saved and self.step == int(saves.read_text()):
            self.has_saved = True
            self.engine.save(SAVED, "ours")
            self.engine.save_checkpoint(SAVED, "stock")
            self.say(event="saved", step=self.step)
        if loads.exists() and self.has_saved and not self.has_loaded:
            step, size, call, *more = loads.read_text().split()
            if self.step >= int(step) and self.engine.layout.world_size == int(size):
                self.load(call)
                if more:
                    faulted.kill()
        return super().is_through()

    def load(self, call: str) -> None:
        """What was saved."""
        self.has_loaded, before = True, self.step
        if call == "load":
            self.engine.load(SAVED, "ours")
        else:
            assert self.engine.load_checkpoint(SAVED, "stock")[0] is not None
        self.say(event="loaded", before=before, step=self.step)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    if "FAULT" in os.environ:
        faulted.install(os.environ["FAULT"])
    Loading().run()
    sys.exit(0)
