"""AutoEP's expert axis against engines that DeepSpeed itself built, on 2 and 4 real ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as td
from deepspeed.utils import groups

from ds_dynatrain.adapters.groups.world import peers
from ds_dynatrain.adapters.model import auto_ep as experts
from ds_dynatrain.adapters.model.auto_tp import AutoEPShaper
from ds_dynatrain.errors import ConfigError, LayoutError, UnsupportedError
from ds_dynatrain.space import Layout
from tests.adapters import expert_checks as checks
from tests.adapters import expert_models as models
from tests.adapters.stock import stock_engine
from tests.engine.pool import RankPool

if importlib.util.find_spec("transformers") is None:
    pytest.skip("AutoEP converts models of transformers'", allow_module_level=True)
SIZES = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
"""(ranks, expert size)."""


@pytest.fixture(scope="module")
def pools(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    """Ranks by the size of their world: stock DeepSpeed takes all there are."""
    pair = RankPool(2, tmp_path_factory.mktemp("pair"), beside=pool)
    yield {2: pair, 4: pool}
    pair.stop()


# ---- what DeepSpeed holds is what the cuts say ----------------------------------------------------------------------


def holdings(kind: str, stage: int, size: int, dtype: str, limit: int = 10**9) -> None:
    """Build a stock engine, and compare every tensor, flat buffer and part with the prediction."""
    place = checks.Place(td.get_rank(), td.get_world_size(), size)
    layout = Layout(data=place.ranks, expert=size, zero_stage=stage)
    settings = models.config(stage, size, dtype)
    settings["zero_optimization"]["sub_group_size"] = limit
    model, whole = models.autoep_model(kind, inner=9), models.autoep_model(kind, inner=9)
    values = models.autoep_values(model)
    cut = AutoEPShaper(whole, settings).cuts(layout)
    logical = dict(whole.named_parameters())
    assert list(cut) == list(logical) and set(cut) == set(values)
    assert all(checks.same(held.data, values[name]) for name, held in logical.items())
    routed = models.experts_of(logical)
    assert [name for name in cut if cut[name].expert is not None] == routed
    expected = checks.held_here({name: values[name].to(torch_type(dtype)) for name in logical}, cut, place.index)
    dense = [name for name in logical if name not in routed]
    with stock_engine(model, settings) as engine:
        if stage < 3:
            checks.check_weights(engine, dict(zip(logical, logical, strict=True)), expected)
        if stage in (1, 2):
            checks.check_flat_groups(engine, [dense, routed], expected, place)
        if stage == 3:
            parted = [*subgroups(dense, expected, limit, place), *subgroups(routed, expected, limit, place)]
            checks.check_parts(engine, parted, expected, place)
            assert len(parted) == 2 or limit < 10**9


def subgroups(names: list[str], expected: checks.Tensors, limit: int, place: checks.Place) -> list[list[str]]:
    """One sub-group, or several that close with the tensor whose part brings the sum to the limit."""
    _, ranks = place.group("experts." in names[0])
    parts = [-(-expected[name].numel() // ranks) for name in names]
    if sum(parts) <= limit:
        return [names]
    found: list[list[str]] = [[]]
    total = 0
    for name, part in zip(names, parts, strict=True):
        if total >= limit:
            found.append([])
            total = 0
        found[-1].append(name)
        total += part
    return found


def torch_type(dtype: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "size"), SIZES)
@pytest.mark.parametrize("stage", range(4))
def test_holdings_are_as_predicted(pools: dict[int, RankPool], ranks: int, size: int, stage: int) -> None:
    """Weights after DeepSpeed's start, flat groups, parts and sub-groups."""
    pools[ranks].run(holdings, kind="mixtral", stage=stage, size=size, dtype="fp32")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("stage", [2, 3])
def test_other_models_in_bf16(pools: dict[int, RankPool], kind: str, stage: int) -> None:
    """Qwen3 with a dense layer between, Qwen2 with shared experts; sub-groups of a small size."""
    pools[4].run(holdings, kind=kind, stage=stage, size=2, dtype="bf16", limit=700)


