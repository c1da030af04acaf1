"""Pipelines in low precision, and what DeepSpeed makes of stage 0 there."""

from __future__ import annotations

import pytest

from ds_dynatrain.errors import ConfigError
from tests.engine import jobs
from tests.engine.pipeline_walks import STEPS, Path, job, layout, settings, walk, whole
from tests.engine.pool import RankPool

WALKS: dict[str, tuple[str, str, Path]] = {
    "bf16 without ZeRO": (
        "inner tie",
        "bf16",
        [layout(2, 2, 0), layout(4, 1, 0), layout(2, 1), layout(3, 1, 0), layout(1, 4)],
    ),
}


@pytest.mark.parametrize("title", WALKS)
def test_walks(pool: RankPool, title: str) -> None:
    name, dtype, path = WALKS[title]
    given = {"name": name, "dtype": dtype}
    found = pool.run(walk, path=path, **given, seconds=120)
    expected = pool.run(walk, path=[layout(1, 1, path[0].zero_stage)], **given, steps=STEPS * len(path))
    losses = whole(found)
    assert len(losses) == STEPS * len(path)
    assert jobs.furthest(losses, whole(expected)) < 2e-3
    assert {number for rank in found if rank for number in rank.compared} == set(range(1, len(path)))


def refused() -> None:
    """The optimizer of stage 0 is not ZeRO's."""
    given = settings(layout(2, 1, 0), "bf16")
    given["zero_optimization"]["round_robin_gradients"] = True
    with pytest.raises(ConfigError, match=r"round_robin_gradients in data=1 pipe=2 zero_stage=0.*take zero_stage=1"):
        with job(given, "tied"):
            pass


def test_what_does_not_go_together(pool: RankPool) -> None:
    pool.run(refused)
