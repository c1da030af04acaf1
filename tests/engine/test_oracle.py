"""The oracle against DeepSpeed's own calls for whole tensors, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.engine import jobs, oracle
from tests.engine.paths import LAYOUTS
from tests.engine.pool import RankPool


def compare(made: jobs.Job) -> None:
    """Raise for a tensor that DeepSpeed itself sees otherwise; stage 0 has no such calls beyond the weights."""
    state, stage = oracle.gather(made.engine), made.engine.zero_optimization_stage()
    if stage in (1, 2):  # with several groups DeepSpeed links the moments of the first one only, and too early
        made.engine.optimizer._hp_optimizer_states_linked = False
        made.engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in made.engine.module.named_parameters():
        with GatheredParameters([parameter], enabled=stage == 3):
            assert torch.equal(parameter.detach().view(-1), state.tensors[name, "weight"]), name
        if stage and parameter.requires_grad:
            seen = {kind: safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}
            seen["master"] = safe_get_full_fp32_param(parameter)
            for kind, whole in seen.items():
                assert torch.equal(whole.view(-1), state.tensors[name, kind]), f"{kind} of {name}"


def case(dtype: str, path: list[jobs.Sizes]) -> Any:
    schedule = {step: sizes for step, sizes in enumerate(path) if step}
    return jobs.run(jobs.config(dtype, path[0]), len(path), schedule, each=compare)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_oracle_is_what_deepspeed_says(pool: RankPool, dtype: str) -> None:
    pool.run(case, dtype=dtype, path=[(2, 1), *LAYOUTS], seconds=90)
