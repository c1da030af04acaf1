"""Settings that leave the layout of the state alone: sets of them through switches, in all stages."""

from __future__ import annotations

from typing import Any

import pytest

import ds_dynatrain
from ds_dynatrain.errors import ConfigError, SwitchRefused
from tests.engine import jobs, walks
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(2, 1), (3, 3), (2, 0), (3, 2), (2, 3), (1, 2), (2, 1)]
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "buckets": (
        "bf16",
        {
            "reduce_scatter": False,
            "contiguous_gradients": False,
            "overlap_comm": False,
            "allgather_partitions": False,
            "reduce_bucket_size": 500,
            "allgather_bucket_size": 300,
            "ignore_unused_parameters": False,
            "load_from_fp32_weights": False,
            "use_all_reduce_for_fetch_params": True,
        },
    ),
    "overlap": (
        "fp32",
        {
            "overlap_comm": True,
            "use_multi_rank_bucket_allreduce": False,
            "reduce_bucket_size": 500,
            "allgather_sequential": True,
            "override_module_apply": False,
            "leaf_module": {"names": ["blocks.0"]},
        },
    ),
    "fetching": (
        "bf16",
        {
            "prefetch_bucket_size": 400,
            "max_live_parameters": 900,
            "max_reuse_distance": 100,
            "model_persistence_threshold": 60,
            "gather_16bit_weights_on_model_save": True,
            "memory_efficient_linear": False,
            "log_trace_cache_warnings": True,
            "enable_sanity_checks": True,
        },
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SETS)
def test_settings_of_zero(pool: RankPool, name: str) -> None:
    dtype, zero = SETS[name]
    walks.compare(pool, walks.settings(dtype, zero_optimization=zero), PATH)


@pytest.mark.full
def test_settings_that_look_on(pool: RankPool) -> None:
    """Beside the monitors and profilers of `test_reports.py`; DeepSpeed collects garbage in each step then."""
    more: dict[str, Any] = {"memory_breakdown": True, "dump_state": True, "log_level": "error", "vocabulary_size": 23}
    more |= {"timers": {"throughput": {"enabled": True, "synchronized": False}}, "disable_allgather": True}
    walks.compare(pool, walks.settings("fp32", **more), PATH)


def without_norm(start: jobs.Sizes) -> tuple[list[str], list[float]]:
    """Refusals of stages that DeepSpeed does not take with this setting, and the losses of a job that switches."""
    zero = {"stage": start[1], "compute_grad_norm": False}
    config = jobs.config("fp32", start, zero_optimization=zero, gradient_clipping=0.0)
    record, refusals = jobs.Record(), []
    with jobs.job(config) as made:
        for stage in (0, 3) if not made.engine.idle else ():
            assert made.engine.plan(zero_stage=stage).refusal
            with pytest.raises(SwitchRefused) as caught:
                made.engine.switch(zero_stage=stage)
            refusals.append(str(caught.value))
        jobs.train(made, 6, {2: (3, 2), 4: (1, 1)}, record)
    return refusals, [loss for parts in record.losses.values() for loss, _ in parts]


def test_a_setting_of_two_stages(pool: RankPool) -> None:
    for refusals, losses in pool.run(without_norm, start=(2, 1))[:2]:
        assert losses and len(refusals) == 2
        assert all("zero_optimization.compute_grad_norm: only stages 1 and 2 have" in one for one in refusals)


def a_first_layout(config: dict[str, Any]) -> str:
    """What `initialize` says."""
    try:
        ds_dynatrain.initialize(model=small_gpt(), config=config)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_first_layout_that_cannot_have_it(pool: RankPool) -> None:
    zero = {"stage": 3, "compute_grad_norm": False}
    config = jobs.config("fp32", (2, 3), zero_optimization=zero, gradient_clipping=0.0)
    found = pool.run(a_first_layout, config=config)
    assert all("compute_grad_norm" in words and "stages 1 and 2" in words for words in found)
