"""A user's script: a plain loop over epochs that knows nothing of members which come later. Run by torchrun.

Writes a line of JSON for each step into `$OUT/PID.jsonl`: the samples that this rank had. As long as it trains alone it
stays in epoch 1: it takes its time there, so that another node can come, or, by `HOW=wakes`, asks for the idle process.
`HOW=saves` saves at the end.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import deepspeed

import ds_dynatrain
from ds_dynatrain.reshard.process import PROCESS
from tests.elastic.training import Numbered
from tests.engine.models import small_gpt

OUT = Path(os.environ["OUT"])
GATE = os.environ.get("GATE", "")
HOW = os.environ.get("HOW", "")
EPOCHS, STEPS = int(os.environ["EPOCHS"]), int(os.environ["STEPS"])
"""STEPS: of an epoch."""
ALONE_SECONDS = 0.8

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # who is ended while it compiles leaves a lock behind

with (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1) as log:

    def say(**what: object) -> None:
        """A line."""
        generation = getattr(PROCESS.membership, "generation", engine.generation)
        log.write(json.dumps({"pid": os.getpid(), "generation": generation, **what}) + "\n")

    model, agent = small_gpt(), os.getppid()
    while GATE and not (OUT / GATE).exists():
        if os.getppid() != agent:
            os._exit(1)
        time.sleep(0.05)
    engine, _, _, _ = ds_dynatrain.initialize(model=model, config=json.loads(os.environ["SETTINGS"]))
    loader = engine.loader(Numbered(12 * STEPS), num_workers=0)
    say(event="ready")
    for epoch in range(EPOCHS):
        for inputs, targets, numbers in loader:
            step = int(engine.global_steps)
            if HOW == "wakes" and step == STEPS + 1:
                engine.switch(data=2, at=step + 1)
            is_borrowed = engine.slot_is_borrowed
            engine.backward(engine(inputs, targets))
            engine.step()
            samples = [] if is_borrowed else numbers.tolist()
            say(event="step", step=step, epoch=epoch, samples=samples, size=engine.layout.data)
            if epoch == 1 and engine.layout.data == 1 and HOW != "wakes":
                time.sleep(ALONE_SECONDS)
    if HOW == "saves":
        engine.save(OUT / "saved", "last")
    say(event="end")
