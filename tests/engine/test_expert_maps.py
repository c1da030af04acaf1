"""Maps of experts under AutoEP: every expert on the rank that the layout names, at every stage, live."""

from __future__ import annotations

import importlib.util
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import constants

from ds_dynatrain.adapters.model.auto_ep import ToPlaces
from ds_dynatrain.space import ExpertMap, Layout
from tests.engine import axis_walks
from tests.engine.mixtures import autoep
from tests.engine.models import LENGTH, WORDS
from tests.engine.pool import RankPool

if importlib.util.find_spec("transformers") is None:
    pytest.skip("AutoEP converts models of transformers'", allow_module_level=True)

CROSSED: ExpertMap = (((0, 3), (2, 1)), ((2, 1), (0, 3)))
SWAPPED: ExpertMap = (((1, 3), (2, 0)), ((2, 1), (0, 3)))
SPREAD: ExpertMap = (((2,), (0,), (1,), (3,)), ((0,), (3,), (2,), (1,)))


def at(data: int, expert: int, stage: int, experts: ExpertMap | None = None, **sizes: int) -> Layout:
    """A layout."""
    return Layout(data=data, expert=expert, zero_stage=stage, experts=experts, **sizes)


QUICK = [
    at(4, 2, 2),
    at(4, 2, 2, CROSSED),
    at(4, 2, 3, SWAPPED),
    at(2, 2, 0, CROSSED),
    at(4, 4, 1, SPREAD),
    at(4, 1, 1),
]


def test_any_map_at_any_stage(pool: RankPool) -> None:
    """To maps, from one to another, with other sizes at once, and back to order."""
    axis_walks.compare(pool, partial(autoep, "mixtral"), QUICK)


# ---- counters and records -------------------------------------------------------------------------------------------


def layers_of(engine: Any) -> list[Any]:
    """AutoEP's layers."""
    return [part for part in engine.module.modules() if hasattr(part, "tokens_per_expert")]


def counted(engine: Any) -> torch.Tensor:
    """Tokens per layer and expert of one batch, as the layers count them."""
    before = [part.tokens_per_expert.clone() for part in layers_of(engine)]
    tokens = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(3)).to(engine.device)
    with torch.no_grad():
        engine.module(tokens, tokens.roll(1, 1))
    return torch.stack([part.tokens_per_expert - was for part, was in zip(layers_of(engine), before, strict=True)])


def chained() -> None:
    """Switch among maps; counts are of experts, DeepSpeed's records say who has whom, and no hook is left."""
    with axis_walks.started(autoep(), "fp32", at(4, 2, 1)) as made:
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)
        for experts in (CROSSED, SWAPPED, [[[0, 1], [2, 3]], [[2, 0], [1, 3]]], [[[0, 1], [2, 3]]] * 2):
            axis_walks.one_step(engine, batch)
            expected, kept = counted(engine), [part.tokens_per_expert.clone() for part in layers_of(engine)]
            assert expected.sum() > 0
            engine.switch(experts=experts, at=engine.global_steps)
            batch = next(batches)
            assert engine.last_switch.outcome == "committed", engine.last_switch.reason
            assert all(map(torch.equal, kept, (part.tokens_per_expert for part in layers_of(engine))))
            assert torch.equal(counted(engine), expected)
            for part, rows in zip(layers_of(engine), experts, strict=True):
                placement = part.expert_placement_descriptor
                placed = placement[constants.AUTOEP_PLACEMENT_RANKS]
                assert [each[constants.AUTOEP_PLACEMENT_EXPERTS] for each in placed] == [list(held) for held in rows]
                record = getattr(part.experts.w1, constants.DS_AUTOEP_UC_META)
                assert record[constants.AUTOEP_EXPERT_PLACEMENT] == placement
                assert record[constants.AUTOEP_PARAM_LOCAL_EXPERTS] == list(rows[engine.rank % 2])
                hooks = [hook for hook in part.router._forward_hooks.values() if isinstance(hook, ToPlaces)]
                assert len(hooks) == ([*chain(*rows)] != [0, 1, 2, 3])
        assert engine.layout.experts is None


def test_counters_and_records(pool: RankPool) -> None:
    pool.run(chained)
