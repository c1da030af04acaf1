"""Exact jobs: the same bits in every world, through switches, saves and loads."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import exactly, jobs
from tests.engine.exactly import NOT_ON_DEVICE, STEPS, Bits, differences, sparing, together, with_several_uses
from tests.engine.pool import RankPool

WORLDS: tuple[jobs.Sizes, ...] = tuple((data, stage) for data in (1, 2, 3, 4) for stage in (1, 2, 3))
FULL = pytest.mark.full


def alone(pool: RankPool, **arguments: Any) -> Bits:
    """The run that others are held against: one rank, stage 1."""
    return together(pool.once(exactly.run, start=(1, 1), **arguments))


@pytest.mark.full
@NOT_ON_DEVICE
def test_every_world_has_the_same_bits(pool: RankPool) -> None:
    hold_against(pool, ((3, 2), (2, 3), (4, 1)))


@NOT_ON_DEVICE
@FULL
def test_all_worlds_have_the_same_bits(pool: RankPool) -> None:
    hold_against(pool, WORLDS[1:])


def hold_against(pool: RankPool, worlds: Iterable[jobs.Sizes]) -> None:
    first = alone(pool)
    assert len(first.losses) == STEPS // 3 * (2 * exactly.LEAVES + 3)
    assert all(norm > 0.4 for norm in first.norms.values()), "it clips"
    for start in worlds:
        assert differences(first, together(pool.run(exactly.run, start=start))) == [], start


def test_without_it_they_have_not(pool: RankPool) -> None:
    """What the other tests would not see they could not hold."""
    runs = [together(pool.run(exactly.run, start=(data, 2), dynatrain={"exact": False})) for data in (1, 2)]
    assert any("weight" in each for each in differences(*runs))


SWITCHES: dict[int, jobs.Sizes] = {1: (4, 2), 2: (3, 3), 3: (1, 1), 4: (4, 3), 5: (2, 1)}


@pytest.mark.full
@NOT_ON_DEVICE
@pytest.mark.parametrize("late", [False, True])
def test_live_switches_change_no_bit(pool: RankPool, late: bool) -> None:
    found = together(pool.run(exactly.run, start=(2, 1), schedule=SWITCHES, dynatrain={"late": late}))
    assert differences(alone(pool), found) == []


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("seed", range(6))
def test_random_chains_change_no_bit(pool: RankPool, seed: int) -> None:
    stream = random.Random(seed)
    chain = {3 * step + 1: stream.choice(WORLDS) for step in range(8)}
    found = together(pool.run(exactly.run, start=stream.choice(WORLDS), schedule=chain, steps=27, seconds=120))
    assert differences(alone(pool, steps=27), found) == []


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """So many ranks, of the full set alone."""
    ranks = RankPool(6, tmp_path_factory.mktemp("six"))
    yield ranks
    ranks.stop()


@NOT_ON_DEVICE
@FULL
def test_worlds_of_five_and_six_have_the_same_bits(six: RankPool) -> None:
    hold_against(six, [(data, stage) for data in (5, 6) for stage in (1, 2, 3)])


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("seed", range(20))
def test_long_random_chains_change_no_bit(six: RankPool, seed: int) -> None:
    """Eight live switches in 200 steps, in worlds of one to six; in every other chain they are late."""
    stream = random.Random(seed)
    worlds = [(data, stage) for data in range(1, 7) for stage in (1, 2, 3)]
    chain = {step: stream.choice(worlds) for step in stream.sample(range(1, 199), 8)}
    late = {"late": bool(seed % 2)}
    given = {"start": stream.choice(worlds), "schedule": chain, "dynatrain": late}
    found = together(six.run(exactly.run, steps=200, seconds=300, **given))
    assert differences(alone(six, steps=200), found) == []


@NOT_ON_DEVICE
def test_a_job_that_goes_on_in_another_world(pool: RankPool, tmp_path: Path) -> None:
    """Under another seed of the process: that of the job is what counts."""
    pool.run(exactly.run, start=(3, 3), steps=2, save=str(tmp_path))
    found = together(pool.run(exactly.run, start=(2, 1), seed=6, load=str(tmp_path)))
    whole = alone(pool)
    whole.losses = {place: loss for place, loss in whole.losses.items() if place[0] >= 2}
    assert differences(whole, found) == []


KINDS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": True},
    "small chunks": {"zero_optimization": {"reduce_bucket_size": 60}},
    "round robin": {"zero_optimization": {"round_robin_gradients": True}},
    "workers": {"workers": 2},
    "SGD": {
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
    },
    "loss.backward()": {"torch_style": True},
    "no clipping": {"gradient_clipping": 0.0},
    "one leaf": {"train_micro_batch_size_per_gpu": 13},
}


@pytest.mark.full
@NOT_ON_DEVICE
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "tokens" else FULL) for name in KINDS])
def test_kinds_of_jobs(pool: RankPool, name: str) -> None:
    kind = KINDS[name]
    most = 1 if name == "one leaf" else 4
    runs = [
        together(pool.run(exactly.run, start=(min(data, most), stage), steps=4, **with_stage(kind, stage)))
        for data, stage in ((1, 1), (3, 2), (4, 1), (2, 3))
    ]
    for other in runs[1:]:
        assert differences(runs[0], other) == []


def with_stage(kind: dict[str, Any], stage: int) -> dict[str, Any]:
    """Further settings, whose ZeRO block needs a stage."""
    zero = kind.get("zero_optimization")
    return {**kind, "zero_optimization": {**zero, "stage": stage}} if zero else kind


@NOT_ON_DEVICE
@pytest.mark.parametrize("start", [(1, 3), pytest.param((3, 2), marks=FULL), pytest.param((4, 3), marks=FULL)])
def test_tensors_with_several_uses(pool: RankPool, start: jobs.Sizes) -> None:
    """ZeRO-3 has nodes in the graph, with which autograd adds their gradients in another order."""
    first = alone(pool, steps=2, model=with_several_uses)
    assert differences(first, together(pool.run(exactly.run, start=start, steps=2, model=with_several_uses))) == []


@NOT_ON_DEVICE
@FULL
def test_parameters_that_ranks_do_not_share(pool: RankPool) -> None:
    """Some are used in some leaves alone: their gradients are zeros in the others, whoever trains these.

    Not at stage 3, which gathers a layer on all ranks at once.
    """
    first = together(pool.run(exactly.run, start=(1, 2), steps=3, model=sparing))
    for start in ((2, 2), (3, 1)):
        assert differences(first, together(pool.run(exactly.run, start=start, steps=3, model=sparing))) == []
