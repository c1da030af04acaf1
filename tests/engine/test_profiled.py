"""`pipeline.partition: "profile"`: stages begin where a profile says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as td

from ds_dynatrain.balance.profile import LayerCost, Profile
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import Layout
from tests.engine import jobs, pipeline_walks
from tests.engine.pipelines import pipeline
from tests.engine.pool import RankPool

FIRST_IS_SLOW = (8.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0)
"""Of the layers of "tied"; by parameters two stages begin at 0 and 3."""


def profile_of(seconds: tuple[float, ...]) -> Profile:
    layers = [
        LayerCost(name=f"{place}", forward_seconds=each, backward_seconds=2 * each, kind_bytes={"weight": 0})
        for place, each in enumerate(seconds)
    ]
    return Profile(layers=tuple(layers), train_batch_size=12, micro_batch_size=3)


def settings(file: str | None) -> dict[str, Any]:
    given = pipeline_walks.settings(Layout(pipe=2, data=2, zero_stage=1), pipeline={"partition": "profile"})
    given["dynatrain"] |= {"balance": {"mode": "off", "profile": file}} if file else {}
    return given


def started(file: str, stages: int) -> tuple[list[Any], list[float]]:
    """Where stages begin, and after each change of their number; losses."""
    cuts, losses = [], []
    with jobs.job(settings(file), pipeline("tied", stages)) as made:
        engine = made.engine
        for layout in (Layout(pipe=2, data=2, zero_stage=1), Layout(pipe=4, data=1, zero_stage=1)):
            if layout != engine.layout:
                engine.switch(layout, at=engine.global_steps)
            losses += [engine.train_batch().item() for _ in range(2)]
            cuts.append(tuple(map(int, engine.module.parts)))
    return cuts, losses


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_stages_begin_where_a_profile_says(pool: RankPool, tmp_path: Path, stages: int) -> None:
    """Also where the script has built the module in as many stages, with other boundaries."""
    profile_of(FIRST_IS_SLOW).save(tmp_path / "profile.json")
    for cuts, losses in pool.run(started, file=str(tmp_path / "profile.json"), stages=stages):
        assert cuts == [(0, 1, 7), (0, 1, 2, 4, 7)] and losses[-1] < losses[0]


def refused(file: str | None) -> str:
    with pytest.raises(ConfigError) as caught, jobs.job(settings(file), pipeline("tied")):
        pass
    return str(caught.value)


def refused_on_one(file: str, other: str) -> str:
    return refused(other if td.get_rank() == 2 else file)


def test_what_no_stage_can_begin_by(pool: RankPool, tmp_path: Path) -> None:
    profile_of(FIRST_IS_SLOW).save(tmp_path / "profile.json")
    profile_of(FIRST_IS_SLOW[:-1]).save(tmp_path / "short")
    cannot = {
        None: 'pipeline.partition "profile" cuts stages by a profile',
        str(tmp_path / "missing"): "No such file",
        str(tmp_path / "short"): "is of another model: it has 6 layers, and this one has 7",
    }
    for file, words in cannot.items():
        for said in pool.run(refused, file=file):
            assert words in said
    for said in pool.run(refused_on_one, file=str(tmp_path / "profile.json"), other=str(tmp_path / "short")):
        assert "has other layers here than on member" in said