def routed_alike(settings: dict[str, Any], user_groups: bool) -> None:
    """A client's optimizer under stage 3, with experts and others in one group; or groups from the user."""
    place = checks.Place(td.get_rank(), td.get_world_size(), 2)
    model, whole = models.autoep_model("mixtral"), models.autoep_model("mixtral")
    layout = Layout(data=place.ranks, expert=2, zero_stage=int(settings["zero_optimization"]["stage"]))
    cut = AutoEPShaper(whole, settings).cuts(layout)
    logical = {name: held.data for name, held in whole.named_parameters()}
    expected = checks.held_here(logical, cut, place.index)
    routed = models.experts_of(logical)
    norms = [name for name in logical if "norm" in name]
    routers = [name for name in logical if "router" in name]
    rest = [name for name in logical if name not in (*norms, *routed, *routers)] + routers
    if user_groups:
        by_name = dict(model.named_parameters())
        held = [by_name[name] for name in norms]
        others = [parameter for name, parameter in by_name.items() if name not in norms]
        decays = [{"params": held, "name": "norms", "weight_decay": 0.0}, {"params": others, "name": "rest"}]
        with stock_engine(model, settings, model_parameters=decays) as engine:
            checks.check_flat_groups(engine, [norms, rest, routed], expected, place)
            names = [group["name"] for group in engine.basic_optimizer.param_groups]
            assert names == ["norms", "rest", "ep_size_2"]
        return
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dense = [name for name in logical if name not in (*routed, *routers)] + routers
    with stock_engine(model, settings, optimizer=client) as engine:
        checks.check_parts(engine, [dense, routed], expected, place)
        assert dict(engine.optimizer.sub_group_to_group_id) == {0: 0, 1: 0}


def test_groups_of_the_user_lose_their_experts_to_groups_behind(pools: dict[int, RankPool]) -> None:
    """One group per group that had some, named by the expert size."""
    pools[4].run(routed_alike, settings=models.config(2, 2), user_groups=True)


def test_a_clients_group_is_parted_in_stage_3(pools: dict[int, RankPool]) -> None:
    """Sub-groups do not mix experts and others, though their optimizer group does."""
    pools[4].run(routed_alike, settings=models.config(3, 2), user_groups=False)


# ---- a module that is given the experts of another size -------------------------------------------------------------

Seen = tuple[torch.Tensor, list[torch.Tensor]]
"""(logits, the experts that each layer chose per token)."""


def rebuilt(kind: str, before: int, size: int, dtype: str) -> Seen:
    """Give a model one expert size and then another, and compare with what DeepSpeed builds for that.

    The result is what the reshaped module says to a probe once it holds the slices that the cuts name.
    """
    rank, ranks = td.get_rank(), td.get_world_size()
    model = models.autoep_model(kind)
    values = models.autoep_values(model)
    shaper = AutoEPShaper(model, models.config(0))
    model.to(torch_type(dtype))
    with stock_engine(models.autoep_model(kind), models.config(0, before, dtype)):
        shaper.reshape(model, Layout(data=ranks, expert=before, zero_stage=0))
    layout = Layout(data=ranks, expert=size, zero_stage=0)
    old = {id(held) for held in model.parameters()}
    with stock_engine(models.autoep_model(kind), models.config(0, size, dtype)) as engine:
        stream = torch.get_rng_state()
        shaper.reshape(model, layout)
        assert not old & {id(held) for held in model.parameters()}
        assert torch.equal(torch.get_rng_state(), stream)
        put(model, checks.held_here(values, shaper.cuts(layout), rank % size))
        entered = SimpleNamespace(
            module=model,
            basic_optimizer=engine.basic_optimizer,
            tensor_parallel_config=engine.tensor_parallel_config,
            wall_clock_breakdown=engine.wall_clock_breakdown,
        )
        shaper.enter(entered, layout)
        unlike = list(checks.modules_like(model, engine.module))
        assert not unlike, unlike
        for name in ("has_moe_layers", "num_experts", "_autoep_folding_spec", "expert_parallel_group"):
            assert getattr(entered, name) == getattr(engine, name), name
        for part, like in zip(layers_of(model), layers_of(engine.module), strict=True):
            assert part.ep_group is like.ep_group and part.ep_group is not None
        seen = probe(model, rank, ranks)
        shaper.leave(entered)
        assert all(part.ep_group is None for part in layers_of(model))
        return seen


