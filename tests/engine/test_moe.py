"""Native experts change places live: 1 to 4 ranks, stages 0 to 2, against an independent gather and a probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as td
from torch import nn

from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.space import Layout
from tests.adapters import expert_models as models
from tests.engine import expert_walks as walks
from tests.engine import jobs
from tests.engine.models import Sequences
from tests.engine.pool import RankPool

WALK = [
    {"data": 2, "expert": 2, "zero_stage": 1},
    {"data": 4, "expert": 4, "zero_stage": 1},
    {"data": 2, "expert": 1, "zero_stage": 1},
    {"data": 4, "expert": 2, "zero_stage": 1},
]


def build(size: int) -> nn.Module:
    """What a user builds on this process: the experts of its own rank, which have values of their own."""
    return models.native_model(size, td.get_rank() % size)


def walked(
    pool: RankPool, path: list[dict[str, int]], dtype: str = "fp32", steps: int = walks.STEPS, **more: Any
) -> list[float]:
    """The losses of all steps."""
    config = walks.settings(dtype, path[0], autoep=False, **more)
    case = {"config": config, "path": path, "build": build, "arguments": {"size": path[0]["expert"]}, "steps": steps}
    seen = pool.run(walks.walk, seconds=240, **case)
    walks.check(seen, path)
    return jobs.global_losses([each.record for each in seen if each is not None])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_walk(pool: RankPool, stage: int) -> None:
    """From a model that was built for two ranks' experts; the losses are those of a job that never switched."""
    path = [{**sizes, "zero_stage": stage} for sizes in WALK]
    losses = walked(pool, path)
    static = walked(pool, path[:1], steps=len(losses))
    assert jobs.furthest(losses, static) < 1e-6


def test_bf16_accumulated_in_fp32(pool: RankPool) -> None:
    """BF16_Optimizer, and ZeRO's from stage to stage."""
    path = [{**sizes, "zero_stage": stage} for sizes, stage in zip(WALK, (1, 2, 0, 1), strict=True)]
    walked(pool, path[:2] + path[3:], "bf16 in fp32")
    walked(pool, path, "bf16")


def refused() -> None:
    """Ask for what cannot be, and go on."""
    settings = walks.settings("fp32", WALK[0], autoep=False)
    with jobs.job(settings, build(2), Sequences(24), groups=False) as made:
        iterator = iter(made.loader)
        batch = next(iterator)
        for layout, reason in (
            (Layout(data=2, expert=2, zero_stage=3), "is a layer of deepspeed.moe, and this is ZeRO stage 3"),
            (Layout(data=3, expert=3, zero_stage=1), "expert=3 does not divide the 4 experts of 'first'"),
            (Layout(data=4, expert=4, zero_stage=1, tensor=2), "needs 8 members"),
        ):
            with pytest.raises(SwitchRefused) as refusal:
                made.engine.switch(layout)
            assert reason in str(refusal.value)
        jobs.one_micro_batch(made.engine, batch, jobs.Record())


def test_stage_3_is_refused(pool: RankPool) -> None:
    """And sizes that do not divide; the job goes on."""
    pool.run(refused)


def contradicting() -> str:
    settings = walks.settings("fp32", {"data": 4, "expert": 4, "zero_stage": 1}, autoep=False)
    with pytest.raises(ConfigError) as refusal, jobs.job(settings, build(2), groups=False):
        pass
    return str(refusal.value)


def test_the_model_and_the_block_must_agree(pool: RankPool) -> None:
    """On the expert size of the start."""
    assert "expert is 4 and ep_size of the model's layers is 2" in pool.run(contradicting)[0]
