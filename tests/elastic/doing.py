"""`training.py` that evaluates and asks for a switch in between, at steps that stand in files of `$OUT`.

"evaluates": after that step each member goes through an evaluation of `$EVALUATION` batches, each of which takes
`$EVALUATION_SECONDS`, in line for line the loop of the docs. "switches": a step, and a layout as JSON, which the script
asks for at that step.
"""

from __future__ import annotations

import json
import os
import sys
import time

import deepspeed

from tests.elastic import faulted
from tests.elastic.training import OUT, Script
from tests.engine.models import Sequences

EVALUATION = int(os.environ.get("EVALUATION", "20"))
EVALUATION_SECONDS = float(os.environ.get("EVALUATION_SECONDS", "0.3"))


class Doing(Script):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        held_out = Sequences(EVALUATION * self.engine.data)
        self.evaluation = self.engine.loader(held_out, evaluation=True, batch_size=1, num_workers=0)

    def is_through(self) -> bool:
        """Between two steps."""
        step = int(self.engine.global_steps)
        told = OUT / "evaluates"
        if told.exists() and step == int(told.read_text()):
            self.evaluate()
        asked = OUT / "switches"
        if asked.exists():
            at, layout = asked.read_text().split(maxsplit=1)
            sizes, present = json.loads(layout), self.engine.layout.to_dict()
            if step == int(at) and any(present[name] != size for name, size in sizes.items()):
                self.engine.switch(**sizes)
        return super().is_through()

    def evaluate(self) -> None:
        """A long one."""
        self.engine.eval()
        total, count = 0.0, 0
        for number, (inputs, targets) in enumerate(self.evaluation):
            self.say(event="evaluating", batch=number)
            total += float(self.engine(inputs, targets)) * self.evaluation.samples
            count += self.evaluation.samples
            time.sleep(EVALUATION_SECONDS)
        self.engine.mean(total / max(count, 1), count)
        self.engine.train()
        self.say(event="evaluated")


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    if "FAULT" in os.environ:
        faulted.install(os.environ["FAULT"])
    Doing().run()
    sys.exit(0)