def folded(kind: str, plan: str, sizes: dict[str, int]) -> None:
    """Give a model tensor ranks, too, and compare with what DeepSpeed builds for that."""
    rank, layout = td.get_rank(), Layout(**sizes, zero_stage=0)
    block = {"autotp_size": layout.tensor, "preset_model": plan}
    settings = models.config(0, layout.expert, tensor_parallel=block)
    model = models.autoep_model(kind)
    values = models.autoep_values(model)
    shaper = AutoEPShaper(model, settings)
    cuts = shaper.cuts(layout)
    with stock_engine(models.autoep_model(kind), settings) as engine:
        name = f"ep_size_{layout.expert}"
        found = groups._get_expert_parallel_group(name), groups._get_expert_data_parallel_group(name)
        assert [tuple(td.get_process_group_ranks(group)) for group in found] == [
            peers(layout, rank)[kind] for kind in ("expert", "expert_data")
        ]
        shaper.reshape(model, layout)
        held = checks.held_here(values, cuts, rank % layout.expert, rank % layout.tensor)
        expected = {name: held[name] for name, _ in engine.module.named_parameters()}
        checks.check_weights(engine, {name: name for name in expected}, expected)
        unlike = list(checks.modules_like(model, engine.module))
        assert not unlike, unlike


@pytest.mark.parametrize(
    ("kind", "plan", "sizes"),
    [
        ("mixtral", "mixtral", {"data": 2, "tensor": 2, "expert": 4}),
        ("qwen2", "qwen2", {"data": 2, "tensor": 2, "expert": 2}),
        pytest.param("qwen3", "qwen2", {"tensor": 2, "data": 2, "expert": 2}, marks=pytest.mark.full),
    ],
)
def test_tensor_ranks_hold_what_deepspeed_folds(pool: RankPool, kind: str, plan: str, sizes: dict[str, int]) -> None:
    pool.run(folded, kind=kind, plan=plan, sizes=sizes)


def put(model: torch.nn.Module, values: checks.Tensors) -> None:
    """Write tensors of these names into a module."""
    for name, held in model.named_parameters():
        held.data.copy_(values[name])


def layers_of(model: torch.nn.Module) -> list[Any]:
    """The layers that AutoEP made."""
    return [part for part in model.modules() if hasattr(part, "tokens_per_expert")]


