"""Data ranks with unequal shares of the global batch: the same losses, and nothing moves."""

from __future__ import annotations

from typing import Any

import pytest

import ds_dynatrain
from ds_dynatrain.errors import ConfigError
from tests.engine import jobs
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

STEPS = 12
CHANGES: dict[int, dict[str, Any]] = {
    2: {"shares": (3, 9)},
    4: {"shares": [9, 3], "zero_stage": 2},
    6: {"data": 3, "zero_stage": 3},
    8: {"data": 4, "shares": (1, 2, 4, 5)},
    10: {"shares": (3, 3, 3, 3)},
}
SHARES = {0: (6, 6), 2: (3, 9), 4: (9, 3), 6: (4, 4, 4), 8: (1, 2, 4, 5), 10: (3, 3, 3, 3)}
"""Steps done -> the samples of each rank from there on."""


def ask(made: jobs.Job) -> None:
    step = made.engine.global_steps
    if step in CHANGES:
        made.engine.switch(**CHANGES[step], at=step)


def job(changes: bool, shares: list[int] | None = None) -> jobs.Record:
    settings = jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=4)
    settings["dynatrain"]["layout"]["shares"] = shares
    return jobs.run(settings, STEPS, each=ask if changes else None)


@pytest.fixture(scope="module")
def static(pool: RankPool) -> list[float]:
    return jobs.global_losses(pool.run(job, changes=False))


@pytest.mark.full
def test_the_losses_are_those_of_equal_shares(pool: RankPool, static: list[float]) -> None:
    records = pool.run(job, changes=True)
    losses = jobs.global_losses(records)
    assert losses[:2] == static[:2] and jobs.furthest(losses, static) <= 1e-6
    for step in range(STEPS):
        parts = [record.losses[step] for record in records if record is not None and step in record.losses]
        now = SHARES[max(each for each in SHARES if each <= step)]
        assert sorted(sum(samples for _, samples in slots) for slots in parts) == sorted(now)
        assert {len(slots) for slots in parts} == {-(-max(now) // 4)}, "all make as many micro-batches"
    moved = [event.bytes_sent for event in records[0].events]
    assert moved[0] == moved[4] == 0, "of shares alone nothing moves"


def test_a_job_that_starts_with_shares(pool: RankPool, static: list[float]) -> None:
    assert jobs.furthest(jobs.global_losses(pool.run(job, changes=False, shares=[5, 7])), static) <= 1e-6


def refused(shares: Any, norm: bool = False) -> tuple[str, int]:
    """What is said, and the steps that were made nevertheless."""
    with jobs.job(jobs.config(start=(2, 1)), model=small_gpt(norm=norm)) as made:
        words = ""
        if not made.engine.idle:
            with pytest.raises(ds_dynatrain.SwitchRefused) as caught:
                made.engine.switch(shares=shares)
            words = str(caught.value)
        return words, len(jobs.train(made, 2).losses)
    return "", 0


@pytest.mark.parametrize(
    ("shares", "norm", "words"),
    [
        ((3, 8), False, "are 11 samples over 2 ranks, and train_batch_size 12"),
        ((12,), False, "for 1 data indices and data is 2"),
        ((12, 0), False, "data index 1 without a sample"),
        ((4, 8), True, "in shares (4, 8) gives micro-batches of different sizes, and 'batch_norm' is a BatchNorm"),
    ],
)
def test_shares_that_cannot_be(pool: RankPool, shares: Any, norm: bool, words: str) -> None:
    first, second, *_ = pool.run(refused, shares=shares, norm=norm)
    assert first == second and words in first[0] and first[1] == 2


def started_with(shares: list[int]) -> str:
    with pytest.raises(ConfigError) as caught:
        job(changes=False, shares=shares)
    return str(caught.value)


def test_a_start_with_shares_that_do_not_add_up(pool: RankPool) -> None:
    assert all("are 13 samples over 2 ranks" in said for said in pool.run(started_with, shares=[5, 8]))
