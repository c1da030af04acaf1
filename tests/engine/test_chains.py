"""Runs with several switches: chains, switches that follow each other at once, gradient accumulation."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from tests.engine import jobs
from tests.engine.paths import LAYOUTS
from tests.engine.pool import RankPool

CHAIN_SEED = 11
WHOLE_SHARES = {"train_micro_batch_size_per_gpu": 12}
"""One micro-batch a rank in every world, whatever the first one was."""
ACCUMULATING = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


def training(start: jobs.Sizes, steps: int, schedule: jobs.Schedule, more: dict[str, Any]) -> jobs.Record:
    return jobs.run(jobs.config(start=start, **more), steps, schedule)


def losses(pool: RankPool, start: jobs.Sizes, steps: int, schedule: jobs.Schedule, **more: Any) -> list[float]:
    run = pool.run if schedule else pool.once
    records = run(training, start=start, steps=steps, schedule=schedule, more=more)
    found = jobs.global_losses(records)
    assert len(found) == steps
    assert len(records[0].events) == len([step for step in schedule if step < steps])
    return found


@pytest.mark.full
def test_chain_of_20_stays_within_the_spread_of_static_runs(pool: RankPool) -> None:
    draw = random.Random(CHAIN_SEED)
    path = [draw.choice(LAYOUTS) for _ in range(21)]
    schedule = {2 + number: sizes for number, sizes in enumerate(path[1:])}
    steps = 24
    chain = losses(pool, path[0], steps, schedule)
    static = [losses(pool, sizes, steps, {}) for sizes in sorted(set(path))]
    spread = max(jobs.furthest(one, other) for one in static for other in static)
    distance = max(jobs.furthest(chain, one) for one in static)
    print(f"chain of 20: furthest from a static run {distance:.1e}, spread of {len(static)} static runs {spread:.1e}")
    assert 0 < distance <= 2 * spread


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_accumulation_is_exact_in_worlds_1_to_4(pool: RankPool, stage: int) -> None:
    """8 samples in micro-batches of 2: 4, 2, 2 (unequal) and 1 accumulation steps."""
    expected = losses(pool, (1, stage), 8, {}, **ACCUMULATING)
    for world in (2, 3, 4):
        assert jobs.furthest(losses(pool, (world, stage), 8, {}, **ACCUMULATING), expected) <= 3e-7, world


@pytest.mark.full
def test_switches_with_accumulation(pool: RankPool) -> None:
    schedule = {2: (3, 2), 4: (1, 1), 6: (4, 3), 8: (3, 0)}
    static = losses(pool, (1, 1), 10, {}, **ACCUMULATING)
    assert jobs.furthest(losses(pool, (2, 1), 10, schedule, **ACCUMULATING), static) <= 1e-6


def test_8_samples_over_3_ranks_are_exact(pool: RankPool) -> None:
    static = losses(pool, (1, 0), 8, {}, train_batch_size=8)
    for stage in range(4):
        uneven = losses(pool, (3, stage), 8, {}, train_batch_size=8)
        assert jobs.furthest(uneven, static) <= 1e-6, stage


# Not in bf16 between stage 0 and another: there DeepSpeed takes an optimizer step on zeros when it starts (step is 1).
BEFORE_THE_FIRST_STEP = [
    *(("fp32", start, target) for start, target in (((2, 1), (4, 3)), ((4, 3), (2, 0)), ((3, 0), (4, 2)))),
    *(("bf16", start, target) for start, target in (((2, 1), (4, 3)), ((4, 3), (1, 2)), ((2, 0), (3, 0)))),
]


DAILY = (BEFORE_THE_FIRST_STEP[4],)


@pytest.mark.parametrize(
    ("dtype", "start", "target"),
    [each if each in DAILY else pytest.param(*each, marks=pytest.mark.full) for each in BEFORE_THE_FIRST_STEP],
)
def test_switch_before_the_first_step(pool: RankPool, dtype: str, start: jobs.Sizes, target: jobs.Sizes) -> None:
    more = {"bf16": {"enabled": dtype == "bf16"}, **WHOLE_SHARES}
    switched = losses(pool, start, 4, {0: target}, **more)
    assert switched == losses(pool, target, 4, {}, **more), "the same path of arithmetic, so bitwise"


def first_case() -> Any:
    return jobs.run(jobs.config(start=(2, 1)), 2, {0: (4, 3)})


def test_event_before_the_first_step_counts_what_was_there(pool: RankPool) -> None:
    event = pool.run(first_case)[0].events[0]
    assert event.bytes_sent == event.bytes_minimum > 0
    assert event.certificate.kinds == ("weight", "master"), "no moments yet"


def consecutive_case() -> Any:
    return jobs.run(jobs.config(start=(2, 1)), 7, {3: (4, 3), 4: (4, 3), 5: (2, 2), 6: (2, 2)})


@pytest.mark.full
def test_switches_in_consecutive_steps_and_to_the_same_layout(pool: RankPool) -> None:
    records = pool.run(consecutive_case)
    events = records[0].events
    sides = [(event.source.layout["data"], event.target.layout["data"]) for event in events]
    assert sides == [(2, 4), (4, 4), (4, 2), (2, 2)]
    assert [event.bytes_sent for event in events if event.source == event.target] == [0, 0]
    switched, static = jobs.global_losses(records), losses(pool, (2, 1), 7, {})
    assert jobs.furthest(switched, static) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.full) for each in (0, 1, 2)), 3])
def test_to_the_same_layout_is_bitwise(pool: RankPool, stage: int) -> None:
    switched = losses(pool, (3, stage), 8, {2: (3, stage), 3: (3, stage), 6: (3, stage)})
    assert switched == losses(pool, (3, stage), 8, {})


def test_stage_1_and_2_are_bitwise(pool: RankPool) -> None:
    """In a world of 2; in larger ones the two stages add gradients up in another order, static runs too."""
    assert losses(pool, (2, 1), 8, {3: (2, 2), 6: (2, 1)}) == losses(pool, (2, 1), 8, {})


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_more_chains(pool: RankPool, seed: int) -> None:
    draw = random.Random(seed)
    path = [draw.choice(LAYOUTS) for _ in range(21)]
    assert any(one != other for one, other in pairwise(path))
    chain = losses(pool, path[0], 22, {1 + number: sizes for number, sizes in enumerate(path[1:])}, **ACCUMULATING)
    static = [losses(pool, sizes, 22, {}, **ACCUMULATING) for sizes in sorted(set(path))]
    spread = max(jobs.furthest(one, other) for one in static for other in static)
    assert max(jobs.furthest(chain, one) for one in static) <= 2 * spread
