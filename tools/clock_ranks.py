"""One rank of `bench_clocks.py`: layers that burn processor time, the longer the lower the rank's clock.

torchrun ... clock_ranks.py FOLDER '{"forward": [0.004, ...], "layout": {...}, "slow": 1.0, "trial": false, ...}'

slow: how many times as long the last rank takes. trial: no clocks are searched for; all ranks that are not in `keep`
try each clock in turn, for one window.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import burning
import deepspeed
import torch
import torch.distributed as td
from burning import Burning, Points
from deepspeed.pipe import LayerSpec, PipelineModule
from launch import Notes
from throttle import Throttle
from torch import nn
from workload import quiet

import ds_dynatrain

MICRO_BATCHES = 8
"""Of a step, in each data index."""


class Whole(nn.Module):
    """A model without stages, which returns its loss."""

    def __init__(self, forward: float) -> None:
        super().__init__()
        self.layer = Burning(forward, 2 * forward)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean square of the difference."""
        return nn.functional.mse_loss(self.layer(x), y)


def main() -> None:
    """Train; note the busy seconds of each window with the clock of this rank, and the seconds of steps."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nobody has to wait for a compiler
    deepspeed.init_distributed(verbose=False)
    rank, layout, forward = td.get_rank(), wanted["layout"], wanted["forward"]
    factor = wanted["slow"] if rank == td.get_world_size() - 1 else 1.0
    burning.longer = lambda: factor * Throttle.longer()
    has_stages = layout.get("pipe", 1) > 1
    layers = [LayerSpec(Burning, each, 2 * each) for each in forward]
    model = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss()) if has_stages else Whole(forward[0])
    blocks: dict[str, Any] = {"layout": layout, "timeout_seconds": 120, "balance": {"slow_ratio": None}}
    if not wanted["trial"]:
        blocks["clocks"] = {"actuator": "throttle:Throttle"}
    config = {
        "train_batch_size": 2 * MICRO_BATCHES * layout["data"],
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dynatrain": blocks,
    }
    engine, _, loader, _ = ds_dynatrain.initialize(model=model, config=config, training_data=Points())
    notes, clock, tried = Notes(folder, rank), Throttle(rank), 0
    batches, busy = iter(loader), None
    while engine.global_steps < wanted["steps"] and tried < len(clock.clocks):
        share, begin = Throttle.share, time.perf_counter()
        if has_stages:
            engine.train_batch()
        else:
            for _ in range(MICRO_BATCHES):
                engine.backward(engine(*next(batches)))
                engine.step()
        seconds = time.perf_counter() - begin
        now = engine.balancer.busy
        notes.write({"seconds": seconds, "share": share, "busy": None if now is busy else now.seconds})
        if now is not busy and wanted["trial"]:
            tried += 1
            if rank not in wanted["keep"] and tried < len(clock.clocks):
                clock.set(clock.clocks[-1 - tried])
            engine.balancer.expect_new_costs()
        busy = now


if __name__ == "__main__":
    main()
