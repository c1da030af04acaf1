"""AutoEP's experts change places live: 1 to 4 ranks, every stage, against an independent gather and a probe."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from ds_dynatrain.errors import ConfigError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout
from tests.adapters import expert_models as models
from tests.engine import expert_walks as walks
from tests.engine import jobs, oracle
from tests.engine.models import Sequences
from tests.engine.pool import RankPool

if importlib.util.find_spec("transformers") is None:
    pytest.skip("AutoEP converts models of transformers'", allow_module_level=True)

WALK = [
    {"data": 2, "expert": 1, "zero_stage": 1},
    {"data": 2, "expert": 2, "zero_stage": 1},
    {"data": 4, "expert": 4, "zero_stage": 1},
    {"data": 4, "expert": 1, "zero_stage": 1},
]
CROSSING = [
    {"data": 4, "expert": 2, "zero_stage": 3},
    {"data": 2, "expert": 2, "zero_stage": 1},
    {"data": 3, "expert": 1, "zero_stage": 2},
    {"data": 4, "expert": 4, "zero_stage": 3},
    {"data": 1, "expert": 1, "zero_stage": 0},
    {"data": 4, "expert": 2, "zero_stage": 0},
]


MIXTRAL: dict[str, Any] = {"build": walks.autoep_model, "arguments": {"kind": "mixtral"}, "seconds": 240}


def walked(pool: RankPool, dtype: str, path: list[dict[str, int]], kind: str, steps: int = walks.STEPS) -> list[float]:
    """The losses of all steps."""
    config = walks.settings(dtype, path[0])
    case = {"config": config, "path": path, "build": walks.autoep_model, "steps": steps}
    seen = pool.run(walks.walk, arguments={"kind": kind}, seconds=240, **case)
    walks.check(seen, path, exact=dtype == "fp32")
    return jobs.global_losses([each.record for each in seen if each is not None])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_walk(pool: RankPool, stage: int) -> None:
    """1 -> 2 -> 4 -> 1 experts' ranks; the losses are those of a job that never switched."""
    path = [{**sizes, "zero_stage": stage} for sizes in WALK]
    losses = walked(pool, "fp32", path, "mixtral")
    static = walked(pool, "fp32", path[:1], "mixtral", len(losses))
    assert jobs.furthest(losses, static) < 1e-6


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "fp32"), ("qwen2", "bf16"), ("mixtral", "bf16 in fp32")])
def test_crossing_stages(pool: RankPool, kind: str, dtype: str) -> None:
    """A dense layer between, shared experts; a start with experts apart, uneven data, no ZeRO; BF16_Optimizer."""
    path = CROSSING[1:4] if dtype == "bf16 in fp32" else CROSSING
    walked(pool, dtype, path, kind)


def test_options_of_the_layers(pool: RankPool) -> None:
    """What the user says of AutoEP's layers holds at every size."""
    options = {"preset_model": "mixtral", "top_k": 1, "use_grouped_mm": False, "combine_impl": "legacy_bmm"}
    path = [{**sizes, "zero_stage": 2} for sizes in WALK[1:]]
    config = walks.settings("fp32", path[0])
    config["expert_parallel"].update(options)
    plain = pool.run(walks.walk, config=walks.settings("fp32", path[0]), path=path, **MIXTRAL)
    seen = pool.run(walks.walk, config=config, path=path, **MIXTRAL)
    walks.check(seen, path)
    assert seen[0].before[1]["chosen"] != plain[0].before[1]["chosen"]


# ---- the start ------------------------------------------------------------------------------------------------------


