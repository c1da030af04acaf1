"""Whatever a user holds open at the boundary is named and left alone; accumulation boundaries that are set by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_dynatrain.errors import UnsupportedError
from tests.engine import jobs, oracle
from tests.engine.models import Sequences
from tests.engine.pool import RankPool

Window = Callable[[Any], AbstractContextManager[None]]


def micro_batch(engine: Any) -> list[torch.Tensor]:
    """Six samples that depend on the step and the rank."""
    data = Sequences()
    chosen = [data[(12 * engine.global_steps + 6 * engine.rank + place) % len(data)] for place in range(6)]
    return [torch.stack(parts) for parts in zip(*chosen, strict=True)]


def one_step(engine: Any) -> float:
    loss = engine(*micro_batch(engine))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


@contextmanager
def no_sync(engine: Any) -> Iterator[None]:
    with engine.no_sync():
        engine.backward(engine(*micro_batch(engine)))
        yield
    engine.optimizer.zero_grad()
    one_step(engine)


@contextmanager
def no_sync_on_one_rank(engine: Any) -> Iterator[None]:
    with engine.no_sync() if engine.rank == 1 else nullcontext():
        yield


@contextmanager
def coalescing(engine: Any) -> Iterator[None]:
    with engine.coalesce_grad_reduction():
        engine.backward(engine(*micro_batch(engine)))
        yield
    engine.step()


@contextmanager
def between_backward_and_step(engine: Any) -> Iterator[None]:
    engine.backward(engine(*micro_batch(engine)))
    yield
    engine.step()


@contextmanager
def gathered(engine: Any) -> Iterator[None]:
    """The parameters stay whole, and what rank 0 writes into them inside of the block counts."""
    own = [engine.module.words.weight, engine.module.scale, *engine.module.blocks.parameters()]
    with deepspeed.zero.GatheredParameters(iter(own), modifier_rank=0):
        before = [parameter.detach().clone() for parameter in own]
        yield
        assert all(torch.equal(one, other) for one, other in zip(own, before, strict=True))
        assert all(parameter.numel() for parameter in own)
        if engine.rank == 0:
            own[0].data.add_(0.25)
    whole = oracle.gather(engine).tensors["words.weight", "weight"]
    if engine.layout.zero_stage == 3:
        assert torch.equal(whole, before[0].view(-1).cpu() + 0.25)


@contextmanager
def gathered_for_reading(engine: Any) -> Iterator[None]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        yield


WINDOWS: dict[str, tuple[tuple[int, ...], Window, str]] = {
    "no_sync": ((0, 1), no_sync, "a no_sync window is open"),
    "no_sync on one rank": ((0, 1), no_sync_on_one_rank, "a no_sync window is open"),
    "coalescing": ((1, 2, 3), coalescing, "a coalesce_grad_reduction window is open"),
    "gathered": ((3,), gathered, "a deepspeed.zero.GatheredParameters block is open (1)"),
    "gathered for reading": ((0, 1, 3), gathered_for_reading, "a deepspeed.zero.GatheredParameters block is open (1)"),
    "gradients": ((0, 1, 2, 3), between_backward_and_step, "wait for an optimizer step"),
}


def windows_case(stage: int, target: jobs.Sizes) -> list[str]:
    """Ask in every window that the stage has, then once more outside of them."""
    told: list[str] = []
    own = {name: GatheredParameters.__dict__[name] for name in ("__init__", "__enter__", "__exit__")}
    settings = jobs.config(start=(2, stage), train_micro_batch_size_per_gpu=6)
    with jobs.job(settings) as made:
        engine = made.engine
        if engine.idle:
            engine.boundary()
        else:
            one_step(engine)
            for stages, window, reason in WINDOWS.values():
                if stage in stages:
                    told.append(_refused(engine, window, reason, target))
            jobs.ask(engine, target)
            engine.eval()
            with torch.no_grad():  # stage 3 leaves parameters of an evaluation gathered: nothing of the user's
                engine(*micro_batch(engine))
            engine.train()
            engine.boundary()
        assert engine.last_switch.outcome == "committed", engine.last_switch.reason
        assert (engine.data, engine.layout.zero_stage) == target
        for _ in range(2):
            engine.boundary()
            one_step(engine)
        oracle.gather(engine)
    assert own == {name: GatheredParameters.__dict__[name] for name in own}
    return told


def _refused(engine: Any, window: Window, reason: str, target: jobs.Sizes) -> str:
    generation = engine.generation
    with window(engine):
        before = None if "no_sync" in reason else oracle.gather(engine)
        jobs.ask(engine, target)
        engine.boundary()
        assert engine.last_switch.outcome == "rolled_back"
        assert reason in engine.last_switch.reason, engine.last_switch.reason
        assert engine.generation == generation
        if before is not None:
            assert oracle.differences(before, oracle.gather(engine)) == []
    one_step(engine)
    return str(engine.last_switch.reason)


@pytest.mark.parametrize(
    ("stage", "target"),
    [
        (0, (4, 1)),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, (3, 3)), (2, (4, 0)), (3, (4, 1)))),
    ],
)
def test_an_open_window_is_named_and_stays_as_it_is(pool: RankPool, stage: int, target: jobs.Sizes) -> None:
    told = pool.run(windows_case, stage=stage, target=target)
    assert len(told[0]) == sum(stage in stages for stages, _, _ in WINDOWS.values())
    assert told[0] == told[1]


def by_hand_case(by_hand: bool, schedule: jobs.Schedule) -> jobs.Record:
    """Boundaries set by hand with the last micro-batch of each global batch, and `step` called once for all of them."""
    record = jobs.Record()
    with jobs.job(jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=2)) as made:
        engine, asked = made.engine, -1
        while engine.idle or engine.global_steps < 6:
            for batch in made.loader:
                step, last = engine.global_steps, engine._parts.open_batch.is_last
                if by_hand:
                    engine.set_gradient_accumulation_boundary(last)
                loss = engine(*batch)
                engine.backward(loss)
                record.losses.setdefault(step, []).append((loss.item(), len(batch[0])))
                if last or not by_hand:
                    engine.step()
                if last and engine.global_steps in schedule and asked != engine.global_steps:
                    asked = engine.global_steps
                    jobs.ask(engine, schedule[asked])
                if last and engine.global_steps >= 6:
                    break
        record.notes["samples"] = engine.global_samples
    return record


@pytest.mark.full
def test_boundaries_set_by_hand_follow_the_world(pool: RankPool) -> None:
    schedule = {2: (4, 3), 4: (1, 0)}
    engines = pool.run(by_hand_case, by_hand=False, schedule=schedule)
    hands = pool.run(by_hand_case, by_hand=True, schedule=schedule)
    assert hands[0].notes == engines[0].notes == {"samples": 72}
    assert jobs.global_losses(hands) == jobs.global_losses(engines)
    assert [len(hands[0].losses[step]) for step in range(6)] == [3, 3, 2, 2, 6, 6]


def misplaced_case() -> None:
    """A boundary after two of three micro-batches."""
    with jobs.job(jobs.config(start=(4, 1), train_micro_batch_size_per_gpu=1)) as made:
        iterator = iter(made.loader)
        made.engine.set_gradient_accumulation_boundary(False)
        made.engine.backward(made.engine(*next(iterator)))
        made.engine.set_gradient_accumulation_boundary(True)
        made.engine.backward(made.engine(*next(iterator)))
        with pytest.raises(UnsupportedError, match="in the middle of a global batch of 3 micro-batches"):
            made.engine.step()


def test_a_boundary_in_the_middle_of_a_global_batch_is_refused(pool: RankPool) -> None:
    pool.run(misplaced_case)
