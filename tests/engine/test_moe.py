"""Native experts change places live: 1 to 4 ranks, stages 0 to 2, against an independent gather and a probe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.space import Layout
from tests.adapters import expert_models as models
from tests.engine import axis_walks, jobs, oracle
from tests.engine.mixtures import native, native_model, places, probe
from tests.engine.models import Sequences
from tests.engine.pool import RankPool


def at(data: int, expert: int, stage: int) -> Layout:
    """A layout."""
    return Layout(data=data, expert=expert, zero_stage=stage)


def trained(size: int) -> list[float]:
    """Losses around switches of a model that was built for so many ranks; its first weights are those of the model."""
    losses, path = list[float](), [at(2, 2, 1), at(4, 4, 2), at(2, 1, 0), at(4, 2, 1)]
    with axis_walks.started(native(size), "fp32", path[0]) as made:
        engine, batches = made.engine, iter(made.loader)
        batch, before = next(batches), None
        if engine.generation == 1:
            values = models.native_values()
            before = oracle.gather(engine, places)
            assert {name for name, _ in before.tensors} == values.keys()
            assert all(torch.equal(before.tensors[name, "weight"], held.flatten()) for name, held in values.items())
        while True:
            number, arrived = engine.generation, oracle.gather(engine, places)
            assert before is None or oracle.differences(before, arrived) == []
            losses.append(axis_walks.one_step(engine, batch))
            if number == len(path):
                break
            before = oracle.gather(engine, places)
            engine.switch(path[number], at=engine.global_steps)
            batch = next(batches)
            before = before if engine.generation == number + 1 else None  # it was idle for a while
    return losses


@pytest.mark.full
def test_a_model_that_is_built_in_parts(pool: RankPool) -> None:
    """Each process has given the experts of its own rank their first values; they go wherever any others go."""
    for losses, others in zip(pool.run(trained, size=2), pool.run(trained, size=1), strict=True):
        assert losses == others


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        ("bf16", [at(2, 2, 1), at(4, 4, 2), at(4, 2, 0), at(2, 1, 0), at(4, 2, 1)]),
        ("bf16 in fp32", [at(2, 2, 1), at(4, 4, 1), at(4, 2, 1)]),
    ],
)
def test_bf16(pool: RankPool, dtype: str, path: list[Layout]) -> None:
    """ZeRO's optimizers from stage to stage; BF16_Optimizer."""
    axis_walks.compare(pool, native, path, dtype)


def refused() -> None:
    """Ask for what cannot be, and go on."""
    with axis_walks.started(native(2), "fp32", at(2, 2, 1)) as made:
        batch = next(iter(made.loader))
        for layout, reason in (
            (at(2, 2, 3), "layers of deepspeed.moe only in ZeRO stages 0 to 2"),
            (at(3, 3, 1), "expert=3 does not divide the 4 experts of 'first'"),
            (
                Layout(data=2, expert=2, zero_stage=1, tensor=2),
                "layers of deepspeed.moe gather tokens of tensor ranks in a way",
            ),
        ):
            with pytest.raises(SwitchRefused) as refusal:
                made.engine.switch(layout)
            assert reason in str(refusal.value), refusal.value
        jobs.one_micro_batch(made.engine, batch, jobs.Record())


def test_stage_3_is_refused(pool: RankPool) -> None:
    """And sizes that do not divide; the job goes on."""
    pool.run(refused)


def keys_of_zero(key: str, start: Layout, target: Layout) -> tuple[str, str, int]:
    """What is said when a switch is asked for, and by `plan`; and the steps that were trained then and afterwards."""
    subject = native(2)
    subject = replace(subject, settings={**subject.settings, "zero_optimization": {key: False}})
    with axis_walks.started(subject, "fp32", start) as made:
        batches = iter(made.loader)
        jobs.one_micro_batch(made.engine, next(batches), jobs.Record())
        with pytest.raises(SwitchRefused) as asked:
            made.engine.switch(target, at=made.engine.global_steps)
        planned = made.engine.plan(target)
        jobs.one_micro_batch(made.engine, next(batches), jobs.Record())
        assert made.engine.last_switch is None
        return str(asked.value), f"{planned.refusal}; {planned.way_out}", made.engine.global_steps
    raise AssertionError("it was let go")


KEYS = [
    ("contiguous_gradients", at(4, 2, 1), at(4, 2, 2), "nearest: data=4 expert=2 zero_stage=1"),
    ("reduce_scatter", at(4, 2, 0), at(4, 2, 1), "nearest: data=4 expert=2 zero_stage=0"),
]


@pytest.mark.parametrize(("key", "start", "target", "way_out"), KEYS, ids=[row[0] for row in KEYS])
def test_what_zero_asserts_of_experts_is_refused_when_asked(
    pool: RankPool, key: str, start: Layout, target: Layout, way_out: str
) -> None:
    """Before: the switch was tried, training stood still, and it was rolled back."""
    for asked, planned, steps in pool.run(keys_of_zero, key=key, start=start, target=target):
        assert f"zero_optimization.{key}" in asked and way_out in asked
        assert f"zero_optimization.{key}" in planned and way_out in planned
        assert steps == 2


def uneven(drop_tokens: bool) -> str:
    """Ten samples over four ranks."""
    settings = {**axis_walks.configured(native(2), "fp32", at(2, 2, 1)), "train_batch_size": 10}
    model = native_model(2)
    for layer in (model.first, model.second):
        layer.deepspeed_moe.gate.drop_tokens = drop_tokens
    with jobs.job(settings, model, Sequences(40), groups=False) as made:
        iterator = iter(made.loader)
        batch = next(iterator)
        if made.engine.generation == 1:
            jobs.one_micro_batch(made.engine, batch, jobs.Record())
            try:
                made.engine.switch(at(4, 2, 1), at=1)
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
    model = native_model(2)
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
    settings = axis_walks.configured(native(2), "fp32", at(2, 2, 1))
    with jobs.job(settings, model, Sequences(48), groups=False, **arguments) as made:
        engine, iterator = made.engine, iter(made.loader)
        batch = next(iterator)
        if engine.generation == 1:
            jobs.one_micro_batch(engine, batch, jobs.Record())
            before, answer = oracle.gather(engine, places), probe(engine)
            engine.switch(at(4, 4, 2), at=1)
            next(iterator)
            assert oracle.differences(before, oracle.gather(engine, places)) == [] and probe(engine) == answer
        else:
            oracle.gather(engine, places), probe(engine)
        groups = engine.basic_optimizer.param_groups
        return [{key: group[key] for key in ("name", "weight_decay")} for group in groups]


@pytest.mark.parametrize("how", ["groups", pytest.param("client", marks=pytest.mark.full)])
def test_lists_of_the_user(pool: RankPool, how: str) -> None:
    """Each group has one behind all for its experts, those of all ranks."""
    decays = [("vectors", 0.0), ("matrices", 0.1), ("ep_size_4", 0.0), ("ep_size_4", 0.1)]
    assert pool.run(listed, how=how) == [[{"name": name, "weight_decay": decay} for name, decay in decays]] * 4


def contradicting() -> str:
    with pytest.raises(ConfigError) as refusal, axis_walks.started(native(2), "fp32", at(4, 4, 1)):
        pass
    return str(refusal.value)


def test_the_model_and_the_block_must_agree(pool: RankPool) -> None:
    """On the expert size of the start."""
    assert "expert is 4 and ep_size of the model's layers is 2" in pool.run(contradicting)[0]
