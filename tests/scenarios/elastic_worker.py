"""A user's training script, run by torchrun on each node of a launch: DeepSpeed's loop, and nothing about membership.

torchrun ... elastic_worker.py SETTINGS OUT

SETTINGS is a file with one JSON object. Its keys: `model`, a name in `models.MODELS`; `config`, DeepSpeed's; `seed`, of
torch; `epochs`, after which the script ends, counted by itself (0: for ever, counted by the engine); `pause`, seconds
after each step; `steps`, after which it ends, if there are any. It writes lines of JSON into OUT/PID.jsonl: a "batch"
with the loss and the samples of each micro-batch that it trains, a "step" once the optimizer has made it. All end after
the step whose number stands in OUT/stop.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch

import ds_dynatrain
from tests.scenarios.models import MODELS, Texts, build


class Script:
    """One process of the job."""

    def __init__(self, settings: dict[str, Any], out: Path) -> None:
        self.settings, self.out = settings, out
        self.log = (out / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self.kind = MODELS[settings["model"]]
        if self.kind.is_pipeline:
            deepspeed.init_distributed()  # a PipelineModule asks for a world; until `initialize` it is the node's own
        model = build(settings["model"])
        torch.manual_seed(settings["seed"])
        config = {**(self.kind.config or {}), **settings["config"]}
        trained = [held for held in model.parameters() if held.requires_grad]
        self.engine, *_ = ds_dynatrain.initialize(model=model, model_parameters=trained, config=config)
        self.loader = self.engine.loader(Texts(numbered=not self.kind.is_pipeline), num_workers=0)
        self.say("ready", step=int(self.engine.global_steps), joins=self.engine.is_newcomer)

    def run(self) -> None:
        """Train until all epochs are over, or the step of OUT/stop is made."""
        for _ in self.epochs():
            if self.pipelined() if self.kind.is_pipeline else self.epoch():
                break
        self.say("end", step=int(self.engine.global_steps))

    def epochs(self) -> Iterable[int]:
        """Return what the outer loop goes over."""
        count = self.settings["epochs"]
        return range(count) if count else self.engine.epochs(10**6)

    def epoch(self) -> bool:
        """Train one pass over the data; return whether the job is over."""
        for numbers, inputs, targets in self.loader:
            engine, step, generation = self.engine, int(self.engine.global_steps), self.engine.generation
            loss = self.kind.loss(engine, inputs, targets)
            if not engine.is_discarded and self.is_counted:
                self.say("batch", step, generation, loss=loss.item(), samples=numbers.tolist())
            engine.backward(loss)
            engine.step()
            if engine.global_steps == step + 1 and self.is_made(step, generation):
                return True
        return False

    def pipelined(self) -> bool:
        """Train one pass with a pipeline, which makes a whole step in a call."""
        for batches in itertools.repeat(iter(self.loader)):
            try:
                loss = self.engine.train_batch(batches).item()
            except StopIteration:
                return False
            step, generation = int(self.engine.global_steps) - 1, self.engine.generation
            if self.engine.rank == 0:
                self.say("batch", step, generation, loss=loss, samples=[])
            if self.is_made(step, generation):
                return True
        return False

    @property
    def is_counted(self) -> bool:
        """Whether the samples of this rank are nobody else's."""
        place = self.engine.layout.coordinate(self.engine.rank)
        return not (place["tensor"] or place["sequence"] or self.engine.slot_is_borrowed)

    def is_made(self, step: int, generation: int) -> bool:
        """Tell of a step; return whether it was the last one."""
        self.say("step", step, generation, rank=self.engine.rank, size=len(self.engine.members))
        time.sleep(self.settings["pause"])
        stop = self.out / "stop"
        if step + 1 == self.settings.get("steps"):
            return True
        return stop.exists() and step >= int(stop.read_text())

    def say(self, event: str, step: int, generation: int = 0, **more: Any) -> None:
        """Write one line."""
        line = {"event": event, "step": step, "run": self.settings["run"], "generation": generation, "pid": os.getpid()}
        self.log.write(json.dumps({**line, "layout": str(self.engine.layout), **more}) + "\n")


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # one that is killed as it compiles leaves a lock
    Script(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])).run()
