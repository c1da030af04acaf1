"""Several engines in one process, in a job whose members come and go: `training.py` with others beside its own.

Each of the others trains the small GPT on the same data, in one of the stages `$BESIDE`, so that its history is that of
a static run; its steps are the events "beside", of a third engine "beside 3". `$STYLE` names another loop: "zip" asks
all engines for a batch before it trains one; in "smaller" the others' micro-batches are, so they accumulate more of
them; "boundaries" has no loader; "switches" switches the second engine by itself; the rest are refused or ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_dynatrain
from ds_dynatrain.errors import DynatrainError
from tests.elastic import faulted
from tests.elastic.training import OUT, SETTINGS, STEP_SECONDS, WIDTH, Numbered, Script
from tests.engine import ulysses
from tests.engine.models import decay_groups, small_gpt
from tests.engine.pipelines import pipeline

BESIDE = [int(stage) for stage in os.environ.get("BESIDE", "3").split(",")]
STYLE = os.environ.get("STYLE", "")


def beside(name: str, stage: int) -> dict[str, Any]:
    """The settings of another engine than the first: data parallel, whatever that is."""
    settings, block = dict(SETTINGS), dict(SETTINGS["dynatrain"])
    settings.pop("expert_parallel", None)
    block.pop("layout", None)
    if STYLE == "smaller":
        settings["train_micro_batch_size_per_gpu"] = 2
    if "fallback" in block:
        block["fallback"] = {**block["fallback"], "path": f"{block['fallback']['path']}-{name}"}
    return {**settings, "zero_optimization": {"stage": stage}, "dynatrain": block}


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


class Several(Script):
    def __init__(self) -> None:
        super().__init__()
        self.data = Numbered()
        names = ["beside", *(f"beside {number}" for number in range(3, 2 + len(BESIDE)))]
        self.others = {name: self.another(name, stage) for name, stage in zip(names, BESIDE, strict=True)}
        self.loaders = {name: other.loader(Numbered(), num_workers=0) for name, other in self.others.items()}
        self.feeds = {name: endless(loader) for name, loader in self.loaders.items()}
        self.parts: dict[str, list[Any]] = {name: [] for name in ("step", *names)}
        self.stood: dict[str, int] = {}

    def another(self, name: str, stage: int) -> Any:
        model = small_gpt(width=WIDTH)
        settings = beside(name.replace(" ", "-"), stage)
        other, *_ = ds_dynatrain.initialize(model=model, model_parameters=decay_groups(model), config=settings)
        other.on_switch(lambda event: self.say(event=f"switch {name}", layout=event.target.layout))
        return other

    def epoch(self) -> bool:
        if STYLE == "other first":
            next(self.feeds["beside"])
        if STYLE == "boundaries":
            return self.without_loaders()
        for batch in endless(self.loader):
            dealt = {name: next(feed) for name, feed in self.feeds.items()} if STYLE == "zip" else {}
            made = self.one("step", self.engine, batch)
            if any([*self.all_beside(dealt), made and STYLE != "until"]):
                time.sleep(STEP_SECONDS)
            if made and self.is_through():
                return True
        return True

    def without_loaders(self) -> bool:
        """A whole global batch of each engine in turn, by their counts of steps."""
        while True:
            made = []
            for name, engine in {"step": self.engine, **self.others}.items():
                engine.boundary()
                order, step = self.loaders.get(name, self.loader).order, int(engine.global_steps)
                numbers = next(order.batches(step // order.steps, step % order.steps))
                for slot in engine.batch.deal(engine.global_batch_size).rank(engine.data_rank):
                    mine = [int(numbers[position]) for position in slot.positions]
                    rows = [torch.stack(each) for each in zip(*(self.data[i][:2] for i in mine), strict=True)]
                    ended = self.one(name, engine, (*rows, torch.tensor(mine)))
                made.append(ended)
            time.sleep(STEP_SECONDS)
            if made[0] and self.is_through():
                return True

    def train_others(self) -> None:
        self.all_beside({})

    def all_beside(self, dealt: dict[str, Any]) -> list[bool]:
        """A micro-batch of each other engine; whether it was the last one of a step. dealt: those it has already."""
        made = []
        for name, other in self.others.items():
            if STYLE == "until":
                self.until(name, other)
                continue
            made.append(self.one(name, other, dealt[name] if dealt else next(self.feeds[name])))
            if STYLE == "switches" and made[-1] and other.layout.data == 2 and other.layout.zero_stage == 3:
                other.switch(zero_stage=2, at=int(other.global_steps))
                self.say(event="asked")
        return made

    def until(self, name: str, other: Any) -> None:
        """Go on until a step is made, which no discarded batch makes. Nearly all the time is spent here."""
        wanted = int(other.global_steps) + 1
        time.sleep(STEP_SECONDS)
        while other.global_steps < wanted:
            self.one(name, other, next(self.feeds[name]))

    def one(self, name: str, engine: Any, batch: Any) -> bool:
        """A micro-batch of an engine; whether it was the last one of a step."""
        parts, step, micro_steps = self.parts[name], int(engine.global_steps), int(engine.micro_steps)
        if micro_steps != self.stood.get(name, micro_steps):  # it was taken back, in the middle of a step
            parts.clear()
        place, is_cut = engine.layout.coordinate(engine.rank), engine.sequence > 1
        counts = place["tensor"] == place["sequence"] == 0 and not engine.slot_is_borrowed
        loss = engine(*(ulysses.own_part(engine, tuple(batch[:2])) if is_cut else batch[:2]))
        mean = engine.mean(loss.detach(), len(batch[2])) if is_cut else loss  # of all parts
        parts.append((mean.item(), batch[2].tolist() if counts else []))
        engine.backward(loss / engine.sequence)
        engine.step()
        self.stood[name] = int(engine.micro_steps)
        if engine.micro_steps != micro_steps + 1:  # the global batch is discarded
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
    (Refused if STYLE == "refused" else Script if STYLE == "fewer" else Several)().run()
    sys.exit(0)
