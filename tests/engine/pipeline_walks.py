"""Pipelines on a path of layouts, in living ranks: the state at each place is that of the place before, bit by bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_dynatrain.space import Layout
from tests.engine import jobs, oracle
from tests.engine.models import Sequences
from tests.engine.pipelines import buffer_bytes_taken, pipeline
from tools.minimum import bytes_minimum

STEPS = 3
Path = Sequence[Layout]


def layout(pipe: int, data: int, stage: int = 1, boundaries: tuple[int, ...] | None = None) -> Layout:
    """A layout of pipelines."""
    return Layout(pipe=pipe, data=data, zero_stage=stage, boundaries=boundaries)


def settings(start: Layout, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    """12 samples in micro-batches of 3, which 1, 2 and 4 pipelines share evenly."""
    made = jobs.config(dtype, train_micro_batch_size_per_gpu=3, **more)
    made["dynatrain"] = {**made["dynatrain"], "layout": start.to_dict()}
    return {**made, "zero_optimization": {**more.get("zero_optimization", {}), "stage": start.zero_stage}}


def job(given: dict[str, Any], name: str, **arguments: Any) -> AbstractContextManager[jobs.Job]:
    """A job of one of the models in `pipelines`; see `jobs.job`."""
    return jobs.job(given, pipeline(name), **arguments)


@dataclass
class Walked:
    """What a rank saw on a path: the losses after each arrival, and what came of each switch that it was in."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    compared: list[int] = field(default_factory=list)


def walk(
    path: Path, name: str, dtype: str = "fp32", steps: int = STEPS, more: Mapping[str, Any] | None = None
) -> Walked:
    """Go the path, `steps` optimizer steps at each place; the state after a switch is that before it."""
    found = Walked()
    with job(settings(path[0], dtype, **(more or {})), name) as made:
        engine = made.engine
        engine.boundary()  # members that start idle wait here
        state, held, least = None, frozenset[str](), 0
        while True:
            number = engine.generation - 1
            assert engine.layout == path[number]
            arrived, taken = oracle.gather(engine), buffer_bytes_taken(engine, held)
            if state is not None:
                assert oracle.differences(state, arrived) == [], f"{path[number - 1]} -> {path[number]}"
                event = engine.last_switch
                assert event.outcome == "committed", event.reason
                assert event.warnings == () and event.certificate is not None
                assert event.bytes_sent == least + taken
                found.sent[number] = (event.bytes_sent, event.bytes_minimum)
                found.compared.append(number)
            before = [weakref.ref(each) for each in engine.module.parameters()]
            found.losses[number] = [engine.train_batch().item() for _ in range(steps)]
            if number + 1 == len(path):
                return found
            state = oracle.gather(engine)
            target = path[number + 1]
            kinds = sorted({kind for _, kind in state.tensors})
            least = bytes_minimum(engine._parts.vps, target, engine.plan(target).members, kinds)
            held = frozenset(name for name, _ in engine.module.named_buffers())
            engine.switch(target, at=engine.global_steps)
            engine.boundary()
            if engine.generation != number + 2:
                state, held = None, frozenset()  # it was idle for a while
            elif (path[number].pipe, path[number].boundaries) != (target.pipe, target.boundaries):
                gc.collect()
                assert not any(each() is not None for each in before), "an old parameter is held"
    return found


def whole(ranks: Sequence[Walked | None]) -> list[float]:
    """The losses of all places, in order; every rank that was at a place saw the same."""
    losses: dict[int, list[float]] = {}
    for rank in ranks:
        for number, seen in (rank.losses if rank else {}).items():
            assert losses.setdefault(number, seen) == seen
    return [loss for number in sorted(losses) for loss in losses[number]]


def micro_batches(step: int, data: int, index: int) -> Iterator[Any]:
    """The micro-batches of a step for one place on the data axis, from an iterator of the user's own."""
    samples = Sequences()
    mine = range(step * 12 + index, (step + 1) * 12, data)
    for start in range(0, len(mine), 3):
        rows = [samples[at % len(samples)] for at in mine[start : start + 3]]
        yield torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
