"""How gradients are averaged: without reduce-scatter or contiguous buckets, overlapped, scaled before or after."""

from __future__ import annotations

from typing import Any

import pytest

from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import Layout
from ds_dynatrain.support import Target, refuse_layout
from tests.engine import jobs, walks
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(2, 1), (3, 2), (2, 3), (4, 1), (2, 0), (2, 2), (3, 3), (1, 1)]
ALL_REDUCED = {"reduce_scatter": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "no reduce-scatter": {"zero_optimization": ALL_REDUCED},
    "single buckets": {"zero_optimization": {"contiguous_gradients": False}},
    "overlapped": {"zero_optimization": {"overlap_comm": True}},
    "not overlapped": {"zero_optimization": {"overlap_comm": False}},
    "scaled before": {"zero_optimization": ALL_REDUCED, "prescale_gradients": True},
    "scaled twice": {"zero_optimization": ALL_REDUCED, "gradient_predivide_factor": 8.0},
    "single buckets, overlapped": {"zero_optimization": {"contiguous_gradients": False, "overlap_comm": True}},
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_walks(pool: RankPool, name: str) -> None:
    walks.compare(pool, walks.settings("fp32", **OPTIONS[name]), PATH)


SCALED: list[dict[str, Any]] = [{"prescale_gradients": True}, {"gradient_predivide_factor": 8.0}]


def refused_case(more: dict[str, Any]) -> list[str]:
    """What a job at stage 1 is told of stages 2 and 3."""
    with jobs.job(jobs.config(start=(4, 1), **more)) as made:
        return [made.engine.plan(zero_stage=stage).refusal for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("more", SCALED, ids=lambda more: next(iter(more)))
def test_scaling_needs_whole_gradients_at_stages_2_and_3(pool: RankPool, more: dict[str, Any]) -> None:
    *told_of_less, told_of_2, told_of_3 = pool.run(refused_case, more=more)[0]
    assert told_of_less == ["", ""]
    for stage, told in ((2, told_of_2), (3, told_of_3)):
        assert told.startswith(next(iter(more))) and f"stage {stage} scales gradients before or after" in told


def test_a_factor_that_stage_3_gets_wrong() -> None:
    """0.19.8 multiplies by the factor after the sum unless it is the number of ranks."""
    config = {"gradient_predivide_factor": 4.0, "zero_optimization": {"reduce_scatter": False}}
    for stage, data in ((3, 2), (3, 1), (2, 4), (1, 4), (0, 4)):
        refuse_layout(Target(config, Layout(data=data, zero_stage=stage)))
    refuse_layout(Target({**config, "prescale_gradients": True}, Layout(data=4, zero_stage=3)))
    with pytest.raises(SwitchRefused, match="on as many ranks stage 3 leaves the gradients 4 times too small"):
        refuse_layout(Target(config, Layout(data=4, zero_stage=3)))
