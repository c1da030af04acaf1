"""Maps of experts under AutoEP: every expert on the rank that the layout names, at every stage, live."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import constants
from torch import nn

from ds_dynatrain.adapters.model.auto_ep import ToPlaces
from ds_dynatrain.errors import CheckpointError, ConfigError, SwitchRefused
from ds_dynatrain.space import ExpertMap, Layout
from tests.engine import axis_walks, jobs, oracle, pipelined_experts
from tests.engine.mixtures import autoep, autoep_model, folded_places, native
from tests.engine.models import LENGTH, WORDS, Sequences
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
CROSSING = [
    at(2, 2, 0, SWAPPED),
    at(4, 2, 0, CROSSED),
    at(4, 2, 1, CROSSED),
    at(4, 2, 1, SWAPPED),
    at(4, 2, 3),
    at(4, 4, 3, SPREAD),
    at(2, 2, 3, SWAPPED),
    at(2, 2, 3, CROSSED),
    at(3, 1, 2),
    at(4, 2, 2, SWAPPED),
]


def test_any_map_at_any_stage(pool: RankPool) -> None:
    """To maps, from one to another, with other sizes at once, and back to order."""
    axis_walks.compare(pool, partial(autoep, "mixtral"), QUICK)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "fp32"), ("qwen2", "bf16"), ("mixtral", "fp32")])
def test_every_stage(pool: RankPool, kind: str, dtype: str) -> None:
    """A dense layer between (one map fewer), shared experts, all stages."""
    path = CROSSING
    if kind == "qwen3":
        path = [layout.replace(experts=None if layout.experts is None else layout.experts[:1]) for layout in path]
    axis_walks.compare(pool, partial(autoep, kind), path, dtype)


PIPED: ExpertMap = (((3, 0), (1, 2)), ((7, 1, 2, 3), (4, 5, 6, 0)))
APART: ExpertMap = (((3,), (0,), (1,), (2,)), ((7, 1), (2, 3), (4, 5), (6, 0)))


@pytest.mark.full
def test_in_a_pipeline(pool: RankPool) -> None:
    """A map is of the whole model: stages keep to it, and may be without experts."""
    two = {"pipe": 2, "data": 2, "expert": 2}
    path = [
        Layout(**two, zero_stage=1),
        Layout(**two, zero_stage=1, experts=PIPED),
        Layout(data=4, expert=2, zero_stage=1, experts=PIPED),
        Layout(data=4, expert=4, zero_stage=0, experts=APART),
        Layout(**two, zero_stage=0, experts=PIPED),
        Layout(pipe=4, zero_stage=1),
    ]
    axis_walks.compare(pool, pipelined_experts.autoep, path)


@pytest.mark.full
def test_beside_a_tensor_axis(pool: RankPool) -> None:
    """Tensor ranks are places of experts as well."""
    sizes = {"data": 2, "tensor": 2, "expert": 2}
    path = [
        Layout(**sizes, zero_stage=2),
        Layout(**sizes, zero_stage=2, experts=CROSSED),
        Layout(data=1, tensor=4, expert=4, zero_stage=3, experts=SPREAD),
        Layout(**sizes, zero_stage=1, experts=SWAPPED),
    ]
    axis_walks.compare(pool, partial(autoep, heads=4), path)


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


def refused() -> None:
    """Maps that fit no layer, each with its reason; a kind of experts that a map does not help."""
    with axis_walks.started(autoep(), "fp32", at(4, 2, 1)) as made:
        next(iter(made.loader))
        for experts, words in (
            (CROSSED[:1], r"for 1 layers, and 2 layers have experts: model\.layers\.0\.mlp, model\.layers\.1\.mlp"),
            ((((0, 2), (3, 1)), ((1,), (0,))), r"names 2 experts of 'model\.layers\.1\.mlp', which has 4"),
            ((((0, 0), (3, 1)),), r"layer 0: of 0 to 3, \[2\] have no index, \[0\] have two"),
            ((((0, 2, 1), (3,)),), "layer 0: the indices have 3, 1 of 4 experts"),
        ):
            with pytest.raises(SwitchRefused, match=words):
                made.engine.switch(experts=experts)
    with axis_walks.started(native(2), "fp32", at(2, 2, 1)) as made:
        next(iter(made.loader))
        with pytest.raises(SwitchRefused, match=r"deepspeed\.moe pads each expert's tokens to the largest count"):
            made.engine.switch(experts=CROSSED)
    start = {"data": 4, "expert": 2, "zero_stage": 1, "experts": [[[0, 1], [2]]]}
    given = {**jobs.config("fp32", (4, 1)), "expert_parallel": {"enabled": True}}
    given["dynatrain"] = {"layout": start}
    with (
        pytest.raises(ConfigError, match=r"dynatrain\.layout: experts of layer 0: the indices have 2, 1 of 3"),
        jobs.job(given, autoep_model("mixtral"), Sequences(24), groups=False),
    ):
        pass


def test_what_is_refused(pool: RankPool) -> None:
    pool.run(refused)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def loaded(engine: Any, state: oracle.State) -> None:
    """Assert that an engine has a state."""
    assert oracle.differences(state, oracle.gather(engine, folded_places), counters=False) == []


def saved_and_loaded(folder: str) -> None:
    """A checkpoint of one map loads into another, into another size, and without any."""
    with axis_walks.started(autoep(), "fp32", at(4, 2, 2, CROSSED)) as made:
        engine, batches = made.engine, iter(made.loader)
        axis_walks.one_step(engine, next(batches))
        engine.save(folder, "mapped")
        state = oracle.gather(engine, folded_places)
        for layout in (at(4, 2, 2, SWAPPED), at(4, 4, 3, SPREAD), at(4, 2, 1), at(4, 2, 0, CROSSED)):
            axis_walks.one_step(engine, next(batches))
            engine.switch(layout, at=engine.global_steps)
            axis_walks.one_step(engine, next(batches))
            engine.load(folder, "mapped")
            assert engine.layout == layout
            loaded(engine, state)
            batches = iter(made.loader)


def test_checkpoints_of_any_map(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved_and_loaded, folder=str(tmp_path))


def kept_apart(folder: str) -> None:
    """DeepSpeed's own checkpoints go by places and ranks: refused with a map, and read at their own size only."""
    with axis_walks.started(autoep(), "fp32", at(4, 2, 1)) as made:
        engine, batches = made.engine, iter(made.loader)
        axis_walks.one_step(engine, next(batches))
        engine.save_checkpoint(folder, "stock")
        state = oracle.gather(engine, folded_places)
        for layout, words in (
            (at(4, 2, 1, CROSSED), "the layout has a map of experts"),
            (at(4, 4, 1), r"was saved with expert=2.*call engine\.switch\(expert=2\) first"),
            (at(4, 1, 0), "DeepSpeed would give experts each other's masters"),
        ):
            axis_walks.one_step(engine, next(batches))
            engine.switch(layout, at=engine.global_steps)
            axis_walks.one_step(engine, next(batches))
            if layout.experts is not None:
                with pytest.raises(CheckpointError, match=r"save_checkpoint: .*use engine\.save"):
                    engine.save_checkpoint(folder, "of a map")
            before = oracle.gather(engine, folded_places)
            with pytest.raises(CheckpointError, match=words):
                engine.load_checkpoint(folder, "stock")
            loaded(engine, before)
        axis_walks.one_step(engine, next(batches))
        engine.switch(at(4, 2, 1), at=engine.global_steps)
        axis_walks.one_step(engine, next(batches))
        engine.load_checkpoint(folder, "stock")
        loaded(engine, state)


