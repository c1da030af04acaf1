"""The expert axis of native layers against engines that DeepSpeed itself built, on 4 real ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as td
from deepspeed.moe.layer import MoE
from torch import nn

from ds_dynatrain.adapters.model import moe
from ds_dynatrain.adapters.versions.deepspeed_versions import present
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import Layout
from tests.adapters import expert_checks as checks
from tests.adapters import expert_models as models
from tests.adapters.stock import stock_engine
from tests.engine.pool import RankPool


def settings_of(stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    return models.config(stage, dtype=dtype, autoep=False, **more)


# ---- what DeepSpeed holds is what the cuts say ----------------------------------------------------------------------


def holdings(stage: int, size: int, dtype: str, accumulate: str) -> None:
    """Build a stock engine, and compare every tensor and flat buffer with the prediction."""
    place = checks.Place(td.get_rank(), td.get_world_size(), size)
    model, whole = models.native_model(size, place.index), models.native_model(size, place.index)
    values = models.native_values()
    assert moe.start_size(model) == size
    shaper = moe.NativeShaper(whole, place.rank)
    check_completed(whole, shaper, values, size, place.index)
    cut = shaper.cuts(Layout(data=place.ranks, expert=size, zero_stage=stage))
    routed = models.experts_of(values)
    assert [name for name in cut if cut[name].expert is not None] == routed
    element = torch.bfloat16 if dtype == "bf16" else torch.float32
    expected = checks.held_here({name: held.to(element) for name, held in values.items()}, cut, place.index)
    groups = [[name for name in expected if (name in routed) == expert] for expert in (False, True)]
    settings = settings_of(stage, dtype, data_types={"grad_accum_dtype": accumulate})
    with stock_engine(model, settings) as engine:
        checks.check_weights(engine, moe.names(engine.module, place.index), expected)
        if stage:
            checks.check_flat_groups(engine, groups, expected, place)
        names = [(group["name"], group.get("moe", False)) for group in engine.basic_optimizer.param_groups]
        assert names == [("dense-params", False), (f"ep_size_{size}", True)]


def check_completed(whole: nn.Module, shaper: moe.NativeShaper, values: checks.Tensors, size: int, index: int) -> None:
    """A model of one rank's experts has all of them: its own, and others without memory, which other ranks have."""
    assert [name for name, _ in whole.named_parameters()] == list(values)
    for name, held in whole.named_parameters():
        owner = shaper.owners.get(id(held))
        found = models.LOCAL_EXPERT.search(name)
        if found is None or size == 1:
            assert owner is None and checks.same(held.data, values[name])
            continue
        count = models.COUNTS[0] if name.startswith("first") else models.COUNTS[1]
        assert owner == int(found[1]) * size // count
        if owner == index:
            assert checks.same(held.data, values[name])
        else:
            assert held.untyped_storage().nbytes() == held.element_size()
        assert held.group_name == "ep_size_1" and not held.allreduce


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("stage", "dtype", "accumulate"),
    [(0, "fp32", "fp32"), (1, "fp32", "fp32"), (2, "fp32", "fp32"), (1, "bf16", "fp32"), (2, "bf16", "bf16")],
)
def test_holdings_are_as_predicted(pool: RankPool, size: int, stage: int, dtype: str, accumulate: str) -> None:
    """Names, weights, flat groups and this rank's part of them; also of BF16_Optimizer."""
    pool.run(holdings, stage=stage, size=size, dtype=dtype, accumulate=accumulate)


def groups_of_the_user() -> None:
    """Experts of two groups lie in two groups, behind those of the user, in the order of these."""
    place = checks.Place(td.get_rank(), td.get_world_size(), 2)
    model, whole = models.native_model(2, place.index), models.native_model(2, place.index)
    cut = moe.NativeShaper(whole, place.rank).cuts(Layout(data=place.ranks, expert=2, zero_stage=1))
    routed = models.experts_of(cut)
    expected = checks.held_here(models.native_values(), cut, place.index)
    vectors = [held for held in model.parameters() if held.dim() == 1]
    matrices = [held for held in model.parameters() if held.dim() > 1]
    decays = [
        {"params": vectors, "name": "vectors", "weight_decay": 0.0},
        {"params": matrices, "name": "matrices", "weight_decay": 0.1},
    ]
    vector = [name for name, held in expected.items() if held.dim() == 1]
    rest = [name for name in expected if name not in vector]
    parted = [
        [name for name in part if (name in routed) == expert] for expert in (False, True) for part in (vector, rest)
    ]
    with stock_engine(model, settings_of(1), model_parameters=decays) as engine:
        checks.check_flat_groups(engine, parted, expected, place)
        found = [(group["name"], group["weight_decay"]) for group in engine.basic_optimizer.param_groups]
        assert found == [("vectors", 0.0), ("matrices", 0.1), ("ep_size_2", 0.0), ("ep_size_2", 0.1)]


