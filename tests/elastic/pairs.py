"""Two engines in one process, in a job whose members come and go: `training.py` with another engine beside its own.

Both train the same model on the same data, the second one in stage `$BESIDE`, so that the history of each is that of a
static run; its steps are the events "beside". `$STYLE` names a loop that is refused.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch.distributed as dist

import ds_dynatrain
from ds_dynatrain.errors import DynatrainError
from tests.elastic import faulted
from tests.elastic.training import OUT, SETTINGS, STEP_SECONDS, Numbered, Script, built
from tests.engine.models import small_gpt
from tests.engine.pipelines import pipeline

BESIDE = int(os.environ.get("BESIDE", "3"))
STYLE = os.environ.get("STYLE", "")


def beside(stage: int) -> dict[str, Any]:
    """The settings of the second engine."""
    block = dict(SETTINGS["dynatrain"])
    if "fallback" in block:
        block["fallback"] = {**block["fallback"], "path": f"{block['fallback']['path']}-beside"}
    return {**SETTINGS, "zero_optimization": {"stage": stage}, "dynatrain": block}


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


class Pair(Script):
    def __init__(self) -> None:
        super().__init__()
        if STYLE == "fewer":
            return
        model, trained = built()
        self.other, *_ = ds_dynatrain.initialize(model=model, model_parameters=trained, config=beside(BESIDE))
        self.other_loader = self.other.loader(Numbered(), num_workers=0)
        self.other.on_switch(lambda event: self.say(event="switch beside", layout=event.target.layout))
        self.parts: dict[str, list[Any]] = {"step": [], "beside": []}

    def epoch(self) -> bool:
        if STYLE == "other first":
            next(iter(self.other_loader))
        feeds = endless(self.loader), endless(self.other_loader)
        for ours, theirs in zip(*feeds, strict=True):
            made = self.one("step", self.engine, ours), self.one("beside", self.other, theirs)
            if STYLE == "switches" and made[1] and self.other.layout.data == 2 and self.other.layout.zero_stage == 3:
                self.other.switch(zero_stage=2, at=int(self.other.global_steps))
                self.say(event="asked")
            if any(made):
                time.sleep(STEP_SECONDS)
            if made[0] and self.is_through():
                return True
        return True

    def one(self, name: str, engine: Any, batch: Any) -> bool:
        """A micro-batch of an engine; whether it was the last one of a step."""
        parts, step, micro_steps = self.parts[name], int(engine.global_steps), int(engine.micro_steps)
        counts = engine.layout.coordinate(engine.rank)["tensor"] == 0 and not engine.slot_is_borrowed
        loss = engine(*batch[:2])
        parts.append((loss.item(), batch[2].tolist() if counts else []))
        engine.backward(loss)
        engine.step()
        if engine.micro_steps != micro_steps + 1:  # the global batch is void
            parts.clear()
        if engine.micro_steps != micro_steps + 1 or engine.global_steps == step:
            return False
        self.say(event=name, step=step, parts=list(parts), rank=engine.rank, size=engine.layout.world_size)
        seen = dist.get_rank(), dist.get_world_size(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert seen == (self.engine.rank, self.engine.layout.world_size) * 2, seen
        parts.clear()
        return True


class Refused(Script):
    """What a second engine is refused for; the first goes on without it."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Any = None
        without = {**SETTINGS, "dynatrain": {**SETTINGS["dynatrain"], "fallback": {"path": str(OUT / "x")}}}
        for what, model, settings in (("pipeline", pipeline("tied"), SETTINGS), ("fallback", small_gpt(), without)):
            try:
                ds_dynatrain.initialize(model=model, config=settings)
            except DynatrainError as error:
                self.say(event="refused", what=what, said=str(error))

    def is_through(self) -> bool:
        if self.other is None:
            try:
                self.other = ds_dynatrain.initialize(model=small_gpt(), config=SETTINGS)
            except DynatrainError as error:
                self.other = "refused"
                self.say(event="refused", what="late", said=str(error))
        return super().is_through()


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "FAULT" in os.environ:
        faulted.install(os.environ["FAULT"])
    (Refused if STYLE == "refused" else Script if STYLE == "fewer" else Pair)().run()
    sys.exit(0)
