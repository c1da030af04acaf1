"""A user's script with a Trainer of Hugging Face, run by torchrun; what `training.py` says of its environment holds.

A line for each row that rank 0 logs, with what this process believes of the world, and one for each step. It ends
after the step whose number stands in `$OUT/stop`, with the best of its checkpoints, of which there is one every
`$EVERY` steps. `$HOW`: "slow evaluation" takes seconds for each evaluation, so that something can happen in it, "slow
save" for a checkpoint; "resume" goes on from the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from ds_dynatrain.integrations.huggingface import checkpoints
from ds_dynatrain.integrations.transformers import elastic
from tests.integrations import trainers

OUT = Path(os.environ["OUT"])
HOW = os.environ.get("HOW", "")
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))
EVERY = int(os.environ.get("EVERY", "10"))
SAMPLES = 48


class Telling(TrainerCallback):
    """What is seen at each step."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        engine = self.trainer.engine
        if not engine.is_discarded:
            self.say("step", state, members=list(engine.members), patience=stopping.early_stopping_patience_counter)
        stop = OUT / "stop"
        if stop.exists() and state.global_step >= int(stop.read_text() or 0):
            control.should_training_stop = True
        time.sleep(STEP_SECONDS)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if state.is_world_process_zero and "train_loss" not in logs:
            self.say("log", state, **{name: logs[name] for name in trainers.LOGGED if name in logs})

    def on_prediction_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if HOW == "slow evaluation":
            self.say("evaluating", state)
            time.sleep(0.5)

    def say(self, event: str, state: Any, **more: Any) -> None:
        """One line."""
        args, generation = self.trainer.args, self.trainer.engine.generation
        place = {"rank": args.process_index, "ranks": args.world_size, "generation": generation}
        row = {"event": event, "step": state.global_step, **place, **more}
        with (OUT / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


trainers.allow_ranks()
told = json.loads(os.environ["SETTINGS"])
args = trainers.arguments(
    OUT / "trainer",
    told["dynatrain"],
    stage=told["zero_optimization"]["stage"],
    config={"train_batch_size": 12, "gradient_accumulation_steps": 1},
    max_steps=int(os.environ.get("STEPS", "100000")),
    eval_strategy="steps",
    eval_steps=EVERY,
    save_strategy="steps",
    save_steps=EVERY,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    greater_is_better=True,  # the first one is the best, so patience is needed
    lr_scheduler_type="constant",
    learning_rate=1e-3,
    disable_tqdm=False,  # who becomes rank 0 has a bar from then on
)
telling, stopping = Telling(), EarlyStoppingCallback(early_stopping_patience=100000)
trainer: Any = elastic(Trainer)(
    model=trainers.model(),
    args=args,
    train_dataset=trainers.Texts(SAMPLES, ragged=True),
    eval_dataset=trainers.Texts(24),
    callbacks=[telling, stopping],
)
telling.trainer = trainer


def save_slowly(*arguments: Any) -> None:
    """Seconds before the first thing is written, in which something can happen."""
    telling.say("saving", trainer.state)
    time.sleep(1.5)
    save(*arguments)


save = checkpoints.save
if HOW == "slow save":
    checkpoints.save = save_slowly
trainer.train(resume_from_checkpoint=True if HOW == "resume" else None)
weight, best = trainer.model.get_input_embeddings().weight, trainer.state.best_model_checkpoint
with deepspeed.zero.GatheredParameters([weight]):
    is_best = torch.equal(weight.detach(), load_file(Path(best, "model.safetensors"))["transformer.wte.weight"])
telling.say("end", trainer.state, is_best=is_best, best=Path(best).name)
