"""One rank of `bench_balance.py --ranks`: times the steps of a pipeline of sleeping layers in several layouts.

torchrun ... balance_ranks.py FOLDER '{"forward": [0.01, ...], "backward": [...], "walk": [{...}], "steps": 5, ...}'

`speeds` may give the speed of each rank; by default all speeds are 1.

A sleeping layer uses no processor time, so many ranks on few cores show the true times of a pipeline.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from deepspeed.pipe import LayerSpec, PipelineModule
from launch import Notes
from torch import nn
from workload import quiet

import ds_dynatrain

WIDTH = 8


class Sleep(torch.autograd.Function):
    """A function that copies a tensor and sleeps for a number of seconds per sample, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        """Sleep, and return a copy."""
        ctx.seconds = backward * len(x)
        time.sleep(forward * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Sleep, and return the gradient unchanged."""
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeper(nn.Module):
    """A small layer that takes as long for each sample as a large one."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.matrix, self._seconds = nn.Linear(WIDTH, WIDTH), (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, WIDTH] to the same shape."""
        return Sleep.apply(self.matrix(x), *self._seconds)  # type: ignore[no-any-return, no-untyped-call]


class Points(torch.utils.data.Dataset[Any]):
    """A data set whose samples are all equal."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(WIDTH), torch.zeros(WIDTH)


def main() -> None:
    """Train in each layout, and record the seconds of each step except the first two."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    notes, walk, steps = Notes(folder, td.get_rank()), wanted["walk"], wanted["steps"]
    speed = wanted.get("speeds", [1.0] * td.get_world_size())[td.get_rank()]
    seconds = [(each / speed, other / speed) for each, other in zip(wanted["forward"], wanted["backward"], strict=True)]
    model = PipelineModule([LayerSpec(Sleeper, *each) for each in seconds], num_stages=1, loss_fn=nn.MSELoss())
    config = {
        "train_batch_size": wanted["batch"],
        "train_micro_batch_size_per_gpu": wanted["micro_batch"],
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dynatrain": {"layout": walk[0], "timeout_seconds": 120},
    }
    engine, *_ = ds_dynatrain.initialize(model=model, config=config, training_data=Points())
    while engine.idle or engine.global_steps < steps * len(walk):
        place, number = divmod(engine.global_steps, steps)
        if not engine.idle and place and not number:
            engine.switch(ds_dynatrain.Layout.from_dict(walk[place]), at=engine.global_steps)
        begin = time.perf_counter()
        engine.train_batch()
        place, number = divmod(engine.global_steps - 1, steps)
        if engine.rank == 0 and number >= 2:
            notes.write({"place": place, "seconds": time.perf_counter() - begin, "layout": engine.layout.to_dict()})


if __name__ == "__main__":
    main()
