"""Balance moves a boundary of models of every kind, and losses are those of the same run without it, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from tests.engine import jobs, pipelined_experts, pipelines
from tests.engine.clocks import STEP, clock
from tests.engine.pipeline_walks import layout, settings
from tests.engine.pool import RankPool
from tools.burning import Burn, burn

SECONDS = 0.008
"""Of each of two layers, forward, as the clock is told; all others take next to nothing."""
STEPS = 12


class Heavy(nn.Module):
    """A layer that takes its time and hands on what it is given."""

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        burn(SECONDS)
        made: torch.Tensor = Burn.apply(hidden, 2 * SECONDS, [])  # type: ignore[no-untyped-call]
        return made


def heavy_in_front(made: Callable[[], PipelineModule]) -> PipelineModule:
    """The layers of a model with two heavy ones behind the first, and weights that follow from their names."""
    whole = made()
    first, *others = whole._layer_specs
    model = PipelineModule([first, Heavy(), Heavy(), *others], num_stages=1, loss_fn=whole.loss_fn)
    for name, held in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        held.data = torch.randn(held.shape, generator=generator) * 0.2
    return model


TIED = partial(pipelines.pipeline, "tied")
RECOMPUTED = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
AUTOEP = {"expert_parallel": pipelined_experts.AUTOEP}
KINDS: Mapping[str, tuple[Callable[[], PipelineModule], str, int, int, dict[str, Any]]] = {
    "tied embeddings": (TIED, "fp32", 1, 1, {}),
    "ZeRO 0": (TIED, "fp32", 0, 1, {}),
    "bf16": (TIED, "bf16", 1, 1, {}),
    "bf16 in fp32": (TIED, "bf16 in fp32", 1, 1, {}),
    "bf16, ZeRO 0": (TIED, "bf16", 0, 1, {}),
    "fp16": (TIED, "fp16", 1, 1, {}),
    "recomputed activations": (TIED, "fp32", 1, 1, RECOMPUTED),
    "compiled layers": (TIED, "fp32", 1, 1, {}),
    "experts": (pipelined_experts.model, "fp32", 1, 2, {}),
    "experts, ZeRO 0": (pipelined_experts.model, "fp32", 0, 2, {}),
    "AutoEP": (pipelined_experts.mixture, "fp32", 1, 2, AUTOEP),
}
"""How a model is made, its type, ZeRO stage and expert size, and what its configuration has besides."""
EVEN, BETTER = (0, 5, 9), (0, 2, 9)


def balanced(kind: str, acts: bool) -> tuple[list[float], list[Any]]:
    """Losses, and the events of switches."""
    made, dtype, stage, size, more = KINDS[kind]
    given = settings(layout(2, 2, stage, EVEN).replace(expert=size), dtype, **more)
    if acts:
        given["dynatrain"]["balance"] = {"mode": "act", "every_steps": 4, "safety": 0.0}
    model, events, engines = heavy_in_front(made), list[Any](), list[Any]()
    groups = {"model_parameters": pipelined_experts.groups(model)} if size > 1 else {}

    def step_seconds() -> float:
        return 0.6 * STEP if engines[0].layout.boundaries == BETTER else STEP

    with clock(True, step_seconds), jobs.job(given, model, **groups) as job:
        engines.append(job.engine)
        job.engine.on_switch(events.append)
        if kind.startswith("compiled"):
            job.engine.compile(backend="eager")
        return [job.engine.train_batch().item() for _ in range(STEPS)], events


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_boundary_moves_and_losses_stay(pool: RankPool, kind: str) -> None:
    found = pool.run(balanced, kind=kind, acts=True, seconds=120)
    for losses, events in found:
        assert losses == found[0][0] and len(set(losses)) == STEPS
        assert events[0].cause == "balance" and tuple(events[0].target.layout["boundaries"]) == BETTER
        assert all(event.outcome == "committed" for event in events)
    assert pool.run(balanced, kind=kind, acts=False, seconds=120)[0] == (found[0][0], [])
