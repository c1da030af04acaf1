"""A loop of Accelerate's over a tiny GPT-2 on CPU ranks: what it saw, stock or over a world that changes."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.tracking import GeneralTracker
from accelerate.utils import DummyOptim, DummyScheduler, ProjectConfiguration, set_seed
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
    begin()
    found = copy.deepcopy(trainers.CONFIG)
    found["gradient_clipping"] = 1.0
    found["zero_optimization"]["stage"] = stage
    found.update(config or {})
    if block is not None:
        return ours(DeepSpeedPlugin(hf_ds_config={**found, "dynatrain": dict(block)}), **named)
    return accelerate.Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=found), **named)


def ours(plugin: DeepSpeedPlugin, **named: Any) -> Any:
    """An Accelerator over a world that changes."""
    from ds_dynatrain.integrations.accelerate import Accelerator

    return Accelerator(deepspeed_plugin=plugin, **named)


def begin() -> None:
    """Another job in this process, on CPU ranks."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "false")
    trainers.allow_ranks()
    trainers.forget_ranks()


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
    accumulates: bool = True,
    data: type[Any] = trainers.Texts,
) -> dict[str, Any]:
    """The whole job; rows of optimizer steps and of evaluations.

    save: the step after which it saves into `folder`. processes: for how many of them the schedule is meant.
    accumulates: whether passes are in `accelerator.accumulate`.
    """
    set_seed(7)
    accelerator = accelerator_of(
        block, stage, config, gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip
    found: dict[str, Any] = {"rows": [], "rank": accelerator.process_index}
    try:
        found.update(
            _train(
                accelerator,
                folder,
                schedule or {},
                shuffle,
                epochs,
                samples,
                batch,
                save,
                load,
                processes,
                accumulates,
                data,
            )
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
    batch: int, save: int | None, load: bool, processes: int, accumulates: bool, data: type[Any],
) -> dict[str, Any]:  # fmt: skip
    model = trainers.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = samples // BATCH * epochs * processes
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    training = DataLoader(data(samples), batch_size=batch, shuffle=shuffle)
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
            with accelerator.accumulate(model) if accumulates else nullcontext():
                loss = model(**inputs).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            tally.batches += 1
            seen = accelerator.gather(loss.detach()).mean()
            losses.append(float(model.mean(loss, training.samples) if hasattr(model, "mean") else seen))
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
        "steps per epoch": steps_in(training) // accelerator.gradient_accumulation_steps,
        "tally": tally.batches,
        "words": None if words is None else words["transformer.wte.weight"].clone(),
    }


def steps_in(training: Any) -> int:
    """The micro-batches of an epoch; 0 if nobody knows."""
    try:
        return len(training)
    except TypeError:
        return 0


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


class Noted(GeneralTracker):
    """A tracker of the user's."""

    name, requires_logging_directory = "noted", False

    def __init__(self) -> None:
        super().__init__()
        self.rows = list[dict[str, Any]]()

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **named: Any) -> None:
        self.rows.append({**values, "step": step})


def by_configuration(folder: Path, block: Mapping[str, Any] | None) -> dict[str, Any]:
    """Optimizer and schedule of DeepSpeed's, checkpoints that are named by themselves, hooks, and a tracker."""
    set_seed(7)
    rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": rates},
    }
    naming = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    noted = Noted()
    accelerator = accelerator_of(block, 2, config, project_config=naming, log_with=noted)
    accelerator.init_trackers("a job", {"rate": 1e-2})
    accelerator.register_save_state_pre_hook(lambda models, weights, there: Path(there, "hook").write_text("was here"))
    model = trainers.model()
    optimizer = DummyOptim(model.parameters(), lr=1e-2)
    scheduler = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=3)
    training = DataLoader(trainers.Texts(48), batch_size=6)
    model, optimizer, training, scheduler = accelerator.prepare(model, optimizer, training, scheduler)
    held = None
    for inputs in training:
        loss = model(**inputs).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        accelerator.log({"loss": float(loss), "rate": scheduler.get_last_lr()[0]}, step=model.global_steps)
        if model.global_steps in (2, 4, 6):
            accelerator.save_state()
            held = accelerator.get_state_dict(model)["transformer.wte.weight"].clone()
    accelerator.load_state()
    found = accelerator.get_state_dict(model)["transformer.wte.weight"].clone()
    names = sorted(each.parent.name for each in folder.glob("checkpoints/*/hook"))
    steps = model.global_steps
    accelerator.free_memory()
    return {"rows": noted.rows, "names": names, "is what was saved": torch.equal(held, found), "steps": steps}
