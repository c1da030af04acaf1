"""Loops as users write them, in a job whose members come and go: `training.py` with another way through a batch.

`$STYLE` names it. Where `$OUT/trap` is there, rank 1 is killed at the worst place of that style, by its own hand.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_dynatrain
from ds_dynatrain.reshard.process import PROCESS
from tests.elastic.training import OUT, STEP_SECONDS, Numbered, Script

STYLE = os.environ["STYLE"]


class Styled(Script):
    def fall(self) -> None:
        """The end of rank 1, once there is a trap."""
        if self.engine.rank == 1 and (OUT / "trap").exists():
            (OUT / "trap").unlink()
            (OUT / "fallen").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    def epoch(self) -> bool:
        parts: list[tuple[float, list[int]]] = []
        for batch in self.loader:
            step = int(self.engine.global_steps)
            try:
                loss = self.one(*batch)
                if self.engine.is_discarded:
                    parts = []
                    continue
                parts.append((loss, [] if self.engine.slot_is_borrowed else batch[2].tolist()))
                if self.engine.global_steps == step:
                    continue
                self.after_step()
            except ds_dynatrain.WorldChanged as changed:
                cause = str(changed.__cause__ or "")
                self.say(event="changed", step=step, said=str(changed), cause=cause, gloo="gloo" in cause)
                if self.engine.global_steps == step:
                    parts = []
                    continue
            self.say(event="step", step=step, parts=parts, rank=self.engine.rank, size=dist.get_world_size())
            parts = []
            time.sleep(STEP_SECONDS)
            if self.is_through():
                return True
        return False

    def after_step(self) -> None:
        """What the loop does once a step is made."""

    def one(self, inputs: Any, targets: Any, numbers: Any) -> float:
        """DeepSpeed's three calls."""
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())


class Collectives(Styled):
    """Collectives of its own in the middle of a batch and after a step, over all and over two groups of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.everybody = self.engine.new_group()
        self.halves = self.engine.new_group(lambda layout, nodes: [range(1), range(1, layout.world_size)])

    def one(self, inputs: Any, targets: Any, numbers: Any) -> float:
        loss = self.engine(inputs, targets)
        mean = loss.detach().clone()
        self.fall()
        dist.all_reduce(mean)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def after_step(self) -> None:
        ones = [torch.ones(1) for _ in range(3)]
        groups = [None, self.everybody.group, self.halves.group]
        for one, group in zip(ones, groups, strict=True):
            dist.all_reduce(one, group=group)
        self.say(event="sums", sums=[one.item() for one in ones], rank=self.engine.rank, size=dist.get_world_size())


class Backward(Styled):
    """torch's own call, on the loss that the engine has returned."""

    def __init__(self) -> None:
        super().__init__()
        trained = next(each for each in self.engine.module.parameters() if each.requires_grad)
        trained.register_hook(lambda gradient: self.fall())

    def one(self, inputs: Any, targets: Any, numbers: Any) -> float:
        loss = self.engine(inputs, targets)
        loss.backward()
        self.engine.step()
        return float(loss.item())


class Derived(Backward):
    """torch's own call, on a loss that is computed from what the engine has returned."""

    def one(self, inputs: Any, targets: Any, numbers: Any) -> float:
        loss = self.engine(inputs, targets) * 1.0
        loss.backward()
        self.engine.step()
        return float(loss.item())


class Boundary(Styled):
    """No loader of ours: the position in the data is the engine's count of steps."""

    def epoch(self) -> bool:
        engine, data = self.engine, Numbered()
        while True:
            engine.boundary()
            step, size = int(engine.global_steps), engine.global_batch_size
            order = next(self.loader.order.batches(step // self.loader.order.steps, step % self.loader.order.steps))
            slots = engine.batch.deal(size).rank(engine.data_rank)
            parts: list[tuple[float, list[int]]] = []
            for slot in slots:
                numbers = [int(order[position]) for position in slot.positions]
                inputs, targets = (torch.stack(each) for each in zip(*(data[i][:2] for i in numbers), strict=True))
                loss = engine(inputs, targets)
                self.fall()
                engine.backward(loss)
                engine.step()
                parts.append((float(loss.item()), numbers))
            if engine.is_discarded or engine.global_steps == step:
                continue
            self.say(event="step", step=step, parts=parts, rank=engine.rank, size=dist.get_world_size())
            time.sleep(STEP_SECONDS)
            if self.is_through():
                return True


class FirstLine(Styled):
    """The job's world is there before anything else, on those that start it; one that joins sees its node's own."""

    def __init__(self) -> None:
        joins = ds_dynatrain.init_distributed()
        seen = torch.ones(1)
        dist.all_reduce(seen)
        world = dist.get_rank(), dist.get_world_size()
        variables = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        deepspeed.init_distributed()
        deepspeed.comm.barrier()
        assert ds_dynatrain.init_distributed() == joins, "called again it says the same"
        super().__init__()
        self.say(event="first", joins=joins, world=world, variables=variables, seen=seen.item())


class OthersFirstLine(Styled):
    """DeepSpeed's and torch's own calls before `initialize`: the node's own world."""

    def __init__(self) -> None:
        if int(os.environ["LOCAL_RANK"]) >= 0:
            dist.init_process_group("gloo")
        deepspeed.init_distributed()
        dist.barrier()
        world = dist.get_rank(), dist.get_world_size()
        seen = torch.ones(1)
        dist.all_reduce(seen)
        super().__init__()
        self.say(event="first", joins=None, world=world, variables=[], seen=seen.item())


class Cut(Styled):
    """From the third step on, the connections of the world break in every batch, and nobody dies."""

    def one(self, inputs: Any, targets: Any, numbers: Any) -> float:
        loss = self.engine(inputs, targets)
        if self.engine.global_steps >= 3 and self.engine.rank == 1:
            PROCESS.membership._present[1].abort()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())


ALL = Collectives, Backward, Derived, Boundary, FirstLine, OthersFirstLine, Cut
STYLES = {made.__name__: made for made in ALL}

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    STYLES[STYLE]().run()
    sys.exit(0)
