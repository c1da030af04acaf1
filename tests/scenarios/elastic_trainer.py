"""A user's script with a Trainer of Hugging Face, which logs each step; otherwise as `elastic_worker.py`.

torchrun ... elastic_trainer.py SETTINGS OUT

Where SETTINGS has `steps`, it is a stock Trainer without DeepSpeed that makes so many.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback, TrainingArguments

from ds_dynatrain.integrations.transformers import elastic
from tests.scenarios.models import Texts, build

settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
out = Path(sys.argv[2])
log = (out / f"{os.getpid()}.jsonl").open("a", buffering=1)


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts to be continued."""

    def __init__(self) -> None:
        self.inputs = Texts().inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.inputs[index]}


class Telling(TrainerCallback):
    """Writes what each step has, and ends the training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        stop = out / "stop"
        say("step", state.global_step - 1, rank=args.process_index, size=args.world_size)
        if stop.exists() and state.global_step > int(stop.read_text()):
            control.should_training_stop = True
        time.sleep(settings["pause"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            say("batch", state.global_step - 1, loss=logs["loss"], samples=[])


def say(event: str, step: int, **more: Any) -> None:
    """Write one line."""
    engine = getattr(trainer, "engine", None)
    generation, layout = (engine.generation, str(engine.layout)) if engine else (0, "")
    line = {"event": event, "step": step, "run": settings["run"], "generation": generation, "pid": os.getpid()}
    log.write(json.dumps({**line, "layout": layout, **more}) + "\n")


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Accelerate wants an accelerator for DeepSpeed on more than one process.
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    is_stock = "steps" in settings
    config = {key: value for key, value in settings["config"].items() if key != "optimizer"}
    args = TrainingArguments(
        output_dir=str(out / "trainer"),
        deepspeed=None if is_stock else config,
        per_device_train_batch_size=config["train_batch_size"] if is_stock else 6,
        max_steps=settings.get("steps", 100_000),
        learning_rate=settings["config"]["optimizer"]["params"]["lr"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=is_stock,
    )
    kind = Trainer if is_stock else elastic(Trainer)
    trainer = kind(model=build("llama"), args=args, train_dataset=Sequences(), callbacks=[Telling()])
    trainer.train()
