"""A loop of Accelerate's over a tiny GPT-2 on CPU ranks: what it saw, stock or over a world that changes."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from tests.integrations import trainers

BATCH, EVALUATED = 12, 45


class Numbered(trainers.Texts):
    """Texts with their numbers."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "number": torch.tensor(index)}


class Tally:
    """An object of the user's that is registered for checkpointing."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def accelerator_of(
    block: Mapping[str, Any] | None, stage: int = 1, config: Mapping[str, Any] | None = None, **named: Any
) -> Any:
    """Ours, or Accelerate's own for `None`."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "false")
    trainers.allow_cpu_ranks()
    trainers.forget_ranks()
    found = copy.deepcopy(trainers.CONFIG)
    found["gradient_clipping"] = 1.0
    found["zero_optimization"]["stage"] = stage
    found.update(config or {})
    if block is not None:
        from ds_dynatrain.integrations.accelerate import Accelerator as Kind

        found["dynatrain"] = dict(block)
    else:
        Kind = accelerate.Accelerator  # noqa: N806
    return Kind(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=found), **named)


def run(
    folder: Path,
    block: Mapping[str, Any] | None,
    stage: int = 1,
    accumulation: int = 1,
    schedule: Mapping[int, Mapping[str, Any]] | None = None,
    shuffle: bool = True,
    epochs: int = 2,
    samples: int = 48,
    batch: int = 3,
    save: int | None = None,
    load: bool = False,
    config: Mapping[str, Any] | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """The whole job; rows of optimizer steps and of evaluations.

    save: the step after which it saves into `folder`. processes: for how many of them the schedule is meant.
    """
    set_seed(7)
    accelerator = accelerator_of(
        block, stage, config, gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip
    found: dict[str, Any] = {"rows": [], "rank": accelerator.process_index}
    try:
        found.update(
            _train(accelerator, folder, schedule or {}, shuffle, epochs, samples, batch, save, load, processes)
        )
    except SystemExit as end:
        if end.code:
            raise
        found["let go"] = True
    finally:
        accelerator.free_memory()
    return found


def _train(
    accelerator: Any, folder: Path, schedule: Mapping[int, Mapping[str, Any]], shuffle: bool, epochs: int, samples: int,
    batch: int, save: int | None, load: bool, processes: int,
) -> dict[str, Any]:  # fmt: skip
    model = trainers.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = samples // BATCH * epochs * processes
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    training = DataLoader(trainers.Texts(samples), batch_size=batch, shuffle=shuffle)
    evaluating = DataLoader(Numbered(EVALUATED), batch_size=4)
    model, optimizer, training, evaluating, scheduler = accelerator.prepare(
        model, optimizer, training, evaluating, scheduler
    )
    tally, rows = Tally(), list[dict[str, Any]]()
    accelerator.register_for_checkpointing(tally)
    first = 0
    if load:
        accelerator.load_state(str(folder))
        first, skipped = divmod(model.global_steps, samples // BATCH)
        training = accelerator.skip_first_batches(training, skipped * accelerator.gradient_accumulation_steps)
    losses = list[float]()
    for _ in range(first, epochs):
        model.train()
        for inputs in training:
            done = model.global_steps
            if done in schedule and not losses:
                model.switch(at=done + 1, **schedule[done])
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            tally.batches += 1
            losses.append(float(accelerator.gather(loss.detach()).mean()))
            if not accelerator.sync_gradients:
                continue
            done = model.global_steps
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            rows.append(
                {
                    "step": done,
                    "loss": math.fsum(losses) / len(losses),
                    "norm": norm,
                    "rate": scheduler.get_last_lr()[0],
                }
            )
            losses.clear()
            if done == save:
                accelerator.save_state(str(folder))
        rows.append({"step": model.global_steps, **_evaluate(accelerator, model, evaluating)})
    words = accelerator.get_state_dict(model)
    return {
        "rows": rows,
        "rank": accelerator.process_index,
        "ranks": accelerator.num_processes,
        "steps per epoch": len(training) // accelerator.gradient_accumulation_steps,
        "tally": tally.batches,
        "words": None if words is None else words["transformer.wte.weight"].clone(),
    }


def _evaluate(accelerator: Any, model: Any, evaluating: Any) -> dict[str, Any]:
    model.eval()
    seen, total = list[int](), list[float]()
    for inputs in evaluating:
        numbers = inputs.pop("number")
        with torch.no_grad():
            said = model(**inputs).logits[:, :-1].transpose(1, 2)
            loss = torch.nn.functional.cross_entropy(said, inputs["labels"][:, 1:], reduction="none").mean(1)
        numbers, losses = accelerator.gather_for_metrics((numbers, loss))
        seen += numbers.tolist()
        total += losses.tolist()
    return {"seen": seen, "eval": math.fsum(total) / max(len(total), 1)}
