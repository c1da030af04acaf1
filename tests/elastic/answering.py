"""A user's script with GRPOTrainer of TRL, run by torchrun; what `training.py` says of its environment holds.

A line for each step and one for each row that rank 0 logs, as in `hf_training.py`. It ends after the step whose number
stands in `$OUT/stop`. Completions take `$SECONDS_EACH` of a second, so that something can happen while they are made.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ds_dynatrain.integrations.transformers import elastic
from tests.integrations import trainers
from tests.integrations.prompting import GENERATIONS, answered, prompts, reward, tokenizer

OUT = Path(os.environ["OUT"])
SECONDS_EACH = float(os.environ.get("SECONDS_EACH", "0.2"))


class Telling(TrainerCallback):
    """What is seen at each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        engine = trainer.engine
        if not engine.is_discarded:
            say("step", members=list(engine.members))
        stop = OUT / "stop"
        if stop.exists() and state.global_step >= int(stop.read_text() or 0):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if state.is_world_process_zero and "train_loss" not in logs:
            say("log", **{name: float(logs[name]) for name in ("grad_norm", "reward")})


def say(event: str, **more: Any) -> None:
    """One line."""
    place = {"rank": args.process_index, "ranks": args.world_size, "generation": trainer.engine.generation}
    with (OUT / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "step": trainer.state.global_step, **place, **more}) + "\n")


def slowly(asked: Sequence[str], asking: Any) -> dict[str, Any]:
    """Answer after a while."""
    say("answering")
    time.sleep(SECONDS_EACH)
    return answered(asked, asking)


trainers.allow_ranks()
told = json.loads(os.environ["SETTINGS"])
args: Any = trainers.arguments(
    OUT / "trainer",
    told["dynatrain"],
    stage=told["zero_optimization"]["stage"],
    kind=GRPOConfig,
    config={"train_batch_size": 12, "gradient_accumulation_steps": 1},
    max_steps=100000,
    lr_scheduler_type="constant",
    learning_rate=1e-3,
    bf16=False,
    num_generations=GENERATIONS,
    max_completion_length=6,
)
made: Any = elastic(GRPOTrainer)
trainer = made(
    model=trainers.model(),
    args=args,
    train_dataset=prompts(),
    processing_class=tokenizer(),
    reward_funcs=reward,
    rollout_func=slowly,
    callbacks=[Telling()],
)
trainer.train()
