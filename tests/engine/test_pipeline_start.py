"""A `PipelineModule` that was built in stages, as DeepSpeed's own scripts build it: only the call is another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as td
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import groups
from torch import nn
from torch.distributed import distributed_c10d as c10d

import ds_dynatrain
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import Layout
from tests.engine import jobs, oracle
from tests.engine.models import Block, decay_groups
from tests.engine.pipeline_walks import micro_batches
from tests.engine.pipelines import WIDTH, Wide, Words, double, logits, loss
from tests.engine.pool import RankPool

STEPS = 4


class Drawn(nn.Module):
    """A layer with a buffer that its constructor draws: every process draws another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.randn(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mask.to(hidden.dtype) * 0.1


def layers() -> list[Any]:
    """Of every kind: tied, built late, built already, a function; a part is frozen by `built`."""
    return [
        TiedLayerSpec("words", Words, WIDTH),
        LayerSpec(Block, WIDTH, 21, 0.0),
        double,
        Block(WIDTH, 9, 0.0),
        LayerSpec(Drawn),
        LayerSpec(Wide, WIDTH),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", Words, WIDTH, forward_fn=logits),
    ]


def built(stages: int, method: str = "parameters") -> PipelineModule:
    """Drawn as a script draws it: each stage other values, from the seed that all processes have."""
    torch.manual_seed(11)
    module = PipelineModule(layers(), num_stages=stages, loss_fn=loss, partition_method=method)
    for name, held in module.named_parameters():
        if "norm.bias" in name:
            held.requires_grad = False  # of the layers that are here
    return module


def settings(stage: int = 1, **more: Any) -> dict[str, Any]:
    """Without a `dynatrain` block: what both calls take."""
    made = jobs.config(train_micro_batch_size_per_gpu=3, **more)
    del made["dynatrain"]
    if stage == 0:
        made["gradient_clipping"] = 0.0  # there DeepSpeed clips by the norm of the first stage
    return {**made, "zero_optimization": {"stage": stage}}


def stock(stages: int, stage: int, method: str) -> list[float]:
    """DeepSpeed itself."""
    model, data = built(stages, method), td.get_world_size() // stages
    given = {**settings(stage), "gradient_accumulation_steps": 12 // 3 // data}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=decay_groups(model), config=given)
    index = engine.grid.get_data_parallel_id()
    found = [engine.train_batch(micro_batches(step, data, index)).item() for step in range(STEPS)]
    engine.destroy()
    groups._release_process_group_references()
    return found


def ours(stages: int, stage: int, method: str, path: Sequence[Layout] = (), steps: int = STEPS) -> list[float]:
    """The same script with the other call; after its steps it goes on through other layouts."""
    held = len(c10d._world.pg_map)
    model = built(stages, method)
    parts = tuple(map(int, model.parts))
    with jobs.job({**settings(stage), "dynatrain": {"timeout_seconds": 20}}, model) as made:
        engine = made.engine
        assert engine.layout == Layout(pipe=stages, data=td.get_world_size() // stages, zero_stage=stage)
        assert tuple(engine.module.parts) == parts
        found = []
        for target in (None, *path):
            if target is not None:
                before = oracle.gather(engine)
                engine.switch(target, at=engine.global_steps)
                engine.boundary()
                assert engine.last_switch.outcome == "committed", engine.last_switch.reason
                assert oracle.differences(before, oracle.gather(engine)) == []
            DeepSpeedConfig(engine.config)  # what deepspeed.checkpointing.configure makes of it
            for _ in range(steps):
                samples = micro_batches(engine.global_steps, engine.data, engine.data_rank)
                found.append(engine.train_batch(samples).item())
        assert engine.layout.pipe != stages or tuple(engine.module.parts) == parts
    assert len(c10d._world.pg_map) == held, "the groups that the constructor made are gone"
    return found


@pytest.mark.full
@pytest.mark.parametrize(("stages", "stage", "method"), [(2, 1, "uniform"), (4, 0, "parameters")])
def test_only_the_call_is_another_one(pool: RankPool, stages: int, stage: int, method: str) -> None:
    given = {"stages": stages, "stage": stage, "method": method}
    path = [Layout(pipe=pipe, data=4 // pipe, zero_stage=1) for pipe in (4, 1, 2)]
    expected = pool.run(stock, **given)[0]
    found = pool.run(ours, **given, path=path, seconds=120)
    assert all(losses == found[0] for losses in found)
    assert jobs.furthest(found[0][:STEPS], expected) < 5e-7
    static = pool.run(ours, **given, steps=STEPS * (1 + len(path)))[0]
    assert jobs.furthest(found[0], static) < 1e-6


def optimizers_of_their_own(idle: bool) -> list[float]:
    """An optimizer over the parameters of a stage, and members that have built a stage that others train."""
    model = built(2)
    optimizer = torch.optim.AdamW([held for held in model.parameters() if held.requires_grad], lr=2e-3)
    given = {key: value for key, value in settings().items() if key != "optimizer"}
    start = {"data": 1} if idle else {"data": 2, "pipe": 2}
    block = {"dynatrain": {"layout": start, "timeout_seconds": 20}}
    with jobs.job({**given, **block}, model, optimizer=optimizer) as made:
        engine, found = made.engine, []
        if idle and not engine.idle:
            assert engine.layout == Layout(pipe=2, data=1, zero_stage=1)
            found = [engine.train_batch().item() for _ in range(STEPS)]
            engine.switch(pipe=4, at=STEPS)
        engine.boundary()
        steps = range(STEPS) if idle else range(2 * STEPS)
        return [*found, *(engine.train_batch().item() for _ in steps)]


@pytest.mark.full
def test_members_that_start_idle(pool: RankPool) -> None:
    expected = pool.run(optimizers_of_their_own, idle=False)[0]
    found = pool.run(optimizers_of_their_own, idle=True)
    assert jobs.furthest(found[0], expected) < 1e-6 and found[3] == found[0][STEPS:]


def first_stage_frozen(moves: bool) -> list[float]:
    """The process of the first stage has nothing to train, and lists nothing; then boundaries move."""
    model = built(2, "uniform")
    for name, held in model.named_parameters():
        held.requires_grad_(held.requires_grad and name.startswith(("5.", "6.")))
    listed = [held for held in model.parameters() if held.requires_grad]
    optimizer = torch.optim.AdamW([{"params": listed}], lr=2e-3)
    given = {key: value for key, value in settings().items() if key != "optimizer"}
    start = {"data": 2, "pipe": 2, "boundaries": [0, 4, 8]}
    with jobs.job({**given, "dynatrain": {"layout": start}}, model, optimizer=optimizer) as made:
        found = [made.engine.train_batch().item() for _ in range(STEPS)]
        if moves:
            made.engine.switch(boundaries=(0, 2, 8), at=STEPS)
        return [*found, *(made.engine.train_batch().item() for _ in range(STEPS))]


@pytest.mark.full
def test_a_first_stage_without_anything_to_train(pool: RankPool) -> None:
    found = pool.run(first_stage_frozen, moves=True)
    assert all(losses == found[0] for losses in found) and len(set(found[0])) == 2 * STEPS
    expected = pool.run(first_stage_frozen, moves=False)
    assert jobs.furthest(found[0], expected[0]) < 1e-6


def refused() -> None:
    """What does not fit is said on every process."""
    model = built(1)
    next(model.parameters()).requires_grad_(td.get_rank() != 1)
    with pytest.raises(ConfigError, match=r"parameter 0 .* on member 1 \(name, shape, type, form, requires_grad\)"):
        ds_dynatrain.initialize(
            model=model,
            model_parameters=decay_groups(model),
            config={**settings(), "dynatrain": {"layout": {"data": 4}}},
        )
    cannot: list[tuple[dict[str, Any], Any, str]] = [
        ({"data": 1, "pipe": 4}, decay_groups, r"layout\.pipe is 4 and .* num_stages is 2; leave dynatrain"),
        ({"data": 4}, decay_groups, "needs 8 processes and this launch has 4"),
        ({"data": 2}, lambda model: decay_groups(model)[: 1 + model.stage_id], "2 optimizer groups on member 2 and 1"),
        (
            {"data": 2},
            lambda model: decay_groups(model)[:: 1 - 2 * model.stage_id],
            r"'tied_modules\.words\.weight' is in optimizer group 1 on member 2 and in group 0 on another",
        ),
    ]
    for layout, listed, words in cannot:
        model = built(2)
        with pytest.raises(ConfigError, match=words):
            ds_dynatrain.initialize(
                model=model, model_parameters=listed(model), config={**settings(), "dynatrain": {"layout": layout}}
            )


def test_what_does_not_fit_is_said(pool: RankPool) -> None:
    pool.run(refused)
