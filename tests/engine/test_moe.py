"""Native experts change places live: 1 to 4 ranks, stages 0 to 2, against an independent gather and a probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as td
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
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
    pool: RankPool, path: list[dict[str, int]], dtype: str = "fp32", steps: int = walks.STEPS, size: int = 2
) -> list[float]:
    """The losses of all steps; size: that the model is built with."""
    config = walks.settings(dtype, path[0], autoep=False)
    case = {"config": config, "path": path, "build": build, "arguments": {"size": size}, "steps": steps}
    seen = pool.run(walks.walk, seconds=240, **case)
    walks.check(seen, path, exact=dtype == "fp32")
    return jobs.global_losses([each.record for each in seen if each is not None])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_walk(pool: RankPool, stage: int) -> None:
    """From a model that was built for two ranks' experts; the losses are those of a job that never switched."""
    path = [{**sizes, "zero_stage": stage} for sizes in WALK]
    losses = walked(pool, path)
    static = walked(pool, path[:1], steps=len(losses))
    assert jobs.furthest(losses, static) < 1e-6


def test_a_model_that_is_built_whole(pool: RankPool) -> None:
    """With `ep_size=1` it starts with any expert size that the block names."""
    walked(pool, [WALK[1], WALK[0]], size=1)


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
            (Layout(data=2, expert=2, zero_stage=3), "layers of deepspeed.moe in ZeRO stages 0 to 2 alone"),
            (Layout(data=3, expert=3, zero_stage=1), "expert=3 does not divide the 4 experts of 'first'"),
            (
                Layout(data=2, expert=2, zero_stage=1, tensor=2),
                "layers of deepspeed.moe gather tokens of tensor ranks as gloo cannot",
            ),
        ):
            with pytest.raises(SwitchRefused) as refusal:
                made.engine.switch(layout)
            assert reason in str(refusal.value), refusal.value
        jobs.one_micro_batch(made.engine, batch, jobs.Record())


def test_stage_3_is_refused(pool: RankPool) -> None:
    """And sizes that do not divide; the job goes on."""
    pool.run(refused)


def uneven(drop_tokens: bool) -> str:
    """Ten samples over four ranks."""
    settings = {**walks.settings("fp32", WALK[0], autoep=False), "train_batch_size": 10}
    model = build(2)
    for layer in (model.first, model.second):
        layer.deepspeed_moe.gate.drop_tokens = drop_tokens
    with jobs.job(settings, model, Sequences(40), groups=False) as made:
        iterator = iter(made.loader)
        batch = next(iterator)
        if made.engine.generation == 1:
            jobs.one_micro_batch(made.engine, batch, jobs.Record())
            try:
                made.engine.switch(Layout(data=4, expert=2, zero_stage=1), at=1)
            except SwitchRefused as refusal:
                return str(refusal)
            batch = next(iterator)
        jobs.one_micro_batch(made.engine, batch, jobs.Record())
    return ""


def test_uneven_batches_need_layers_that_drop_nothing(pool: RankPool) -> None:
    """DeepSpeed dies in the exchange of experts that drop tokens, where ranks have different numbers of them."""
    said = pool.run(uneven, drop_tokens=True)[0]
    assert "experts of 'first' drop tokens" in said and "drop_tokens=False" in said
    assert pool.run(uneven, drop_tokens=False) == [""] * 4


def listed(how: str) -> list[dict[str, Any]]:
    """Two optimizer groups of the user, who lists the experts that this process has built."""
    model = build(2)
    vectors = [held for held in model.parameters() if held.dim() == 1]
    matrices = [held for held in model.parameters() if held.dim() > 1]
    groups = [
        {"params": vectors, "name": "vectors", "weight_decay": 0.0},
        {"params": matrices, "name": "matrices", "weight_decay": 0.1},
    ]
    arguments: dict[str, Any] = {"model_parameters": groups}
    if how == "client":
        arguments = {
            "optimizer": torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(groups), lr=2e-3)
        }
    with jobs.job(
        walks.settings("fp32", WALK[0], autoep=False), model, Sequences(48), groups=False, **arguments
    ) as made:
        engine, iterator = made.engine, iter(made.loader)
        batch = next(iterator)
        if engine.generation == 1:
            jobs.one_micro_batch(engine, batch, jobs.Record())
            before = walks.fingerprint(engine)
            engine.switch(Layout(data=4, expert=4, zero_stage=2), at=1)
            next(iterator)
            assert walks.fingerprint(engine) == before
        else:
            walks.fingerprint(engine)
        groups = engine.basic_optimizer.param_groups
        return [{key: group[key] for key in ("name", "weight_decay")} for group in groups]


@pytest.mark.parametrize("how", ["groups", "client"])
def test_lists_of_the_user(pool: RankPool, how: str) -> None:
    """Each group has one behind all for its experts, those of all ranks."""
    decays = [("vectors", 0.0), ("matrices", 0.1), ("ep_size_4", 0.0), ("ep_size_4", 0.1)]
    assert pool.run(listed, how=how) == [[{"name": name, "weight_decay": decay} for name, decay in decays]] * 4


def contradicting() -> str:
    settings = walks.settings("fp32", {"data": 4, "expert": 4, "zero_stage": 1}, autoep=False)
    with pytest.raises(ConfigError) as refusal, jobs.job(settings, build(2), groups=False):
        pass
    return str(refusal.value)


def test_the_model_and_the_block_must_agree(pool: RankPool) -> None:
    """On the expert size of the start."""
    assert "expert is 4 and ep_size of the model's layers is 2" in pool.run(contradicting)[0]
