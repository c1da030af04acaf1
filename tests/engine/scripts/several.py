"""Two engines under torchrun, one of which switches; the arguments are a folder, how many steps, and how it ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_dynatrain
from tests.engine.jobs import config
from tests.engine.models import Sequences, small_gpt

FOLDER, STEPS, HOW = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # who is ended while it compiles leaves a lock behind
dist.init_process_group("gloo")


def made(name: str, stage: int, **sizes: Any) -> tuple[Any, Any]:
    """An engine over all processes, with its loader."""
    settings = config("fp32", (dist.get_world_size(), stage))
    kept = str(FOLDER / name)
    settings["dynatrain"] |= {"fallback": {"path": kept, "on_sigterm": True}, "resume": {"path": kept}}
    engine, _, _, _ = ds_dynatrain.initialize(model=small_gpt(**sizes), config=settings)
    return engine, engine.loader(Sequences(), num_workers=2 if HOW == "loader workers" else 0)


actor, others = made("actor", 1)
critic, batches = made("critic", 3, width=12)
print(f"begin {actor.global_steps} {critic.global_steps}", flush=True)
while actor.global_steps < STEPS:
    for pair in zip(others, batches, strict=True):
        for engine, batch in zip((actor, critic), pair, strict=True):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
        if actor.global_steps == 2:
            actor.switch(zero_stage=3, at=2)
        if HOW == "raises" and actor.global_steps == 3 and dist.get_rank() == 1:
            raise ValueError("wrong on member 1")
        total = torch.ones(1)
        dist.all_reduce(total)
        (FOLDER / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
        time.sleep(0.02)
        if actor.global_steps >= STEPS:
            break
print(f"end {actor.global_steps} {critic.global_steps} of {total.item():g}: {actor.layout}", flush=True)
if HOW == "takes down":
    dist.destroy_process_group()
if HOW == "destroys":
    critic.destroy()
