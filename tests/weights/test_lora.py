"""Adapters of peft: merged as peft merges them, or alone, and loaded back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_dynatrain import weights
from ds_dynatrain.errors import UnsupportedError, WeightsError
from ds_dynatrain.space import Layout
from ds_dynatrain.weights import naming
from ds_dynatrain.weights.outputs import Output
from tests.engine import oracle
from tests.engine.axis_walks import Subject
from tests.engine.language_models import MODELS
from tests.engine.pool import RankPool
from tests.engine.subjects import Texts, named_step
from tests.engine.transitions import layout
from tests.weights import cases

peft = pytest.importorskip("peft")


def adapted(name: str = "llama tied") -> nn.Module:
    """A model with adapters in linear layers and the embedding, and norms that are trained as they are."""
    modules = ["c_attn"] if name == "gpt2" else ["q_proj", "down_proj", "embed_tokens"]
    saved = ["ln_f"] if name == "gpt2" else ["norm"]
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules, modules_to_save=saved)
    config.fan_in_fan_out = name == "gpt2"
    made: nn.Module = peft.get_peft_model(MODELS[name](), config)
    for parameter, held in made.named_parameters():
        if "lora_" in parameter:
            nn.init.normal_(held, std=0.1)
    return made


def subject() -> Subject:
    """The tied model."""
    return Subject(adapted, Texts, step=named_step)


def transposed() -> Subject:
    """The model whose layers keep their weights transposed."""
    return Subject(lambda: adapted("gpt2"), Texts, step=named_step)


def looking(engine: Any, subject: Subject) -> Any:
    """What the sources give, and what peft makes of the same weights; then the adapter comes back negated."""
    held = cases.expected(engine, subject)
    whole = subject.build().bfloat16()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(held[name].view(parameter.shape))
    alone = peft.get_peft_model_state_dict(whole, save_embedding_layers=False)
    wanted = whole.merge_and_unload().state_dict()  # type: ignore[operator]
    source = weights.source(engine, full_on="all")
    found = {name: tensor.clone() for name, tensor in source.iter_full()}
    wrong = cases.differing(found, {name: held.flatten() for name, held in wanted.items() if name in found})
    wrong += sorted(wanted.keys() - found.keys() - {"lm_head.weight"})
    adapters = weights.source(engine, "adapters", full_on="all")
    pairs = {name: tensor.clone() for name, tensor in adapters.iter_full()}
    wrong += cases.differing(pairs, {name: held.contiguous().flatten() for name, held in alone.items()})
    with pytest.raises(WeightsError, match="has an adapter added to it"):
        next(source.runs())
    assert sum(values.numel() for _, _, values in adapters.runs()) <= sum(each.numel() for each in pairs.values())
    before = oracle.gather(engine).tensors
    engine.load_weights((name, -held) for name, held in pairs.items())
    after = oracle.gather(engine).tensors
    for (name, kind), now in after.items():
        is_given = kind in ("weight", "master") and not name.endswith("base_layer.weight") and (name, "master") in after
        sign = -1 if is_given else 1
        wrong += [] if torch.equal(now, sign * before[name, kind].to(now)) or kind == "master" else [f"{name} {kind}"]
    return wrong


def lora_case(is_transposed: bool, path: list[Layout]) -> list[Any]:
    """Look in each layout of a path."""
    return cases.at_each(transposed if is_transposed else subject, "bf16", path, looking)


@pytest.mark.parametrize(
    ("is_transposed", "path"),
    [
        (False, "d2z3 > d3z1"),
        pytest.param(False, "d4z0 > d2z2 > d3z3", marks=pytest.mark.full),
        pytest.param(True, "d3z3 > d2z1", marks=pytest.mark.full),
    ],
)
def test_as_peft_merges_and_saves(pool: RankPool, is_transposed: bool, path: str) -> None:
    layouts = [layout(short) for short in path.split(" > ")]
    found = pool.run(lora_case, is_transposed=is_transposed, path=layouts, seconds=120)
    assert [places for places in found if any(places or ())] == []


class Parts(nn.Module):
    """A layer of each kind to which peft adds adapters that are no low-rank terms of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.attention = nn.MultiheadAttention(8, 2)
        self.linear = nn.Linear(4, 6)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"target_modules": ["conv"]}, "conv: an adapter of Conv2d"),
        ({"target_modules": ["attention"]}, "attention: an adapter of MultiheadAttention"),
        ({"target_modules": [], "target_parameters": ["linear.weight"]}, "linear: adapters of ParamWrapper"),
    ],
)
def test_what_cannot_be_merged_is_refused(config: dict[str, Any], reason: str) -> None:
    made = peft.get_peft_model(Parts(), peft.LoraConfig(r=2, **config))
    outputs = [Output(name, tuple(held.shape), (), "") for name, held in made.named_parameters()]
    with pytest.raises(UnsupportedError, match=f'{reason}.*names="adapters"'):
        naming.merged(made, outputs)
    assert len(naming.adapters(made, outputs)) >= 2
