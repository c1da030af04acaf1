"""What a pipeline trains on: `training_data` as under plain DeepSpeed, and what users give it to read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as td
from deepspeed.utils import groups

import ds_dynatrain
from ds_dynatrain.space import Layout
from tests.engine import jobs
from tests.engine.models import Sequences, decay_groups
from tests.engine.pipeline_walks import layout, settings
from tests.engine.pipelines import pipeline
from tests.engine.pool import RankPool

SAMPLES = 48
EPOCH = SAMPLES // 12
Seen = dict[int, list[Any]]
"""Optimizer step -> the samples of a rank's micro-batches, in their order."""


def noting(engine: Any) -> Seen:
    """What this rank reads from now on."""
    seen: Seen = {}

    def note(batch: Any) -> Any:
        seen.setdefault(int(engine.global_steps), []).extend(map(tuple, batch[0].tolist()))
        return batch

    engine.set_batch_fn(note)
    return seen


def stock(stages: int, steps: int) -> tuple[list[float], Seen]:
    """DeepSpeed itself, from `training_data`."""
    given = {key: value for key, value in settings(layout(1, 1)).items() if key != "dynatrain"}
    given["gradient_accumulation_steps"] = 12 // 3 // (td.get_world_size() // stages)
    model = pipeline("tied", stages)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=decay_groups(model), config=given, training_data=Sequences(SAMPLES)
    )
    seen = noting(engine)
    losses = [engine.train_batch().item() for _ in range(steps)]
    engine.destroy()
    groups._release_process_group_references()
    return losses, seen


def ours(stages: int, steps: int, path: Mapping[int, Layout], reshuffle: bool = False) -> tuple[list[float], Seen]:
    """The same script with the other call, through the layouts of `path` at their steps."""
    model = pipeline("tied", stages)
    given = settings(layout(stages, td.get_world_size() // stages))
    given["dynatrain"]["data"] = {"reshuffle": reshuffle}
    engine, *_ = ds_dynatrain.initialize(
        model=model, model_parameters=decay_groups(model), config=given, training_data=Sequences(SAMPLES)
    )
    try:
        seen, losses = noting(engine), []
        for step in range(steps):
            if step in path:
                engine.switch(path[step], at=step)
            losses.append(engine.train_batch().item())
        return losses, seen
    finally:
        engine.destroy()


def by_step(ranks: list[tuple[list[float], Seen]], step: int) -> set[Any]:
    """All samples of a global batch."""
    return {sample for _, seen in ranks for sample in seen.get(step, [])}


def test_training_data_is_what_deepspeed_trains_on(pool: RankPool) -> None:
    stages, steps = 2, EPOCH + 2
    expected = pool.run(stock, stages=stages, steps=steps)
    found = pool.run(ours, stages=stages, steps=steps, path={})
    for (losses, seen), (stock_losses, stock_seen) in zip(found, expected, strict=True):
        assert seen == stock_seen, "each rank reads the samples that it reads there, in their order"
        assert jobs.furthest(losses, stock_losses) < 5e-7
    path = {1: layout(4, 1), 3: layout(1, 4), 5: layout(2, 2)}
    switched = pool.run(ours, stages=stages, steps=steps, path=path)
    for step in range(steps):
        assert by_step(switched, step) == by_step(expected, step)
    assert len(set().union(*(by_step(switched, step) for step in range(EPOCH)))) == SAMPLES, "each sample once"
    assert jobs.furthest(switched[0][0], expected[0][0]) < 1e-6


def test_an_order_of_ones_own(pool: RankPool) -> None:
    found = pool.run(ours, stages=2, steps=2 * EPOCH, path={1: layout(4, 1)}, reshuffle=True)
    epochs = [[by_step(found, epoch * EPOCH + step) for step in range(EPOCH)] for epoch in (0, 1)]
    assert epochs[0][0] != epochs[1][0] and len(set().union(*epochs[1])) == SAMPLES
    in_order = {tuple(Sequences(SAMPLES)[at][0].tolist()) for at in range(12)}
    assert epochs[0][0] != in_order and torch.tensor(found[0][0]).isfinite().all()