@pytest.mark.full
def test_each_group_of_the_user_has_one_for_its_experts(pool: RankPool) -> None:
    """With its hyper-parameters, and all of them of one name."""
    pool.run(groups_of_the_user)


# ---- a module that is given the experts of another size -------------------------------------------------------------

Seen = tuple[float, list[torch.Tensor]]
"""(loss, how many tokens of this rank each expert of each layer has)."""


def rebuilt(before: int, size: int) -> Seen:
    """As in `test_experts`: reshape a model that was built with another size, and compare."""
    rank, ranks = td.get_rank(), td.get_world_size()
    model = models.native_model(before, rank % before)
    shaper = moe.NativeShaper(model, rank)
    layout = Layout(data=ranks, expert=size, zero_stage=0)
    with stock_engine(models.native_model(size, rank % size), settings_of(0)) as engine:
        stream = torch.get_rng_state()
        shaper.reshape(model, layout)
        assert torch.equal(torch.get_rng_state(), stream)
        values = checks.held_here(models.native_values(), shaper.cuts(layout), rank % size)
        named = moe.parameters(model, layout)
        assert list(values) == list(named)
        for name, held in named.items():
            held.data.copy_(values[name])
        entered = SimpleNamespace(
            module=model, basic_optimizer=engine.basic_optimizer, wall_clock_breakdown=engine.wall_clock_breakdown
        )
        shaper.enter(entered, layout)
        shaper.enter(entered, layout)
        unlike = list(checks.modules_like(model, engine.module))
        assert not unlike, unlike
        for name in ("has_moe_layers", "num_experts", "expert_parallel_group", "expert_data_parallel_group"):
            assert getattr(entered, name) == getattr(engine, name), name
        assert [len(entered.gate_modules), len(entered.moe_layers)] == [2, 2]
        routed = [part.deepspeed_moe for part in model.modules() if isinstance(part, MoE)]
        for part in routed:
            assert part.ep_group is part.gate.ep_group is engine.moe_layers[0].ep_group
        loss = model(*models.batch(3, rank, ranks))
        shaper.leave(entered)
        assert all(part.ep_group is part.gate.ep_group is None for part in routed)
        return float(loss), [part.exp_counts.clone() for part in routed]


@pytest.mark.skipif(not present().is_newest, reason="DeepSpeed 0.18 fails with fewer tokens than fit")
def test_a_reshaped_module_is_the_one_that_deepspeed_would_build(pool: RankPool) -> None:
    """Classes, attributes, names, shapes, groups; and where tokens go and the loss, at every size."""
    seen = [pool.run(rebuilt, before=before, size=size) for before, size in ((2, 1), (1, 2), (2, 4), (4, 2))]
    for others in seen[1:]:
        for (loss, counts), (like, same) in zip(seen[0], others, strict=True):
            assert loss == like
            assert len(counts) == 2 and all(map(torch.equal, counts, same))


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_sizes_that_a_layer_does_not_divide_into_are_refused() -> None:
    """Every layer must be divided, and the nearest sizes are those of all of them; and so are other axes."""
    shaper = moe.NativeShaper(models.Routed(1), 0)
    with pytest.raises(LayoutError, match=r"expert=8 .* 4 experts of 'first' \(remainder 4\); nearest: expert=4$"):
        shaper.cuts(Layout(data=8, expert=8, zero_stage=1))
    with pytest.raises(LayoutError, match=r"expert=3 .* nearest: expert=2, expert=4$"):
        shaper.cuts(Layout(data=3, expert=3, zero_stage=1))
    with pytest.raises(LayoutError, match="pipe=2 with experts is not supported; set these axes to 1"):
        shaper.cuts(Layout(data=2, pipe=2, zero_stage=1))


def test_layers_of_several_sizes_are_refused() -> None:
    """With the size of each."""
    model = nn.ModuleList([MoE(4, nn.Linear(4, 4), 4, ep_size=size) for size in (1, 2)])
    with pytest.raises(UnsupportedError, match=r"'0' has ep_size=1, '1' has ep_size=2"):
        moe.NativeShaper(model, 0)


def test_experts_that_cannot_change_places_are_refused() -> None:
    """Because they are not alike, or hold what is no parameter."""
    model = models.Routed(1)
    model.first.deepspeed_moe.experts.deepspeed_experts[2].up.weight.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="experts of 'first' are not alike"):
        moe.NativeShaper(model, 0)
    model = nn.Sequential(MoE(4, nn.BatchNorm1d(4), 4))
    with pytest.raises(UnsupportedError, match="experts of '0' have buffers"):
        moe.NativeShaper(model, 0)


def test_a_layer_that_drops_tokens_is_found() -> None:
    """Its ranks must have equal numbers of them."""
    assert moe.first_dropping_layer(models.Routed(1)) == "first"
    assert moe.first_dropping_layer(nn.Sequential(MoE(4, nn.Linear(4, 4), 4, drop_tokens=False))) is None
    assert moe.first_dropping_layer(nn.Linear(2, 2)) is None
