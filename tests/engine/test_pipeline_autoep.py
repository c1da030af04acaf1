"""AutoEP in a `PipelineModule`: stages, data and expert sizes change live, in living ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynatrain.adapters.model.stage_module import PipelineShaper
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, pipelines
from tests.engine.models import Sequences
from tests.engine.pipelined_experts import AUTOEP, TITLES, WALKS, Mixture, at, autoep, mixture, model
from tests.engine.pool import RankPool


@pytest.mark.parametrize("title", TITLES)
def test_walks(pool: RankPool, title: str) -> None:
    axis_walks.compare(pool, autoep, WALKS[title])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "bf16 in fp32"])
@pytest.mark.parametrize("title", list(WALKS)[:2])
def test_walks_in_16_bits(pool: RankPool, title: str, dtype: str) -> None:
    """A token may go to another expert where two scores are equal up to rounding."""
    axis_walks.compare(pool, autoep, WALKS[title], dtype, furthest=2e-2)


# ---- in one layout --------------------------------------------------------------------------------------------------


def trained(layout: Layout, stages: int = 1, targets: Sequence[Layout] = (), steps: int = 4) -> list[float]:
    """Losses of a job of several micro-batches a step.

    stages: that the user built with. targets: where it goes, one after each step.
    """
    given = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.1, "expert_parallel": AUTOEP}
    settings = axis_walks.configured(replace(autoep(), settings=given), "fp32", layout)
    losses: list[float] = []
    with jobs.job(settings, mixture(stages), Sequences(96), groups=False) as made:
        engine = made.engine
        while engine.idle or engine.global_steps < steps:
            number = engine.generation - 1
            if not engine.idle and number < len(targets) and engine.global_steps == number + 1:
                engine.switch(targets[number], at=engine.global_steps)
            losses.append(engine.train_batch().item())
    return losses


def furthest(seen: Sequence[list[float] | None], expected: list[float]) -> float:
    return max(jobs.furthest(losses, expected) for losses in seen if losses)


@pytest.mark.full
def test_every_layout_computes_the_same(pool: RankPool) -> None:
    """Also from a module that was built in stages, of which a process has the values of its own layers."""
    expected = pool.run(trained, layout=at(1, 1, 1, 0))[0]
    for layout, stages in ((at(2, 2, 2, 0), 1), (at(2, 2, 2), 2), (at(4, 1), 4)):
        assert furthest(pool.run(trained, layout=layout, stages=stages), expected) <= 1e-6, layout
    walked = pool.run(trained, layout=at(2, 2, 2), stages=2, targets=[at(4, 1), at(1, 4, 2)])
    assert furthest(walked, expected) <= 1e-6


# ---- what is refused ------------------------------------------------------------------------------------------------


def shaper(made: Any, **block: Any) -> PipelineShaper:
    return PipelineShaper(made, {"expert_parallel": {**AUTOEP, **block}})


def errors() -> None:
    """Sizes that do not divide, names that nothing has, experts of two kinds, and such as two stages would share."""
    with pytest.raises(LayoutError, match=r"expert=3 does not divide the 4 experts of '1\.mlp'.*expert=2, expert=4"):
        shaper(mixture()).cuts(at(2, 3, 3))
    with pytest.raises(ConfigError, match=r"^expert_parallel: AutoEP: no MoE layers detected"):
        shaper(mixture(), moe_layer_pattern=r"\d+\.feed")
    with pytest.raises(UnsupportedError, match=r"'1\.feed' is a layer of deepspeed\.moe, and expert_parallel is on"):
        shaper(model())
    tied = [TiedLayerSpec("both", Mixture, 4), LayerSpec(nn.Linear, pipelines.WIDTH, pipelines.WIDTH)]
    with pytest.raises(UnsupportedError, match=r"tied_modules\.both has experts"):
        shaper(
            PipelineModule([*tied, tied[0]], num_stages=1, loss_fn=pipelines.loss),
            moe_layer_pattern=r"tied_modules\.both\.mlp",
        )


def refused_later() -> None:
    """A running job says no, and goes on."""
    settings = axis_walks.configured(autoep(), "fp32", at(2, 2, 2))
    with jobs.job(settings, mixture(), Sequences(96), groups=False) as made:
        made.engine.train_batch()
        for changes, words in (
            ({"zero_stage": 2}, "pipelines only in ZeRO stages 0 and 1"),
            ({"tensor": 2, "data": 1, "expert": 1}, "no tensor axis"),
            ({"pipe": 1, "data": 3, "expert": 3}, "expert=3 does not divide the 4 experts of '1.mlp'"),
        ):
            with pytest.raises(SwitchRefused, match=re.escape(words)):
                made.engine.switch(**changes)
        made.engine.train_batch()


def test_what_cannot_be_is_refused(pool: RankPool) -> None:
    pool.run(errors)
    pool.run(refused_later)


def whole_layers() -> axis_walks.Subject:
    """A layer of the pipeline that is one of experts altogether: AutoEP takes its very place."""
    return replace(autoep(moe_layer_pattern=r"[13]"), build=bare)


def bare() -> PipelineModule:
    made = mixture()
    specs = list(made._layer_specs)
    for number in (1, 3):
        specs[number] = getattr(made, str(number)).mlp
    return PipelineModule(specs, num_stages=1, loss_fn=pipelines.loss, partition_method="uniform")


@pytest.mark.full
def test_layers_of_experts_alone(pool: RankPool) -> None:
    axis_walks.compare(pool, whole_layers, [at(2, 2, 2), at(1, 2, 2), at(2, 1), at(2, 2, 2)])