def test_checkpoints_of_deepspeed(pool: RankPool, tmp_path: Path) -> None:
    pool.run(kept_apart, folder=str(tmp_path))
    assert not (tmp_path / "of a map").exists()


# ---- clipping without ZeRO ------------------------------------------------------------------------------------------


def mostly_experts() -> nn.Module:
    """A model that trains its experts and one norm: the norm of its gradients is mainly that of the experts."""
    model = autoep_model("mixtral")
    for name, held in model.named_parameters():
        held.requires_grad_(".experts." in name or name.endswith("1.input_layernorm.weight"))
        held.data.mul_(5.0 if held.requires_grad else 1.0)
    return model


def clipped(sizes: list[int]) -> dict[int, list[float]]:
    """Losses of steps whose gradients are clipped, without ZeRO, at an expert size for each step."""
    settings = {"gradient_clipping": 1e-3, "optimizer": {"type": "SGD", "params": {"lr": 1000.0}}}
    subject = replace(autoep(), build=mostly_experts)
    subject, losses = replace(subject, settings={**subject.settings, **settings}), list[float]()
    with axis_walks.started(subject, "fp32", at(4, sizes[0], 0)) as made:
        engine, batches = made.engine, iter(made.loader)
        for size, following in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
            batch = next(batches)
            assert engine.layout.expert == size
            losses.append(axis_walks.one_step(engine, batch))
            if following != size:
                engine.switch(expert=following, at=engine.global_steps)
    return {0: losses}


def test_the_norm_without_zero_counts_every_expert_once(pool: RankPool) -> None:
    """DeepSpeed's own norm at stage 0 depends on the expert size, and would change training at a switch.

    A switch may exchange members' ranks, and with them their samples: losses are compared by their mean over ranks.
    """
    plain, switched = (jobs.means_by_place(pool.run(clipped, sizes=sizes))[0] for sizes in ([1] * 5, [1, 2, 4, 2, 1]))
    assert jobs.furthest(plain, switched) <= 1e-6
