"""Layers of `deepspeed.moe` in a `PipelineModule`: stages, data and expert sizes change live, in living ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as td
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ds_dynatrain.adapters.model.pipeline_layers import PipelineTemplate
from ds_dynatrain.adapters.model.stage_module import PipelineShaper
from ds_dynatrain.errors import LayoutError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs, pipelines
from tests.engine.models import Sequences
from tests.engine.pipelined_experts import TITLES, WALKS, at, model, subject, whole_name
from tests.engine.pool import RankPool


@pytest.mark.parametrize("title", TITLES)
def test_walks(pool: RankPool, title: str) -> None:
    axis_walks.compare(pool, subject, WALKS[title])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "bf16 in fp32"])
@pytest.mark.parametrize("title", list(WALKS)[:2])
def test_walks_in_16_bits(pool: RankPool, title: str, dtype: str) -> None:
    """A token may go to another expert where two scores are equal up to rounding."""
    axis_walks.compare(pool, subject, WALKS[title], dtype, furthest=2e-2)


def frozen_first(path: Sequence[Layout]) -> list[float]:
    """Layers with experts in a first stage that has nothing to train, also where it shares experts."""
    given = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.1}
    settings = axis_walks.configured(replace(subject(), settings=given), "fp32", path[0])
    made = model()
    for name, held in made.named_parameters():
        held.requires_grad_(held.requires_grad and not name.startswith(("tied_modules.", "1.", "2.")))
    losses: list[float] = []
    with jobs.job(settings, made, Sequences(96), groups=False) as job:
        for number, target in enumerate(path):
            if number:
                job.engine.switch(target, at=job.engine.global_steps)
            losses += [job.engine.train_batch().item() for _ in range(2)]
        assert job.engine.layout == path[-1]
    return losses


@pytest.mark.full
def test_experts_before_the_first_trained_layer(pool: RankPool) -> None:
    path = [at(2, 2, 2), at(4, 1), at(2, 2), at(2, 2, 2, 0), at(4, 1, 1, 0)]
    expected = pool.run(frozen_first, path=[at(1, 4)] * len(path))[0]
    assert furthest(pool.run(frozen_first, path=path), expected) <= 1e-6


# ---- in one layout --------------------------------------------------------------------------------------------------


def trained(layout: Layout, size: int = 1, stages: int = 1, steps: int = 4) -> list[float]:
    """Losses of a job that stays in a layout, in micro-batches of 3; size, stages: that the user built with."""
    given = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.1}
    settings = axis_walks.configured(replace(subject(), settings=given), "fp32", layout)
    losses: list[float] = []
    with jobs.job(settings, model(size, td.get_rank() % size, stages), Sequences(96), groups=False) as made:
        while made.engine.idle or made.engine.global_steps < steps:
            losses.append(made.engine.train_batch().item())
    return losses


def furthest(seen: Sequence[list[float] | None], expected: list[float]) -> float:
    return max(jobs.furthest(losses, expected) for losses in seen if losses)


@pytest.mark.full
def test_every_layout_computes_the_same(pool: RankPool) -> None:
    """Several micro-batches a step; also from a model that was built for two ranks' experts, or in stages, or both."""
    expected = pool.run(trained, layout=at(1, 1, 1, 0))[0]
    for layout, size, stages in ((at(2, 2, 2, 0), 1, 1), (at(2, 2, 2), 2, 1), (at(2, 2, 2), 2, 2), (at(4, 1), 1, 4)):
        assert furthest(pool.run(trained, layout=layout, size=size, stages=stages), expected) <= 1e-6, layout


# ---- what is refused ------------------------------------------------------------------------------------------------


def errors() -> None:
    """Sizes that do not divide, and experts that two stages would share."""
    shaper = PipelineShaper(model(), {})
    with pytest.raises(LayoutError, match=r"expert=3 does not divide the 4 experts of '1\.feed'.*expert=2, expert=4"):
        shaper.cuts(at(2, 3, 3))
    dense = PipelineShaper(pipelines.pipeline("tied"), {})
    with pytest.raises(LayoutError, match="expert=2: the model has no experts"):
        dense.cuts(at(2, 2, 2))
    tied = [TiedLayerSpec("both", pipelines.RoutedBlock, 4, 1), LayerSpec(nn.Linear, pipelines.WIDTH, pipelines.WIDTH)]
    with pytest.raises(UnsupportedError, match=r"tied_modules\.both has experts"):
        PipelineTemplate.of(PipelineModule([*tied, tied[0]], num_stages=1, loss_fn=pipelines.loss))


def refused_later() -> None:
    """A running job says no, and goes on."""
    settings = axis_walks.configured(subject(), "fp32", at(2, 2, 2))
    with jobs.job(settings, model(), Sequences(96), groups=False) as made:
        made.engine.train_batch()
        for changes, words in (
            ({"zero_stage": 2}, "pipelines only in ZeRO stages 0 and 1"),
            ({"tensor": 2, "data": 1, "expert": 1}, "no tensor axis"),
            ({"pipe": 1, "data": 3, "expert": 3}, "expert=3 does not divide the 4 experts of '1.feed'"),
        ):
            with pytest.raises(SwitchRefused, match=re.escape(words)):
                made.engine.switch(**changes)
        made.engine.train_batch()


def test_what_cannot_be_is_refused(pool: RankPool) -> None:
    pool.run(errors)
    pool.run(refused_later)


# ---- prediction -----------------------------------------------------------------------------------------------------


def predicted_and_real() -> None:
    """The experts of a stage, and its first and last layer, are those of a module that DeepSpeed cut."""
    layout = at(2, 2, 2)
    template = PipelineShaper(model(), {}).template
    real = PipelineModule(pipelines.routed(2), num_stages=2, loss_fn=pipelines.loss)
    assert template.boundaries(layout) == tuple(real.parts)
    index = real._grid.data_parallel_id % 2
    held = {name for name, stages in template.stages(layout).items() if real.stage_id in stages}
    mine = {whole_name(name, 2, index) for name, _ in real.named_parameters()}
    every = {whole_name(name, 2, other) for name, _ in real.named_parameters() for other in range(2)}
    assert mine <= held == every


def test_stages_are_those_of_a_real_module(pool: RankPool) -> None:
    pool.run(predicted_and_real)
