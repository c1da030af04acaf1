"""A user's training script: DeepSpeed's loop, and nothing about membership. Run by torchrun, also for static runs.

Writes a line of JSON for each step and each event into `$OUT/PID.jsonl`: the loss and the samples of every
micro-batch that this rank had. It ends after `$STEPS` optimizer steps, or at the end of the step in which `$OUT/stop`
appears.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

import ds_dynatrain
from tests.engine.models import Sequences, decay_groups, small_gpt
from tests.engine.pipelines import pipeline

OUT = Path(os.environ["OUT"])
STEPS = int(os.environ.get("STEPS", "100000"))
SETTINGS: dict[str, Any] = json.loads(os.environ["SETTINGS"])
WIDTH = int(os.environ.get("WIDTH", "15"))
WORKERS = int(os.environ.get("WORKERS", "0"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))
HOW = os.environ.get("HOW", "")
KIND = os.environ.get("KIND", "gpt")


class Numbered(Sequences):
    """Sample i with its number."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:  # type: ignore[override]
        return *super().__getitem__(index), index


class Script:
    def __init__(self) -> None:
        self.log = (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1)
        if HOW == "dies while warming up":
            os._exit(3)
        if KIND == "pipeline":  # which asks for a world before there is the job's: the node's own
            deepspeed.init_distributed()
            torch.distributed.barrier()
        model = pipeline("tied") if KIND == "pipeline" else small_gpt(width=WIDTH)
        self.engine, *_ = ds_dynatrain.initialize(model=model, model_parameters=decay_groups(model), config=SETTINGS)
        data = Sequences() if KIND == "pipeline" else Numbered()
        self.loader = self.engine.loader(data, num_workers=WORKERS)
        self.engine.on_switch(self.note)
        self.say(event="ready")

    def run(self) -> None:
        while not (self.batches() if KIND == "pipeline" else self.epoch()):
            pass
        self.say(event="end")

    def epoch(self) -> bool:
        """One pass over the data, or what is left of it; whether the script is through."""
        parts: list[tuple[float, list[int]]] = []
        for inputs, targets, numbers in self.loader:
            engine, step = self.engine, int(self.engine.global_steps)
            loss = engine(inputs, targets)
            parts.append((loss.item(), [] if engine.slot_is_borrowed else numbers.tolist()))
            engine.backward(loss)
            engine.step()
            if engine.global_steps == step:
                continue
            self.say(event="step", step=step, parts=parts, rank=engine.rank, size=int(os.environ["WORLD_SIZE"]))
            parts = []
            time.sleep(STEP_SECONDS)
            if self.is_through():
                return True
        return False

    def batches(self) -> bool:
        """One pass with a pipeline, which makes a whole step a call; every rank has the loss of all samples."""
        feed = iter(self.loader)
        while self.engine.global_steps < STEPS:
            try:
                loss = self.engine.train_batch(feed).item()
            except StopIteration:
                return False
            step = int(self.engine.global_steps) - 1
            self.say(event="step", step=step, parts=[(loss, [step])] if self.engine.rank == 0 else [])
            time.sleep(STEP_SECONDS)
        return True

    def is_through(self) -> bool:
        """Whether all working members have seen the end; they agree on it."""
        if self.engine.global_steps >= STEPS:
            return True
        return bool(self.engine.mean(float((OUT / "stop").exists()), 1) > 0)

    @property
    def generation(self) -> int:
        """Of the membership; 0 in a static run."""
        elastic = self.engine.job.elastic
        return 0 if elastic is None else elastic.generation

    def note(self, event: Any) -> None:
        """A switch was committed."""
        self.say(event="switch", pause_ms=event.pause_ms, step=event.step, layout=event.target.layout)

    def say(self, **what: Any) -> None:
        line = {"pid": os.getpid(), "time": time.monotonic(), "generation": self.generation, **what}
        self.log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # who is killed while it compiles leaves a lock behind
    )
    Script().run()
    sys.exit(0)
