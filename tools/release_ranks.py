"""One worker of `bench_release.py`: a pipeline of twelve layers, nine of which are frozen during training.

`$SETTINGS` is DeepSpeed's configuration. Lines of JSON about each step go to `$OUT/PID.jsonl`, and the profile of the
frozen model to `$OUT/profile.json`. Training ends at the step whose number is in `$OUT/stop`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ds_dynatrain

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from dynamic.model import Dynamism, Sizes, pipeline
from gpt import Block, Windows, texts

OUT, SETTINGS = Path(os.environ["OUT"]), json.loads(os.environ["SETTINGS"])
FREEZE_AT, FROZEN = int(os.environ["FREEZE_AT"]), 9


class DenseBlock(Block):
    """A block that does not change."""

    def __init__(self, number: int, count: int, width: int, heads: int) -> None:
        super().__init__(width, heads)


DENSE = Dynamism(DenseBlock, lambda *_: "")
SIZES = Sizes(blocks=10, width=96)


def freeze(engine: Any) -> None:
    """Freeze all layers except the last three."""
    for name, layer in engine.module.named_children():
        if name.isdigit() and int(name) < FROZEN:
            layer.requires_grad_(False)
    engine.update_param_groups()
    engine.balancer.note("three quarters are frozen")


def main() -> None:
    """Train until told to stop."""
    ds_dynatrain.init_distributed()
    samples = Windows(texts()[0], 10_000, DENSE.length)
    engine, *_ = ds_dynatrain.initialize(model=pipeline(DENSE, SIZES), config=SETTINGS, training_data=samples)
    stop, profile = OUT / "stop", None
    with (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1) as log:
        while not (stop.exists() and engine.global_steps >= int(stop.read_text())):
            if engine.global_steps == FREEZE_AT:
                freeze(engine)
            loss = engine.train_batch().item()
            line = {
                "event": "step",
                "generation": 0,
                "pid": os.getpid(),
                "step": int(engine.global_steps) - 1,
                "loss": loss,
                "members": engine.layout.world_size,
                "time": time.monotonic(),
                "saved": engine.balancer.saved_member_seconds,
            }
            log.write(json.dumps(line) + "\n")
            if engine.rank == 0 and engine.global_steps > FREEZE_AT and engine.balancer.profile is not profile:
                profile = engine.balancer.profile
                profile.save(OUT / "profile.json")


if __name__ == "__main__":
    main()