def probe(model: torch.nn.Module, rank: int, ranks: int) -> Seen:
    """A forward pass over this rank's share of a batch; of an expert group all ranks must take part."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.router.register_forward_hook(lambda _, __, found: chosen.append(found[1])) for layer in layers_of(model)
    ]
    with torch.no_grad():
        logits = model(models.batch(3, rank, ranks)[0]).logits
    for hook in hooks:
        hook.remove()
    return logits, chosen


@pytest.mark.full
@pytest.mark.parametrize(("kind", "dtype"), [("mixtral", "fp32"), ("qwen3", "fp32"), ("qwen2", "bf16")])
def test_a_reshaped_module_is_the_one_that_deepspeed_would_build(pool: RankPool, kind: str, dtype: str) -> None:
    """Classes, attributes, names, shapes, groups; and the experts of each token and the outputs, at every size."""
    seen = [pool.run(rebuilt, kind=kind, before=before, size=size, dtype=dtype) for before, size in WALK]
    for others in seen[1:]:
        for (logits, chosen), (like, same) in zip(seen[0], others, strict=True):
            assert torch.equal(logits, like)
            assert len(chosen) == len(same) and all(map(torch.equal, chosen, same))


WALK = [(2, 1), (1, 2), (2, 4), (4, 2)]
"""(expert size that DeepSpeed built, the one to reshape to)."""


# ---- the rest of the facts ------------------------------------------------------------------------------------------


def trained(stage: int, size: int) -> list[tuple[float, float]]:
    """Three steps of a stock engine: (mean loss over all ranks, norm that gradients are clipped by)."""
    rank, ranks = td.get_rank(), td.get_world_size()
    seen = []
    with stock_engine(models.autoep_model("mixtral"), models.config(stage, size)) as engine:
        for step in range(3):
            inputs, _ = models.batch(step, rank, ranks)
            loss = engine(input_ids=inputs, labels=inputs).loss
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            td.all_reduce(mean)
            seen.append((float(mean) / ranks, float(engine.get_global_grad_norm() or 0.0)))
    return seen


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_does_not_depend_on_the_expert_size(pool: RankPool, stage: int) -> None:
    """Losses and clipping norms of stock DeepSpeed agree."""
    one, two, four = (pool.run(trained, stage=stage, size=size)[0] for size in (1, 2, 4))
    assert one[0][1] > 0.1, "clipping must bite"
    for other in (two, four):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=0)


def frozen_and_accumulated(dtype: str) -> None:
    """BF16_Optimizer, and experts that are not trained: these lie in no group."""
    place = checks.Place(td.get_rank(), td.get_world_size(), 2)
    settings = models.config(1, 2, "bf16", data_types={"grad_accum_dtype": dtype})
    model, whole = models.autoep_model("qwen2", inner=9), models.autoep_model("qwen2", inner=9)
    for name, held in (*model.named_parameters(), *whole.named_parameters()):
        if "layers.1" in name and "experts.down_proj" in name:
            held.requires_grad_(False)
    cut = AutoEPShaper(whole, settings).cuts(Layout(data=place.ranks, expert=2, zero_stage=1))
    logical = dict(whole.named_parameters())
    expected = checks.held_here({name: held.bfloat16() for name, held in logical.items()}, cut, place.index)
    every = models.experts_of(logical)
    routed = [name for name in every if logical[name].requires_grad]
    assert len(every) == len(routed) + 1
    dense = [name for name in logical if name not in every]
    with stock_engine(model, settings) as engine:
        checks.check_weights(engine, dict(zip(logical, logical, strict=True)), expected)
        checks.check_flat_groups(engine, [dense, routed], expected, place)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_frozen_experts(pool: RankPool, dtype: str) -> None:
    """Cut like others, and in no flat buffer."""
    pool.run(frozen_and_accumulated, dtype=dtype)


def settings(**more: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, **more}}


def test_sizes_that_do_not_divide_are_refused_with_the_nearest() -> None:
    """With the layer, the arithmetic and the nearest sizes; and so are other axes."""
    shaper = AutoEPShaper(models.autoep_model("mixtral"), settings())
    with pytest.raises(
        LayoutError, match=r"expert=3 .* of 'model\.layers\.0\.mlp' \(remainder 1\); nearest: expert=2, e"
    ):
        shaper.cuts(Layout(data=3, expert=3, zero_stage=1))
    with pytest.raises(LayoutError, match=r"remainder 4\); nearest: expert=4$"):
        shaper.cuts(Layout(data=8, expert=8, zero_stage=1))
    with pytest.raises(LayoutError, match=r"tensor=2 .*requires expert_parallel\.autoep_size > 1"):
        shaper.cuts(Layout(data=4, tensor=2, zero_stage=1))
    with pytest.raises(LayoutError, match="sequence=2 with experts is not supported; set these axes to 1"):
        shaper.cuts(Layout(data=4, expert=4, sequence=2, zero_stage=1))
    assert shaper.cuts(Layout(data=4, expert=4, zero_stage=1))


def test_the_settings_of_a_layout() -> None:
    """The configuration says whether AutoEP is on and with which size; a layout has its own."""
    assert experts.is_on(settings()) and experts.start_size(settings(autoep_size=4)) == 4
    assert not experts.is_on({}) and not experts.is_on({"expert_parallel": {"enabled": False}})
    assert experts.start_size(settings()) == 1
    made = settings(autoep_size=4, top_k=1)
    AutoEPShaper(models.autoep_model("mixtral"), made).configure(made, Layout(data=2, expert=2, zero_stage=1))
    assert made == settings(autoep_size=2, top_k=1)
    with pytest.raises(ConfigError, match="score_func must be one of"):
        AutoEPShaper(models.autoep_model("mixtral"), settings(score_func="tanh"))


def test_experts_that_deepspeed_does_not_describe_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the parameter."""
    shaper = AutoEPShaper(models.autoep_model("mixtral"), settings())
    dealt = shaper.dealt

    def undescribed(*arguments: Any) -> torch.nn.Module:
        made = dealt(*arguments)
        del made.get_parameter("model.layers.0.mlp.experts.w2").ds_autoep_uc_meta
        return made

    monkeypatch.setattr(shaper, "dealt", undescribed)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp\.experts\.w2'"):
        shaper.cuts(Layout(data=2, expert=2, zero_stage=1))
