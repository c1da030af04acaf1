"""One rank of `bench_after.py`: trains a model without stages while rank 1 becomes slow, and records what the job does.

torchrun ... balance_slow_ranks.py FOLDER '{"from_step": 30, "steps": 90, "pace": 2.0, "slow_steps": 20}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from burning import WIDTH, Burn, Points, burn
from launch import Notes
from torch import nn
from workload import quiet

import ds_dynatrain

BATCH, SECONDS = 24, 0.001
"""Samples of a step, and the seconds of a sample in the forward pass. The backward pass takes half as long."""


class Paced(nn.Module):
    """A layer that takes a known time for each sample.

    pace: the factor by which it takes longer on this member.
    """

    pace = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Map [samples, WIDTH] to a loss."""
        seconds = SECONDS * self.pace * len(hidden)
        burn(seconds)
        made: torch.Tensor = Burn.apply(self.matrix(hidden), 2 * seconds, [])  # type: ignore[no-untyped-call]
        return (made - wanted).square().mean()


def main() -> None:
    """Train. Rank 0 records the first switch."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    model, world = Paced(), td.get_world_size()
    balance = {"mode": "act", "slow_steps": wanted["slow_steps"]}
    block = {"layout": {"data": world}, "timeout_seconds": 120, "balance": balance}
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dynatrain": block,
    }
    engine, _, loader, _ = ds_dynatrain.initialize(model=model, config=config, training_data=Points())
    events: list[Any] = []
    engine.on_switch(events.append)
    is_slow = engine.rank == 1
    while engine.idle or engine.global_steps < wanted["steps"]:
        for batch in loader:
            model.pace = wanted["pace"] if is_slow and engine.global_steps >= wanted["from_step"] else 1.0
            engine.backward(engine(*batch))
            engine.step()
            if engine.global_steps >= wanted["steps"]:
                break
    if engine.rank == 0 and events:
        event = events[0]
        gains = {"predicted_gain": event.predicted_gain, "measured_gain": engine.last_switch.measured_gain}
        note = {"step": event.step, "layout": str(ds_dynatrain.Layout.from_dict(event.target.layout)), **gains}
        Notes(folder, 0).write(note)


if __name__ == "__main__":
    main()
