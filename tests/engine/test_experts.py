"""AutoEP's experts change places live: 1 to 4 ranks, every stage, against an independent gather and a probe."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from ds_dynatrain.errors import ConfigError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout
from tests.adapters import expert_models as models
from tests.engine import axis_walks, jobs, oracle
from tests.engine.axis_walks import Answer
from tests.engine.mixtures import autoep, autoep_model, places
from tests.engine.models import Sequences
from tests.engine.pool import RankPool

if importlib.util.find_spec("transformers") is None:
    pytest.skip("AutoEP converts models of transformers'", allow_module_level=True)


def at(data: int, expert: int, stage: int) -> Layout:
    """A layout."""
    return Layout(data=data, expert=expert, zero_stage=stage)


CROSSING = [at(4, 2, 3), at(2, 2, 1), at(3, 1, 2), at(4, 4, 3), at(1, 1, 0), at(4, 2, 0)]

UNALIGNED = "DeepSpeed fails there: torch's grouped_mm wants weights at multiples of 16 bytes (docs/gpu.md)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "dtype", "path"),
    [
        ("qwen3", "fp32", CROSSING),
        ("qwen2", "bf16", CROSSING),
        pytest.param("mixtral", "bf16 in fp32", CROSSING[1:4], marks=pytest.mark.not_on_device(UNALIGNED)),
    ],
)
def test_crossing_stages(pool: RankPool, kind: str, dtype: str, path: list[Layout]) -> None:
    """A dense layer between, shared experts; a start with experts apart, uneven data, no ZeRO; BF16_Optimizer."""
    axis_walks.compare(pool, partial(autoep, kind), path, dtype)


OPTIONS: dict[str, Any] = {"top_k": 1, "use_grouped_mm": False, "combine_impl": "legacy_bmm"}


def answered(options: dict[str, Any]) -> Answer | None:
    """What a model that starts on two experts' ranks says to the probe."""
    subject = autoep(preset_model="mixtral", **options)
    with axis_walks.started(subject, "fp32", at(2, 2, 2)) as made:
        next(iter(made.loader))
        return subject.probe and subject.probe(made.engine)
    return None


@pytest.mark.full
def test_options_of_the_layers(pool: RankPool) -> None:
    """What the user says of AutoEP's layers holds at every size."""
    path = [at(2, 2, 2), at(4, 4, 2), at(4, 1, 2)]
    axis_walks.compare(pool, partial(autoep, preset_model="mixtral", **OPTIONS), path)
    plain, other = (pool.run(answered, options=options)[0] for options in ({}, OPTIONS))
    assert plain.experts != other.experts


# ---- the start ------------------------------------------------------------------------------------------------------


def settings(layout: dict[str, int], **block: Any) -> dict[str, Any]:
    """A configuration that starts in a layout."""
    made = jobs.config("fp32", (layout["data"], layout["zero_stage"]))
    made["dynatrain"]["layout"] = layout
    return {**made, "expert_parallel": {"enabled": True, **block}}


def started(stage: int, how: str) -> list[str]:
    """The first weights are those of the user's model; names of the optimizer's groups."""
    model = autoep_model("mixtral")
    values = models.autoep_values(model)
    given = settings({"data": 4, "zero_stage": stage}, autoep_size=2)
    arguments: dict[str, Any] = {}
    if how == "lists":
        arguments["model_parameters"] = [{"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}]
    if how == "function":
        arguments["optimizer"] = lambda held: torch.optim.AdamW(
            split_params_into_different_moe_groups_for_optimizer({"params": held, "name": "all"}), lr=1e-3
        )
    with jobs.job(given, model, Sequences(24), groups=False, **arguments) as made:
        engine = made.engine
        assert engine.layout == at(4, 2, stage)
        state = oracle.gather(engine, places)
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
    words = r"expert is 2 and expert_parallel\.autoep_size is 4"
    with pytest.raises(ConfigError, match=words), jobs.job(settings(start, autoep_size=4)):
        pass
    model = autoep_model("mixtral")
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        pytest.raises(UnsupportedError, match="optimizer group 0 holds experts and is not marked"),
        jobs.job(settings(start), model, groups=False, optimizer=client),
    ):
        pass
    model = autoep_model("mixtral").to("meta")
    with (
        pytest.raises(UnsupportedError, match="on the meta device; build the model outside of"),
        jobs.job(settings(start), model, groups=False),
    ):
        pass


def test_what_cannot_start(pool: RankPool) -> None:
    """Sizes that disagree, a client's optimizer that mixes experts and others, a model without memory."""
    pool.run(refused_starts)


# ---- what must not be, and what must not stay -----------------------------------------------------------------------


def refused_and_chained() -> tuple[int, list[str]]:
    """Ask for what cannot be; then switch to and fro: nothing of the modules before stays."""
    given = settings({"data": 4, "zero_stage": 1})
    with jobs.job(given, autoep_model("mixtral"), Sequences(12 * 14), groups=False) as made:
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


@pytest.mark.full
def test_nothing_of_the_old_experts_stays(pool: RankPool) -> None:
    """After twelve switches; and sizes that the model cannot take are refused before them."""
    for alive, outcomes in pool.run(refused_and_chained, seconds=120):
        assert outcomes == ["committed"] * 12
        assert alive == 0
