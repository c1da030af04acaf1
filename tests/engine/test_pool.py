"""The harness itself: results, exceptions, exits, deaths and hangs of a rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td
from deepspeed.accelerator import get_accelerator

from tests.engine import jobs
from tests.engine.pool import CaseFailed, Died, RankPool


def summing(value: int) -> tuple[int, float]:
    total = torch.tensor(float(value + td.get_rank()), device=get_accelerator().current_device_name())
    td.all_reduce(total)
    return td.get_rank(), total.item()


def training(start: jobs.Sizes, mark: Path | None = None) -> jobs.Record:
    """A short run; it leaves a mark where it has been."""
    if mark is not None:
        (mark / f"{td.get_rank()} {time.monotonic_ns()}").touch()
    return jobs.run(jobs.config(start=start), 4)


def failing_on(rank: int, how: str) -> Any:
    if td.get_rank() != rank:
        return "fine"
    if how == "raise":
        raise ValueError("wrong here")
    if how == "exit":
        raise SystemExit(0)
    if how == "die":
        os._exit(3)
    time.sleep(60)
    return None


def test_results_come_in_the_order_of_ranks(pool: RankPool) -> None:
    assert pool.run(summing, value=2) == [(rank, 14.0) for rank in range(4)]


def test_exit_of_an_idle_member_is_a_normal_end(pool: RankPool) -> None:
    assert pool.run(failing_on, rank=2, how="exit") == ["fine", "fine", None, "fine"]


@pytest.mark.parametrize(("how", "words"), [("raise", "wrong here"), ("die", "exit code 3"), ("hang", "no answer")])
def test_a_failure_names_its_rank_and_the_next_case_runs(pool: RankPool, how: str, words: str) -> None:
    with pytest.raises(CaseFailed, match=rf"rank 1: (.|\n)*{words}"):
        pool.run(failing_on, rank=1, how=how, seconds=3)
    assert pool.run(summing, value=0)[0] == (0, 6.0)


def test_a_rank_that_may_die(pool: RankPool) -> None:
    assert pool.run(failing_on, rank=3, how="die", may_die=[3]) == ["fine", "fine", "fine", Died(3)]


def test_a_run_that_is_kept_is_what_a_fresh_one_gives(pool: RankPool, tmp_path: Path) -> None:
    """Made once for the same arguments and once more for others; nobody sees what another one does to the results."""
    given = {"start": (3, 2), "following": {"mark": tmp_path}}
    first = pool.once(training, **given)
    first[0].losses.clear()
    kept, fresh = pool.once(training, **given), pool.run(training, start=(3, 2))
    assert [each.losses for each in kept] == [each.losses for each in fresh] and kept[0].losses
    assert len([*tmp_path.iterdir()]) == 4
    other = pool.once(training, **{**given, "start": (2, 2)})
    assert other[0].losses != kept[0].losses and len([*tmp_path.iterdir()]) == 8
