"""A job under torchrun that saves on SIGTERM; the arguments are the folder and how many steps to make at most."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deepspeed

import ds_dynatrain
from tests.engine.jobs import config
from tests.engine.models import Sequences, small_gpt

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # who is ended while it compiles leaves a lock behind
settings = config("fp32", (int(os.environ["WORLD_SIZE"]), 1))
kept = str(FOLDER / "kept")
settings["dynatrain"] |= {"fallback": {"path": kept, "on_sigterm": True}, "resume": {"path": kept}}
engine, _, _, _ = ds_dynatrain.initialize(model=small_gpt(), config=settings)
loader = engine.loader(Sequences(), num_workers=0)
print(f"begin {engine.global_steps}", flush=True)
while engine.global_steps < STEPS:
    for batch in loader:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        (FOLDER / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
        time.sleep(0.05)
        if engine.global_steps >= STEPS:
            break
print(f"end {engine.global_steps}", flush=True)
