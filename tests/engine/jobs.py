"""What the cases share: a configuration, a job that ends properly on every rank, and a loop that switches by step."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast

import ds_dynatrain
from ds_dynatrain.adapters.groups.device import is_accelerated
from tests.engine.models import Sequences, decay_groups, small_gpt

Sizes = tuple[int, int]
"""(data, zero_stage)."""
Schedule = Mapping[int, Sizes]
"""Optimizer steps done -> the layout to switch to at that boundary."""


def config(dtype: str = "fp32", start: Sizes = (2, 1), **more: Any) -> dict[str, Any]:
    """A configuration that starts in layout `start`; `more` is merged over it, key by key at the top."""
    made: dict[str, Any] = {
        "train_batch_size": 12,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "zero_optimization": {"stage": start[1], "stage3_param_persistence_threshold": 40, "sub_group_size": 700},
        "dynatrain": {"layout": {"data": start[0], "zero_stage": start[1]}, "timeout_seconds": 20},
    }
    return {**made, **PRECISIONS[dtype], **more}


PRECISIONS: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 2}},
    "static fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
    "bf16 in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16 in fp32": {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}
"""Configurations by name; "in fp32" is how gradients are accumulated (BF16_Optimizer at stage 1 with bf16)."""


@contextmanager
def allowed_fp16(settings: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block DeepSpeed's CPU accelerator does not refuse fp16, where the settings ask for it."""
    accelerator = get_accelerator()
    if "fp16" in settings:
        accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        accelerator.__dict__.pop("is_fp16_supported", None)


@dataclass
class Job:
    """The four results of `initialize`, and whether this member was let go while it was idle."""

    engine: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    let_go: bool = False


@dataclass
class Record:
    """What a rank saw: per optimizer step its micro-batches as (loss, samples of its own), and the events."""

    losses: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    asked: int = -1
    """The step at which this rank asked last."""


@contextmanager
def job(
    settings: dict[str, Any], model: Any = None, data: Any = None, groups: bool = True, **arguments: Any
) -> Iterator[Job]:
    """A job that is destroyed at the end of the block on every rank; an idle member that is let go leaves the block.

    workers of loaders are off; groups: two optimizer groups, decay and no decay.
    """
    model = small_gpt() if model is None else model
    if groups and "model_parameters" not in arguments and "optimizer" not in arguments:
        arguments["model_parameters"] = decay_groups(model)
    with allowed_fp16(settings):
        made = Job(*ds_dynatrain.initialize(model=model, config=settings, **arguments))
        try:
            made.loader = made.engine.loader(Sequences() if data is None else data, num_workers=0)
            yield made
        except SystemExit as end:
            if end.code:
                raise
            made.let_go = True
        finally:
            made.engine.destroy()
            torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # DeepSpeed sets it for the life of the process


def ask(engine: Any, sizes: Sizes) -> None:
    """Ask for a layout; it takes effect at the very next boundary."""
    engine.switch(data=sizes[0], zero_stage=sizes[1], at=engine.global_steps)


def train(
    made: Job,
    steps: int,
    schedule: Schedule | None = None,
    record: Record | None = None,
    each: Callable[[Job], None] | None = None,
) -> Record:
    """Train until `steps` optimizer steps are done, over as many epochs as it takes; switch by `schedule`.

    record: goes on with one. each: called after every optimizer step, on the members that took it. Every switch must be
    committed.
    """
    record = Record() if record is None else record
    engine, schedule = made.engine, schedule or {}
    engine.on_switch(record.events.append)
    while engine.idle or engine.global_steps < steps:
        _ask_by(schedule, engine, record)
        for batch in made.loader:
            one_micro_batch(engine, batch, record)
            if engine.micro_steps % engine.gradient_accumulation_steps():
                continue
            if each is not None:
                each(made)
            _ask_by(schedule if engine.global_steps < steps else {}, engine, record)
            if engine.global_steps >= steps:
                break
    return record


def _ask_by(schedule: Schedule, engine: Any, record: Record) -> None:
    step = engine.global_steps
    assert engine.last_switch is None or engine.last_switch.outcome == "committed", engine.last_switch
    if not engine.idle and step in schedule and step != record.asked:
        record.asked = step
        ask(engine, schedule[step])


def one_micro_batch(engine: Any, batch: Sequence[Any], record: Record) -> None:
    """Forward, backward, step; the loss and the samples that it is the mean of are noted under the optimizer step."""
    step = engine.global_steps
    samples = 0 if engine.slot_is_borrowed else len(batch[0])
    loss = engine(*batch)
    engine.backward(loss)
    record.losses.setdefault(step, []).append((loss.item(), samples))
    record.rates[step] = [group["lr"] for group in engine.basic_optimizer.param_groups]
    engine.step()


def run(
    settings: dict[str, Any],
    steps: int,
    schedule: Schedule | None = None,
    each: Callable[[Job], None] | None = None,
    **arguments: Any,
) -> Record:
    """A whole job: what this rank saw of it, whether it worked to the end, was let go while idle, or never woke."""
    record = Record()
    with job(settings, **arguments) as made:
        train(made, steps, schedule, record, each)
        record.notes["last"] = True
    return record


def global_losses(records: Sequence[Record | None]) -> list[float]:
    """The mean loss of every optimizer step over all samples of its global batch, whoever had them; exactly summed."""
    found: dict[int, list[tuple[float, int]]] = {}
    for record in records:
        for step, parts in (record.losses if record is not None else {}).items():
            found.setdefault(step, []).extend(parts)
    sums = {step: math.fsum(loss * samples for loss, samples in parts) for step, parts in found.items()}
    return [sums[step] / sum(samples for _, samples in found[step]) for step in sorted(found)]


def furthest(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative distance between two runs, step by step."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def means_by_place(ranks: Sequence[dict[int, list[float]] | None]) -> dict[int, list[float]]:
    """Per place the mean over the ranks that worked there: their shares are equal."""
    places = sorted({place for losses in ranks if losses for place in losses})
    found = {}
    for place in places:
        held = [losses[place] for losses in ranks if losses and place in losses]
        found[place] = [sum(values) / len(values) for values in zip(*held, strict=True)]
    return found


def least(what: str) -> int:
    """How many threads ("task") or descriptors ("fd") this process has: of several looks the lowest.

    Some are on their way out: the board's connections close when other members have let theirs go.
    """
    looks = []
    for _ in range(10):
        looks.append(len(os.listdir(f"/proc/self/{what}")))
        time.sleep(0.02)
    return min(looks)


def resident_bytes() -> int:
    """What this process holds, after the C library was told to give back what is free; of a card its memory there."""
    if torch.cuda.is_available() and is_accelerated():
        return int(get_accelerator().memory_allocated())
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
