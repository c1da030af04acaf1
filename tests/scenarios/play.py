"""What each rank does in a run: a training script whose events are data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DistributedSampler

import ds_dynatrain
from ds_dynatrain import DynatrainError
from tests.scenarios.actions import ACTIONS, Counter, Scene, Seen
from tests.scenarios.frameworks import FRAMEWORKS
from tests.scenarios.models import MODELS, SAMPLES, Model, Texts, build
from tests.scenarios.row import Event, Run

BATCH = 12
BASE: Mapping[str, Any] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 3,
    "steps_per_print": 10**9,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "zero_optimization": {"stage3_param_persistence_threshold": 40, "sub_group_size": 700},
}


def play(run: Run, folder: Path) -> Seen:
    """Play a run on this rank, in the launch that this process is in, and return what the rank saw of it."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    with allowed_fp16("fp16" in run.config):
        try:
            deepspeed.init_distributed()
            dist.barrier()  # a rank that is refused ends at once, and would break connections that another still makes
            if run.loop in FRAMEWORKS:
                FRAMEWORKS[run.loop](run, settings(run), folder, seen)
            else:
                (play_stock if run.loop in STOCK else play_job)(run, folder, seen)
        except Exception as error:
            seen.ended = told(error)
        except SystemExit as end:
            seen.ended = f"SystemExit: {end.code}" if end.code else ""
    return seen


def told(error: BaseException) -> str:
    """Return an error as its class and its text."""
    return f"{type(error).__name__}: {error}"


def settings(run: Run) -> dict[str, Any]:
    """Return the configuration of a run."""
    blocks: dict[str, Any] = {"zero_optimization": {"stage": run.start["zero_stage"]}}
    if not run.loop.startswith("stock"):
        start = {key: list(size) if isinstance(size, tuple) else size for key, size in run.start.items()}
        blocks["dynatrain"] = {"layout": start, "timeout_seconds": 20}
    return merged(merged(merged(BASE, blocks), MODELS[run.model].config or {}), run.config)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first configuration with the second over it, block by block; a key whose value is None is left out."""
    found = copy.deepcopy(dict(one))
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else copy.deepcopy(value)
    return {key: value for key, value in found.items() if value is not None}


@contextmanager
def allowed_fp16(wanted: bool) -> Iterator[None]:
    """Let DeepSpeed's CPU accelerator take fp16 inside the block."""
    accelerator = get_accelerator()
    if wanted:
        accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        accelerator.__dict__.pop("is_fp16_supported", None)


def play_job(run: Run, folder: Path, seen: Seen) -> None:
    """Train with ds_dynatrain to the last step of the run, and save the state then into the folder `end`."""
    kind, data = MODELS[run.model], Texts(numbered=not MODELS[run.model].is_pipeline)
    given: dict[str, Any] = {"training_data": data} if kind.is_pipeline or run.loop == "training_data" else {}
    engine, _, loader, _ = ds_dynatrain.initialize(model=build(run.model), config=settings(run), **given)
    scene = Scene(engine, folder, seen, engine.register_for_checkpointing("counter", Counter()))
    loader = loader if given else engine.loader(data, num_workers=0)
    engine.on_switch(lambda event: seen.switches.append(record(event)))
    try:
        if run.load and not engine.idle:
            engine.load(run.load)
        if run.load_stock and not engine.idle:
            engine.load_checkpoint(run.load_stock)
        do_events(run, scene)
        LOOPS["pipeline" if kind.is_pipeline else run.loop](run, scene, loader, kind)
        seen.layout, seen.worked_last = str(engine.layout), True
        seen.notes["counted"] = scene.counter.steps
        engine.save(folder / "end")
    finally:
        engine.destroy()
        if engine.last_switch is not None and engine.last_switch.outcome != "committed":
            seen.switches.append(record(engine.last_switch))


def record(event: ds_dynatrain.SwitchEvent) -> dict[str, Any]:
    """Return what rows ask about a switch."""
    return {
        "outcome": event.outcome,
        "step": event.step,
        "source": event.source.describe(),
        "target": event.target.describe(),
        "reason": event.reason,
        "phases": sorted(event.phases_ms),
    }


def do_events(run: Run, scene: Scene, within: bool = False) -> None:
    """Let everything happen that happens after the steps that are done, on a rank that works."""
    step = scene.engine.global_steps
    scene.counter.steps = step
    if scene.engine.idle or (step, within) in scene.done or step >= run.steps:
        return
    scene.done.add((step, within))
    for event in run.events:
        if event.at == step and event.within == within:
            do_event(event, scene)


