"""What each rank does in a run: a training script whose events are data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import ds_dynatrain
from ds_dynatrain import DynatrainError
from tests.scenarios.actions import ACTIONS, Scene, Seen
from tests.scenarios.models import MODELS, Model, Texts, build
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
            play_stock(run, seen) if run.loop == "stock" else play_job(run, folder, seen)
        except Exception as error:
            seen.ended = told(error)
        except SystemExit as end:
            seen.ended = f"SystemExit: {end.code}" if end.code else ""
    return seen


def told(error: BaseException) -> str:
    """Return an error as its class and its text."""
    return f"{type(error).__name__}: {error}"


def settings(run: Run) -> dict[str, Any]:
    """Return the configuration of a run; {folder} in a text of it stands for the run's folder."""
    blocks = {"zero_optimization": {"stage": run.start["zero_stage"]}}
    if run.loop != "stock":
        blocks["dynatrain"] = {"layout": dict(run.start), "timeout_seconds": 20}
    return merged(merged(merged(BASE, blocks), MODELS[run.model].config or {}), run.config)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first configuration with the second over it, block by block; a key whose value is None is left out."""
    found = copy.deepcopy(dict(one))
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else copy.deepcopy(value)
    return {key: value for key, value in found.items() if value is not None}


def placed(value: Any, folder: Path) -> Any:
    """Return a configuration with {folder} filled in."""
    if isinstance(value, Mapping):
        return {key: placed(each, folder) for key, each in value.items()}
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value


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
    config = placed(settings(run), folder)
    engine, _, loader, _ = ds_dynatrain.initialize(model=build(run.model), config=config, training_data=data)
    scene = Scene(engine, folder, seen)
    engine.on_switch(lambda event: seen.switches.append(record(event)))
    try:
        if run.load and not engine.idle:
            engine.load(run.load)
        do_events(run, scene)
        LOOPS["pipeline" if kind.is_pipeline else run.loop](run, scene, loader, kind)
        seen.layout, seen.worked_last = str(engine.layout), True
        seen.notes["rank"] = engine.rank
        engine.save(folder / "end")
    finally:
        last = engine.last_switch
        if last is not None and last.outcome != "committed":
            seen.switches.append(record(last))
        engine.destroy()


def record(event: ds_dynatrain.SwitchEvent) -> dict[str, Any]:
    """Return what rows ask about a switch."""
    return {
        "outcome": event.outcome,
        "step": event.step,
        "source": event.source.describe(),
        "target": event.target.describe(),
        "late_bytes": event.late_bytes,
        "sent": event.bytes_sent,
        "minimum": event.bytes_minimum,
        "phases": sorted(event.phases_ms),
    }


def do_events(run: Run, scene: Scene) -> None:
    """Let everything happen that happens after the steps that are done, on a rank that works."""
    step = scene.engine.global_steps
    if scene.engine.idle or step in scene.done or step >= run.steps:
        return
    scene.done.add(step)
    for event in run.events:
        if event.at == step:
            do_event(event, scene)


def do_event(event: Event, scene: Scene) -> None:
    """Do what an event says, and keep the text of the error if there has to be one."""
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


LOOPS = {"loader": over_loader, "boundary": over_boundaries, "windows": over_windows, "pipeline": over_stages}


def play_stock(run: Run, seen: Seen) -> None:
    """Train the same samples with plain DeepSpeed on all ranks of the launch."""
    kind = MODELS[run.model]
    data = Texts(numbered=not kind.is_pipeline)
    engine, _, loader, _ = deepspeed.initialize(model=build(run.model), config=settings(run), training_data=data)
    rank, losses = engine.global_rank, seen.losses
    while engine.global_steps < run.steps:
        if kind.is_pipeline:
            loss = engine.train_batch()
            losses[engine.global_steps - 1] = [(rank, rank, float(loss), BATCH)]
            continue
        for numbers, inputs, targets in loader:
            step = engine.global_steps
            loss = kind.loss(engine, inputs, targets)
            losses.setdefault(step, []).append((rank, rank, loss.item(), len(numbers)))
            seen.samples.setdefault(step, []).extend(numbers.tolist())
            engine.backward(loss)
            engine.step()
            if engine.global_steps >= run.steps:
                break
    seen.worked_last = True
