"""What users do around the engine: loops with `no_sync`, optimizers of their own, steps that they place themselves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ds_dynatrain.errors import UnsupportedError
from tests.engine import jobs
from tests.engine.models import decay_groups, small_gpt
from tests.engine.pool import RankPool

STEPS = 10
SCHEDULE: jobs.Schedule = {2: (3, 3), 4: (2, 0), 6: (1, 2), 8: (2, 1)}


def compared(pool: RankPool, case: Any, **arguments: Any) -> None:
    """The losses of a job that switches, against those of one that does not."""
    switched = jobs.global_losses(pool.run(case, schedule=SCHEDULE, **arguments))
    static = jobs.global_losses(pool.run(case, schedule={}, **arguments))
    assert len(switched) == STEPS and jobs.furthest(switched, static) <= 1e-6


# ---- no_sync -------------------------------------------------------------------------------------------------------


def unsynchronized(schedule: jobs.Schedule, use: bool) -> jobs.Record:
    """`no_sync` for all micro-batches of a window but the last, where DeepSpeed has it (stages 0 and 1)."""
    record = jobs.Record()
    config = jobs.config("fp32", (2, 1), train_micro_batch_size_per_gpu=2)
    with jobs.job(config) as made:
        engine = made.engine
        engine.on_switch(record.events.append)
        while engine.idle or engine.global_steps < STEPS:
            jobs._ask_by(schedule, engine, record)
            for batch in made.loader:
                step, ends = engine.global_steps, engine.is_gradient_accumulation_boundary()
                with engine.no_sync() if use and not ends and engine.layout.zero_stage < 2 else nullcontext():
                    loss = engine(*batch)
                    engine.backward(loss)
                samples = 0 if engine.slot_is_borrowed else len(batch[0])
                record.losses.setdefault(step, []).append((loss.item(), samples))
                engine.step()
                if ends:
                    jobs._ask_by(schedule if engine.global_steps < STEPS else {}, engine, record)
                if engine.global_steps >= STEPS:
                    break
    return record


def test_no_sync(pool: RankPool) -> None:
    schedule = {2: (3, 0), 4: (1, 1), 6: (2, 3), 8: (2, 1)}
    with_it = jobs.global_losses(pool.run(unsynchronized, schedule=schedule, use=True))
    without = jobs.global_losses(pool.run(unsynchronized, schedule=schedule, use=False))
    assert len(with_it) == STEPS and jobs.furthest(with_it, without) <= 1e-6


# ---- optimizers of the user's --------------------------------------------------------------------------------------


def with_optimizer(schedule: jobs.Schedule, how: str) -> jobs.Record:
    """An optimizer object, or a function that makes one; with a scheduler of torch's."""
    model = small_gpt()
    config = jobs.config("fp32", (2, 1), zero_allow_untested_optimizer=True)
    del config["optimizer"]

    def made(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=2e-3)

    if how == "object":
        optimizer: Any = made(decay_groups(model))
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return jobs.run(config, STEPS, schedule, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # noqa: E731
    more = {"optimizer": made, "lr_scheduler": scheduler, "model_parameters": decay_groups(model)}
    return jobs.run(config, STEPS, schedule, model=model, **more)


@pytest.mark.full
@pytest.mark.parametrize("how", ["object", "function"])
def test_an_optimizer_of_the_users(pool: RankPool, how: str) -> None:
    compared(pool, with_optimizer, how=how)


# ---- step() once for a whole window --------------------------------------------------------------------------------


def unmanaged(schedule: jobs.Schedule, managed: bool) -> jobs.Record:
    """`managed_gradient_accumulation` false: DeepSpeed steps whenever `step()` is called."""
    record = jobs.Record()
    more = {} if managed else {"managed_gradient_accumulation": False}
    config = jobs.config("fp32", (2, 1), train_micro_batch_size_per_gpu=2, **more)
    with jobs.job(config) as made:
        engine = made.engine
        while engine.idle or engine.global_steps < STEPS:
            jobs._ask_by(schedule, engine, record)
            done = 0
            for batch in made.loader:
                step = engine.global_steps
                loss = engine(*batch)
                engine.backward(loss)
                samples = 0 if engine.slot_is_borrowed else len(batch[0])
                record.losses.setdefault(step, []).append((loss.item(), samples))
                done = (done + 1) % engine.gradient_accumulation_steps()
                if managed or not done:
                    engine.step()
                if not done:
                    jobs._ask_by(schedule if engine.global_steps < STEPS else {}, engine, record)
                if engine.global_steps >= STEPS:
                    break
        record.notes["samples"] = engine.global_samples
    return record


@pytest.mark.full
def test_steps_that_the_user_places(pool: RankPool) -> None:
    hands = pool.run(unmanaged, schedule=SCHEDULE, managed=False)
    engines = pool.run(unmanaged, schedule=SCHEDULE, managed=True)
    assert hands[0].notes == engines[0].notes == {"samples": 12 * STEPS}
    assert jobs.furthest(jobs.global_losses(hands), jobs.global_losses(engines)) <= 1e-6


def too_early() -> str:
    """`step()` after one of three micro-batches, and a stage that overlaps no messages then."""
    zero = {"stage": 2, "overlap_comm": True}
    more = {"managed_gradient_accumulation": False, "zero_optimization": zero, "train_micro_batch_size_per_gpu": 2}
    with jobs.job(jobs.config("fp32", (2, 2), **more)) as made:
        made.engine.backward(made.engine(*next(iter(made.loader))))
        with pytest.raises(UnsupportedError, match="in the middle of a global batch of 3 micro-batches"):
            made.engine.step()
        return str(made.engine.plan(zero_stage=1).refusal)
    return "idle"


def test_a_step_in_the_middle_of_a_global_batch(pool: RankPool) -> None:
    found = pool.run(too_early)
    assert all("overlap_comm works only in ZeRO stages 2 and 3" in words for words in found[:2])
