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
            assert torch.equal(parameter.detach().view(-1).cpu(), state.tensors[name, "weight"]), name
        if stage and parameter.requires_grad:
            seen = {kind: safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}
            seen["master"] = safe_get_full_fp32_param(parameter)
            for kind, whole in seen.items():
                assert torch.equal(whole.view(-1).cpu(), state.tensors[name, kind]), f"{kind} of {name}"


def case(dtype: str, path: list[jobs.Sizes]) -> Any:
    schedule = {step: sizes for step, sizes in enumerate(path) if step}
    return jobs.run(jobs.config(dtype, path[0]), len(path), schedule, each=compare)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_oracle_is_what_deepspeed_says(pool: RankPool, dtype: str) -> None:
    pool.run(case, dtype=dtype, path=[(2, 1), *LAYOUTS], seconds=90)


def switch_and_look(made: jobs.Job) -> None:
    """Raise for a moment that DeepSpeed's own call does not give as it is, before any step of the new layout."""
    engine = made.engine
    engine.switch(at=engine.global_steps, zero_stage={1: 2, 2: 3, 3: 1}[engine.zero_optimization_stage()])
    engine.boundary()
    assert engine.last_switch.step == engine.global_steps
    state = oracle.gather(engine)
    trained = [each for each in engine.module.named_parameters() if each[1].requires_grad]
    for name, parameter in trained:
        for kind in ("exp_avg", "exp_avg_sq"):
            seen = safe_get_full_optimizer_state(parameter, kind)
            assert torch.equal(seen.view(-1).cpu(), state.tensors[name, kind]), f"{kind} of {name}"


def looking() -> Any:
    return jobs.run(jobs.config("bf16", (4, 1)), 3, each=switch_and_look)


@pytest.mark.full
def test_deepspeed_finds_moments_before_the_first_step(pool: RankPool) -> None:
    """Right after a switch, as right before it."""
    pool.run(looking, seconds=90)