def do_event(event: Event, scene: Scene) -> None:
    """Do what an event says, and keep the text of the error if there has to be one."""
    if event.raises:
        scene.seen.awaited.append(event.raises)
    try:
        ACTIONS[event.do](scene, **event.given)
    except DynatrainError as error:
        if not event.raises:
            raise
        scene.seen.errors.append(told(error))


def over_loader(run: Run, scene: Scene, loader: Any, kind: Model) -> None:
    """Train as most scripts do: over the loader that `initialize` has returned."""
    engine = scene.engine
    while engine.idle or engine.global_steps < run.steps:
        for numbers, inputs, targets in loader:
            do_events(run, scene, within=True)
            step = engine.global_steps
            loss = kind.loss(engine, inputs, targets)
            scene.seen.note(engine, step, loss, numbers[: loader.samples])
            engine.backward(loss / engine.sequence)
            engine.step()
            if engine.global_steps > step:
                do_events(run, scene)
            if engine.global_steps >= run.steps:
                break


def over_boundaries(run: Run, scene: Scene, _: Any, kind: Model) -> None:
    """Train in a loop of the script's own, which deals samples out in the order of the data set."""
    engine, data = scene.engine, Texts()
    while engine.idle or engine.global_steps < run.steps:
        engine.boundary()
        step = engine.global_steps
        for slot in engine.batch.deal(BATCH).rank(engine.data_rank):
            rows = [(BATCH * step + position) % len(data) for position in slot.positions]
            numbers = torch.tensor(rows[: slot.samples])
            loss = kind.loss(engine, data.inputs[rows], data.targets[rows])
            scene.seen.note(engine, step, loss, numbers)
            engine.backward(loss * slot.weight / engine.sequence)
            engine.step()
        do_events(run, scene)


def over_windows(run: Run, scene: Scene, loader: Any, kind: Model) -> None:
    """Train over whole global batches, each a tuple of micro-batches."""
    engine = scene.engine
    while engine.idle or engine.global_steps < run.steps:
        for window in loader.windows():
            step = engine.global_steps
            for micro in window:
                numbers, inputs, targets = micro.data
                with engine.micro_batch(micro):
                    loss = kind.loss(engine, inputs, targets)
                    scene.seen.note(engine, step, loss, numbers[: micro.samples])
                    engine.backward(loss / engine.sequence)
                    engine.step()
            do_events(run, scene)
            if engine.global_steps >= run.steps:
                break


def over_stages(run: Run, scene: Scene, *_: Any) -> None:
    """Train a pipeline."""
    engine = scene.engine
    while engine.idle or engine.global_steps < run.steps:
        loss = engine.train_batch()
        scene.seen.losses[engine.global_steps - 1] = [(engine.rank, engine.data_rank, float(loss), BATCH)]
        do_events(run, scene)


LOOPS = {
    "training_data": over_loader,
    "loader": over_loader,
    "boundary": over_boundaries,
    "windows": over_windows,
    "pipeline": over_stages,
}


def play_stock(run: Run, folder: Path, seen: Seen) -> None:
    """Train the same samples with plain DeepSpeed on all ranks of the launch."""
    kind, order = MODELS[run.model], STOCK[run.loop]
    data = Texts(numbered=not kind.is_pipeline)
    engine, _, loader, _ = deepspeed.initialize(model=build(run.model), config=settings(run), training_data=data)
    if run.load_stock:
        engine.load_checkpoint(run.load_stock)
    while engine.global_steps < run.steps:
        step, rank = engine.global_steps, engine.global_rank
        if kind.is_pipeline:
            seen.losses[step] = [(rank, rank, float(engine.train_batch()), BATCH)]
            continue
        numbers = order(step, rank, BATCH // dist.get_world_size())
        loss = kind.loss(engine, data.inputs[numbers], data.targets[numbers])
        seen.losses[step] = [(rank, rank, loss.item(), len(numbers))]
        engine.backward(loss)
        engine.step()
    seen.worked_last = True
    engine.save_checkpoint(str(folder / "stock"))


def shuffled(step: int, rank: int, count: int) -> list[int]:
    """Return the samples that DeepSpeed's own loader gives a rank: those of torch's `DistributedSampler`."""
    sampler: Any = DistributedSampler(Texts(), dist.get_world_size(), rank, seed=0)
    place = step * count % len(sampler)
    return list(sampler)[place : place + count]


def in_order(step: int, rank: int, count: int) -> list[int]:
    """Return the samples of a rank in the order of the data set."""
    first = step * BATCH + rank * count
    return [number % SAMPLES for number in range(first, first + count)]


STOCK = {"stock": shuffled, "stock in order": in_order}
"""How plain DeepSpeed is fed."""
