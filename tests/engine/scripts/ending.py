"""One small job under torchrun; the first argument says how it ends. Prints one line per process: `end MEMBER how`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import deepspeed
import torch

import ds_dynatrain
from tests.engine.jobs import config
from tests.engine.models import Sequences, small_gpt

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # who is ended while it compiles leaves a lock behind

HOW = sys.argv[1]
MEMBER = int(os.environ["RANK"])
PLAIN = (2, 1)
STEPS = 10**9 if HOW == "idle raises" else 6
SLOW_STEP_SECONDS = 1.0 if HOW in ("idle raises", "on idle") else 0.0
"""The job must last until its idle members have started to wait."""


def idle_work(engine: Any) -> None:
    """Called while idle."""
    global calls
    calls += 1
    if calls == 1:
        print(f"idle work on {MEMBER}", flush=True)
    if HOW == "idle raises" and calls > 2 and MEMBER == 3:
        print(f"error at {time.time()}", flush=True)
        raise ValueError(f"wrong on idle member {MEMBER}")


def one(batch: Any) -> None:
    """A micro-batch."""
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()


calls = 0
settings = config("fp32", (4, 1) if HOW in ("all work", "goes idle") else PLAIN)
settings["dynatrain"]["timeout_seconds"] = 5
on_idle = idle_work if HOW in ("on idle", "idle raises") else None
engine, _, _, _ = ds_dynatrain.initialize(model=small_gpt(), config=settings, on_idle=on_idle)
workers = 2 if HOW == "loader workers" else 0
loader = engine.loader(Sequences(), num_workers=workers)
fixed = torch.utils.data.default_collate([Sequences()[i] for i in range(6)])


def body() -> None:
    """What a user's script does."""
    if HOW == "own loop":
        while True:
            engine.boundary()
            if engine.global_steps == STEPS:
                return
            one(fixed)
            if engine.global_steps == 3:
                engine.switch(data=4, zero_stage=2, at=4)
    for batch in loader:
        one(batch)
        step = engine.global_steps
        time.sleep(SLOW_STEP_SECONDS)
        if HOW == "goes idle" and step == 2:
            engine.switch(data=2, at=step)
        if HOW == "loader workers" and step in (2, 4):
            engine.switch(data=5 - step, at=step)
        if HOW == "working raises" and step == 3 and MEMBER == 1:
            print(f"error at {time.time()}", flush=True)
            raise ValueError("wrong on working member 1")
        if HOW in ("switch in the last step", "switch without a step") and step == STEPS:
            engine.switch(data=4, at=step if HOW == "switch in the last step" else None)
        if HOW == "one loops once more" and step == STEPS and MEMBER == 1:
            print(f"error at {time.time()}", flush=True)
            continue
        if step >= STEPS:
            return


body()
print(f"end {MEMBER} working at {engine.global_steps}", flush=True)
