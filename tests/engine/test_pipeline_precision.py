"""Pipelines in low precision or with CPU offload, and what DeepSpeed makes of stage 0 there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ds_dynatrain.errors import ConfigError
from tests.engine import jobs
from tests.engine.axis_walks import compare
from tests.engine.pipeline_walks import STEPS, Path, job, layout, settings, walk, whole
from tests.engine.pool import RankPool
from tests.engine.subjects import pipelined

AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
OFFLOAD: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
ROUND: Path = [layout(2, 2), layout(4, 1), layout(3, 1), layout(1, 4)]
WALKS: dict[str, tuple[str, dict[str, Any], Path]] = {
    "bf16 without ZeRO": (
        "bf16",
        {},
        [layout(2, 2, 0), layout(4, 1, 0), layout(2, 1), layout(2, 2, 0), layout(3, 1, 0), layout(1, 4)],
    ),
    "fp16": ("fp16", {}, [*ROUND, layout(1, 2, 0), layout(2, 2)]),
    "fp16 of one scale": ("static fp16", {}, ROUND),
    "autocast": ("fp32", AUTOCAST, [*ROUND, layout(2, 2, 0), layout(3, 1)]),
    "offload": ("fp32", OFFLOAD, ROUND),
    "offload in bf16": ("bf16", OFFLOAD, ROUND),
}


@pytest.mark.full
@pytest.mark.parametrize("title", WALKS)
def test_walks(pool: RankPool, title: str) -> None:
    """A model with groups of which a stage has nothing."""
    dtype, more, path = WALKS[title]
    given = {"name": "inner tie", "dtype": dtype, "more": more}
    found = pool.run(walk, path=path, **given, seconds=120)
    expected = pool.run(walk, path=[layout(1, 1, path[0].zero_stage)], **given, steps=STEPS * len(path))
    losses = whole(found)
    assert len(losses) == STEPS * len(path)
    assert jobs.furthest(losses, whole(expected)) < (1e-6 if title == "offload" else 2e-3)
    assert {number for rank in found if rank for number in rank.compared} == set(range(1, len(path)))


@pytest.mark.full
def test_autocast_as_where_it_was_started(pool: RankPool) -> None:
    """Of three stages the one in the middle receives fp32 and sends bf16; ranks add gradients up in bf16."""
    find = partial(pipelined, "inner tie", **AUTOCAST)
    compare(pool, find, [layout(3, 1), layout(1, 4), layout(2, 2), layout(3, 1), layout(2, 2, 0), layout(4, 1)])


def refused() -> None:
    """The optimizers of stage 0 are not ZeRO's."""
    ordered = settings(layout(2, 1, 0), "bf16")
    ordered["zero_optimization"]["round_robin_gradients"] = True
    cannot = [
        (ordered, r"round_robin_gradients in data=1 pipe=2 zero_stage=0.*use zero_stage=1"),
        (
            settings(layout(2, 1, 0), "fp16"),
            r"a PipelineModule in fp16 in data=1 pipe=2 zero_stage=0: .*norm of only the first stage",
        ),
    ]
    for given, words in cannot:
        with pytest.raises(ConfigError, match=words), job(given, "tied"):
            pass


def test_what_does_not_go_together(pool: RankPool) -> None:
    pool.run(refused)


def compiled(backend: str | None) -> list[float]:
    """Losses through changes of stages; with a backend, every layer runs code that dynamo has compiled."""
    losses, traced = [], list[int]()
    torch._dynamo.reset()

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.append(1)
        return graph.forward

    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        if backend is not None:
            engine.compile(backend=counting)
        engine.boundary()
        for target in (None, layout(4, 1), layout(1, 4)):
            if target is not None:
                engine.switch(target, at=engine.global_steps)
                engine.boundary()
            before = len(traced)
            losses += [engine.train_batch().item() for _ in range(2)]
            assert (len(traced) > before) == (backend is not None)
    torch._dynamo.reset()
    return losses


@pytest.mark.full
def test_compiled_layers(pool: RankPool) -> None:
    """DeepSpeed compiles layer by layer; layers that a switch makes anew are compiled, too."""
    expected, found = (pool.run(compiled, backend=backend, seconds=120) for backend in (None, "counting"))
    assert found[0] == expected[0]
