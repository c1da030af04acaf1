"""A user's loop with Accelerate, run by torchrun; what `training.py` says of its environment holds.

A line for each step, with what this process believes of the world, one of rank 0 with its loss, and one for each
evaluation. It ends after the step whose number stands in `$OUT/stop`. `$HOW`: "slow evaluation" takes seconds for one,
so that something can happen in it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.integrations import loops, trainers

OUT = Path(os.environ["OUT"])
HOW = os.environ.get("HOW", "")
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))
SAMPLES = 48


def say(event: str, **more: Any) -> None:
    """One line."""
    place = {"rank": accelerator.process_index, "ranks": accelerator.num_processes, "generation": model.generation}
    row = {"event": event, "step": model.global_steps, **place, **more}
    with (OUT / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def evaluate() -> None:
    """How many samples were seen, each of them once."""
    model.eval()
    seen = list[int]()
    for inputs in evaluating:
        if HOW == "slow evaluation":
            say("evaluating")
            time.sleep(0.5)
        with torch.no_grad():
            model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        seen += accelerator.gather_for_metrics(inputs["number"]).tolist()
    is_whole = not model.is_discarded and bool(seen)
    say("evaluated", is_whole=is_whole, seen=sorted(seen))
    model.train()


told = json.loads(os.environ["SETTINGS"])
accelerator = loops.accelerator_of(
    told["dynatrain"],
    told["zero_optimization"]["stage"],
    {"train_batch_size": loops.BATCH, "gradient_accumulation_steps": 1},
)
model: Any = trainers.model()
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
training: Any = DataLoader(trainers.Texts(SAMPLES), batch_size=3, shuffle=True)
evaluating: Any = DataLoader(loops.Numbered(loops.EVALUATED), batch_size=4)
model, optimizer, training, evaluating, schedule = accelerator.prepare(model, optimizer, training, evaluating, schedule)
model.train()
is_over = False
for _ in range(100000):
    for inputs in training:
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        mean = float(accelerator.gather(loss.detach()).mean())
        if not accelerator.sync_gradients or model.is_discarded:
            continue
        rate = schedule.get_last_lr()[0]
        say("step", members=list(model.members), rate=rate)
        if accelerator.is_main_process:
            say("log", loss=mean, rate=rate)
        stop = OUT / "stop"
        is_over = stop.exists() and model.global_steps >= int(stop.read_text() or 0)
        if is_over:
            break
        time.sleep(STEP_SECONDS)
    if is_over:
        break
    evaluate()
accelerator.wait_for_everyone()
say("end")
accelerator.end_training()