def started(stage: int, how: str) -> list[str]:
    """The first weights are those of the user's model; names of the optimizer's groups."""
    model = walks.autoep_model("mixtral")
    values = models.autoep_values(model)
    settings = walks.settings("fp32", {"data": 4, "zero_stage": stage})
    settings["expert_parallel"]["autoep_size"] = 2
    arguments: dict[str, Any] = {}
    if how == "lists":
        arguments["model_parameters"] = [{"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}]
    if how == "function":
        arguments["optimizer"] = lambda held: torch.optim.AdamW(
            split_params_into_different_moe_groups_for_optimizer({"params": held, "name": "all"}), lr=1e-3
        )
    with jobs.job(settings, model, Sequences(24), groups=False, **arguments) as made:
        engine = made.engine
        assert engine.layout == Layout(data=4, expert=2, zero_stage=stage)
        state = oracle.gather(engine, walks.places)
        weights = {name: held for (name, kind), held in state.tensors.items() if kind == "weight"}
        assert weights.keys() == values.keys()
        assert all(torch.equal(weights[name], values[name].flatten()) for name in values)
        jobs.one_micro_batch(engine, next(iter(made.loader)), jobs.Record())
        return [group["name"] for group in engine.basic_optimizer.param_groups]


@pytest.mark.parametrize(("stage", "how"), [(1, ""), (3, ""), (2, "lists"), (3, "function")])
def test_a_start_with_experts_apart(pool: RankPool, stage: int, how: str) -> None:
    """`autoep_size` of the configuration is the layout's; parameters by list, or an optimizer that the user makes."""
    assert pool.run(started, stage=stage, how=how) == [["all" if how else "dense-params", "ep_size_2"]] * 4


def refused_starts() -> None:
    """Each with its reason."""
    start = {"data": 4, "expert": 2, "zero_stage": 1}
    settings = walks.settings("fp32", start)
    settings["expert_parallel"]["autoep_size"] = 4
    with pytest.raises(ConfigError, match=r"expert is 2 and expert_parallel\.autoep_size is 4"), jobs.job(settings):
        pass
    model = walks.autoep_model("mixtral")
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        pytest.raises(UnsupportedError, match="optimizer group 0 holds experts and is not marked"),
        jobs.job(walks.settings("fp32", start), model, groups=False, optimizer=client),
    ):
        pass
    model = walks.autoep_model("mixtral").to("meta")
    with (
        pytest.raises(UnsupportedError, match="on the meta device: build the model whole"),
        jobs.job(walks.settings("fp32", start), model, groups=False),
    ):
        pass


def test_what_cannot_start(pool: RankPool) -> None:
    """Sizes that disagree, a client's optimizer that mixes experts and others, a model without memory."""
    pool.run(refused_starts)


# ---- what must not be, and what must not stay -----------------------------------------------------------------------


def refused_and_chained() -> tuple[int, list[str]]:
    """Ask for what cannot be; then switch to and fro: nothing of the modules before stays."""
    settings = walks.settings("fp32", {"data": 4, "zero_stage": 1})
    with jobs.job(settings, walks.autoep_model("mixtral"), Sequences(12 * 14), groups=False) as made:
        engine, iterator = made.engine, iter(made.loader)
        batch = next(iterator)
        with pytest.raises(SwitchRefused, match=r"expert=3 does not divide the 4 experts of 'model\.layers\.0\.mlp'"):
            engine.switch(Layout(data=3, expert=3, zero_stage=1))
        with pytest.raises(SwitchRefused, match="tensor=2"):
            engine.switch(Layout(data=2, tensor=2, zero_stage=1))
        gone, outcomes = [], []
        engine.on_switch(lambda event: outcomes.append(event.outcome))
        root = engine.module
        for number in range(12):
            jobs.one_micro_batch(engine, batch, jobs.Record())
            old = engine.module.model.layers[0].mlp
            gone += [weakref.ref(old), weakref.ref(old.experts.w1)]
            engine.switch(expert=(4, 1, 2)[number % 3], zero_stage=(3, 1, 2)[number % 3], at=engine.global_steps)
            del old
            batch = next(iterator)
        assert engine.module is root
        gc.collect()
        return sum(each() is not None for each in gone), outcomes


def test_nothing_of_the_old_experts_stays(pool: RankPool) -> None:
    """After twelve switches; and sizes that the model cannot take are refused before them."""
    for alive, outcomes in pool.run(refused_and_chained, seconds=120):
        assert outcomes == ["committed"] * 12
        assert alive == 0
