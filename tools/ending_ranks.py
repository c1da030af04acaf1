"""One rank of `bench_ending.py`: trains, and records its steps, until it is told to end.

Started by torchrun agents. $OUT is the folder for its lines, and $WANTED has its settings: '{"size": "125M", "dtype":
"fp32", "stage": 1, "batch": 12, "length": 32, "kept": "/folder"}'
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import deepspeed
import torch
from workload import GPT, SIZES, Samples, config, quiet

import ds_dynatrain


def main() -> None:
    """Train. Write a line for each step, and one for the step from which it continues."""
    wanted = json.loads(os.environ["WANTED"])
    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # so that no rank waits for a compiler
    shape = SIZES[wanted["size"]]
    kept = {"path": wanted["kept"]}
    block = {"fallback": {**kept, "every_steps": 10**6}, "resume": kept}
    torch.manual_seed(0)
    engine, *_ = ds_dynatrain.initialize(
        config={**config(wanted["dtype"], wanted["stage"], wanted["batch"]), "dynatrain": block}, model=GPT(**shape)
    )
    loader = engine.loader(Samples(10**6, wanted["length"], shape["vocabulary"]), num_workers=0)
    step = engine.global_steps
    with (Path(os.environ["OUT"]) / f"{os.getpid()}.jsonl").open("a", buffering=1) as lines:
        for tokens in loader:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            if engine.global_steps == step:
                continue
            step = engine.global_steps
            line = {"event": "step", "generation": engine.generation, "pid": os.getpid(), "step": step}
            lines.write(json.dumps({**line, "time": time.time(), "ranks": engine.data}) + "\n")


if __name__ == "__main__":
    main()
