"""A run of a pipeline whose layers change, and the times of its steps and stages."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td

import ds_dynatrain
from ds_dynatrain.balance.profile import Profile
from dynamic import (
    early_exit,
    freezing,
    freezing_by_gradient,
    mixture_of_depths,
    mixture_of_experts,
    pruning,
    sparse_attention,
)
from dynamic.model import Dynamism, Layers, Sizes, pipeline
from gpt import Windows, texts

DYNAMISMS: Mapping[str, Dynamism] = {
    "freezing": freezing.DYNAMISM,
    "freezing_by_gradient": freezing_by_gradient.DYNAMISM,
    "pruning": pruning.DYNAMISM,
    "early_exit": early_exit.DYNAMISM,
    "mixture_of_depths": mixture_of_depths.DYNAMISM,
    "sparse_attention": sparse_attention.DYNAMISM,
    "mixture_of_experts": mixture_of_experts.DYNAMISM,
}
MICRO_BATCHES, CHANGES = 8, 5
"""Number of micro-batches in a pipeline's step, and of changes of the layers in a run."""


@dataclass
class Run:
    """The results of a run.

    losses, seconds, boundaries: one entry per step.
    stages: the seconds for which each stage computes in a step, keyed by the step at which a window of timing ended.
    changes: a description of how layers changed, keyed by step.
    profile: the balancer's newest profile.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    boundaries: list[tuple[int, ...]] = field(default_factory=list)
    stages: dict[int, list[float]] = field(default_factory=dict)
    changes: dict[int, str] = field(default_factory=dict)
    profile: Profile | None = None

    def at_rest(self) -> float:
        """Return the seconds of a step after all changes: the median of the last quarter of the steps."""
        last = sorted(self.seconds[-(len(self.seconds) // 4) :])
        return last[len(last) // 2]

    def bound(self) -> float:
        """Return an upper bound of the speed-up by other boundaries.

        It is the slowest stage's time, divided by the larger of the mean stage and the largest layer.
        """
        layers = layer_seconds(self.profile)
        stages = stage_seconds(layers, self.boundaries[-1])
        return max(stages) / max(max(layers), sum(layers) / len(stages))


@contextmanager
def job(
    dynamism: Dynamism, sizes: Sizes, steps: int, balance: Mapping[str, Any], rate: float = 2e-3, **block: Any
) -> Iterator[Any]:
    """Context manager with an engine over all processes, in two stages.

    rate: the learning rate.
    block: further entries of the `dynatrain` block.
    """
    data = td.get_world_size() // 2
    batch = dynamism.micro_batch * MICRO_BATCHES * data
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": dynamism.micro_batch,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"partition": "uniform"},
        "dynatrain": {"layout": {"data": data, "pipe": 2}, "balance": dict(balance), **block},
    }
    samples = Windows(texts()[0], steps * batch, dynamism.length)
    engine, *_ = ds_dynatrain.initialize(model=pipeline(dynamism, sizes), config=config, training_data=samples)
    try:
        yield engine
    finally:
        engine.destroy()


def train(dynamism: Dynamism, sizes: Sizes, steps: int, balance: Mapping[str, Any], changes: int = CHANGES) -> Run:
    """Train a model, and return the results. Layers change `changes` times, between a sixth and a half of the steps."""
    run = Run()
    due = {round(steps * (1 + 2 * each / changes) / 6): each / changes for each in range(1, changes + 1)}
    with job(dynamism, sizes, steps, balance) as engine:
        for step in range(steps):
            if step in due:
                run.changes[step] = change(engine, dynamism, due[step])
            begin = time.perf_counter()
            run.losses.append(engine.train_batch().item())
            run.seconds.append(time.perf_counter() - begin)
            run.boundaries.append(boundaries(engine))
            if engine.balancer.profile is not run.profile:
                run.profile = engine.balancer.profile
                each = stage_seconds(layer_seconds(run.profile), run.boundaries[-1])
                run.stages[step] = [MICRO_BATCHES * seconds for seconds in each]
    return run


def change(engine: Any, dynamism: Dynamism, progress: float) -> str:
    """Change the layers, and tell the engine which parameters are frozen and that costs have changed."""
    said = change_only(engine, dynamism, progress)
    if said:
        engine.balancer.note(said)
    return said


def change_only(engine: Any, dynamism: Dynamism, progress: float) -> str:
    """Change the layers without telling the balancer, which has to notice the new costs itself."""
    said = dynamism.change(layers_of(engine), progress, gather, boundaries(engine)[-1])
    if said:
        engine.update_param_groups()
    return said


def layers_of(engine: Any) -> Layers:
    """Return the layers of this process's stage by their number in the whole model, which `PipelineModule` uses as
    name.
    """
    return {int(name): layer for name, layer in engine.module.named_children() if name.isdigit()}


def gather(mine: Mapping[int, Any]) -> Mapping[int, Any]:
    """Collect a value for each layer from the first process that holds it. Return all values on all processes.

    mine: the values of this process's layers: numbers and lists, which are sent as JSON.
    """
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(td.get_world_size())]
    td.all_gather(sizes, torch.tensor([len(text)]))
    longest = max(int(size) for size in sizes)
    said = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    td.all_gather(said, torch.cat([text, torch.zeros(longest - len(text), dtype=torch.uint8)]))
    found = [json.loads(bytes(each[: int(size)].tolist())) for each, size in zip(said, sizes, strict=True)]
    return {int(number): value for each in reversed(found) for number, value in each.items()}


def boundaries(engine: Any) -> tuple[int, ...]:
    """Return the first layer of each stage, followed by the number of layers."""
    return tuple(map(int, engine.module.parts))


def layer_seconds(profile: Profile | None) -> list[float]:
    """Return the seconds of both passes of a micro-batch for each layer."""
    return [] if profile is None else [each.forward_seconds + each.backward_seconds for each in profile.layers]


def stage_seconds(layers: list[float], cut: tuple[int, ...]) -> list[float]:
    """Return the seconds of a micro-batch in each stage."""
    return [sum(layers[start:stop]) for start, stop in itertools.pairwise(cut)]
