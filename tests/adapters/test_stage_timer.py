"""What the timer of a stage relies on of torch, and what it makes of passes whose times are known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as td
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_dynatrain.adapters.versions.deepspeed_versions import present
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.balance.adapters.stage_timer import StageTimer
from ds_dynatrain.balance.adapters.timing import StageTimes
from ds_dynatrain.balance.profile import Floats
from tests.engine.pool import RankPool
from tools import burning
from tools.burning import Burn, Burning

NEWEST = pytest.mark.skipif(
    not present().is_newest, reason="DeepSpeed 0.18 without ds_dynatrain neither recomputes nor steps on CPUs"
)
WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda run, x: run(x),
    "torch, reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "torch": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "deepspeed": lambda run, x: deepspeed.checkpointing.non_reentrant_checkpoint(run, x),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=NEWEST if way == "deepspeed" else ()) for way in WAYS])
def test_the_backward_pass_on_a_cpu_runs_in_the_calling_thread(way: str) -> None:
    seen: list[int] = []
    linear = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    out = WAYS[way](lambda given: Burn.apply(linear(given), 0.02, seen), x)
    begin = time.thread_time()
    out.sum().backward()
    took = time.thread_time() - begin
    assert seen == [threading.get_ident()]
    assert 0.02 <= took < 0.03


# ---- a stage whose layers burn known times ---------------------------------------------------------------------------

FORWARD, BACKWARD = (0.004, 0.002, 0.006), (0.003, 0.008, 0.005)
PASSES = 4
LEAST = 1e-3
"""Seconds by which a layer may be off at any rate."""


def layer(place: int, frozen: bool, pairs: bool) -> Burning:
    return Burning(FORWARD[place], BACKWARD[place], pairs).requires_grad_(not frozen)


def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return ((output[0] if isinstance(output, tuple) else output) - targets).square().mean()


def timed_in_a_stage(interval: int, frozen: int, pairs: bool = False, reentrant: bool = False) -> StageTimes:
    """One stage of three layers and a function in stock DeepSpeed."""
    layers = [*(layer(place, place < frozen, pairs) for place in range(3)), lambda given: given]
    model = PipelineModule(layers, num_stages=1, loss_fn=loss_of, activation_checkpoint_interval=interval)
    if not reentrant:
        model.activation_checkpoint_func = deepspeed.checkpointing.non_reentrant_checkpoint
    config = {
        "train_batch_size": 2 * PASSES * td.get_world_size(),
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    trained = [held for held in model.parameters() if held.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    batches = iter(lambda: (torch.ones(2, 4, requires_grad=interval > 0), torch.zeros(2, 4)), None)
    engine.train_batch(batches)
    functions, passes = list(model.forward_funcs), PipelineEngine._INSTRUCTION_MAP
    timer = StageTimer(engine, engine.basic_optimizer)
    with timer.timing():
        engine.train_batch(batches)
    assert model.forward_funcs == functions and engine._INSTRUCTION_MAP is passes
    engine.train_batch(batches)
    return timer.times()


def asleep(*stage: Any, **given: Any) -> StageTimes:
    """The same where the layers sleep as long as they would burn: what all else takes is left."""
    with replaced(burning, burn=time.sleep):
        return timed_in_a_stage(*stage, **given)


def differences(measured: Floats, beside: Floats, expected: Floats, share: float) -> list[str]:
    """Return each layer of the first rank whose median is not the time that it burns.

    What DeepSpeed does in a pass is some layer's, too: 1 ms, or what it takes on this machine (beside). share: by which
    other work may disturb a time.
    """
    most = (1 + share) * expected + np.maximum(LEAST, (1 + share) * np.median(beside, axis=0))
    least, found = (1 - share) * expected - LEAST, np.median(measured, axis=0)
    if td.get_rank() > 0:
        return []
    return [
        f"layer {place} takes {1e3 * seconds:.2f} ms, not {1e3 * low:.2f} to {1e3 * high:.2f}"
        for place, (low, seconds, high) in enumerate(zip(least, found, most, strict=True))
        if not low <= seconds <= high
    ]


ATTEMPTS = 3
"""Other work disturbs the clock now and then; an error of the timer is there in every attempt."""


def times_in_a_stage(interval: int, frozen: int, pairs: bool, reentrant: bool, share: float) -> list[str]:
    """Return what is wrong with a stage's times on any rank, the same on all; the first rank's layers alone burn."""
    timed = timed_in_a_stage if td.get_rank() == 0 else asleep
    found, beside = (each(interval, frozen, pairs, reentrant) for each in (timed, asleep))
    forward, backward = (np.array([*seconds, 0]) for seconds in (FORWARD, BACKWARD))
    backward = backward + forward if interval else backward * (np.arange(4) >= frozen)
    assert found.forward.shape == found.backward.shape == (PASSES, 4)
    assert found.stepped > 0
    if interval:
        assert found.kept_bytes == tuple(32 if place % interval == 0 else 0 for place in range(4))
    else:
        assert found.output_bytes == ((2 if pairs else 1) * 32,) * 4
        assert found.kept_bytes[0 if frozen == 0 else 2] > 0 and (frozen == 0 or found.kept_bytes[0] == 0)
    wrong = [
        f"{name}: {line}"
        for name, *times in (
            ("forward", found.forward, beside.forward, forward),
            ("backward", found.backward, beside.backward, backward),
        )
        for line in differences(*times, share)
    ]
    if not 0 < found.step_seconds < 0.1:
        wrong.append(f"rank {td.get_rank()}: the step takes {found.step_seconds} s")
    all_wrong: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(all_wrong, wrong)
    return list(chain.from_iterable(all_wrong))


def times_in_stages(share: float) -> None:
    """Each way of running the layers has its times on the first rank, in one of a few attempts of its own."""
    stages = (
        (0, 0, False, False),
        (0, 0, True, False),
        (0, 2, False, False),
        (1, 0, False, True),
        (2, 0, False, False),
    )
    for stage in stages:
        attempts = []
        for _ in range(ATTEMPTS):
            attempts.append(times_in_a_stage(*stage, share))
            if not attempts[-1]:
                break
        assert not attempts[-1], f"{stage}: {attempts}"


@NEWEST
@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize("share", [0.25, pytest.param(0.0, marks=pytest.mark.full, id="on a quiet machine")])
def test_layers_have_the_times_that_they_take(pool: RankPool, share: float) -> None:
    pool.run(times_in_stages, share=share, seconds=180)
