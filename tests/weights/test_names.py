"""Names, shapes and values of what leaves the trainer, held against what transformers and peft save themselves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_dynatrain import weights
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, mixtures
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model
from tests.engine.transitions import layout
from tests.weights import cases


def full_case(find: cases.Find, at: Layout, names: Any = "hf") -> dict[str, torch.Tensor] | None:
    """What a source gives before the first step."""
    with axis_walks.started(find(), "bf16", at) as made:
        if made.engine.idle:
            return None
        return {name: held.clone() for name, held in weights.source(made.engine, names).iter_full()}
    return None


def saved_by_transformers(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the files that a model saves itself."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return {name: held.bfloat16() for file in folder.glob("*.safetensors") for name, held in load_file(file).items()}


NAMED = {
    "llama tied": (partial(language_model, "llama tied"), "d2t2z3"),
    "gpt2": (partial(language_model, "gpt2"), "d2z3"),
    "qwen3": (partial(language_model, "qwen3"), "d2t2z1"),
    "neox": (partial(language_model, "neox"), "d3z3"),
    "mixtral": (partial(mixtures.autoep, "mixtral"), "d4e2z1"),
    "qwen2 of experts": (partial(mixtures.autoep, "qwen2"), "d4e4z3"),
    "qwen3 of experts": (partial(mixtures.autoep, "qwen3"), "d2z2"),
}
FEW = "llama tied", "mixtral"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in NAMED])
def test_as_transformers_saves(pool: RankPool, tmp_path: Path, name: str) -> None:
    find, short = NAMED[name]
    found = pool.run(full_case, find=find, at=layout(short))[0]
    wanted = saved_by_transformers(find().build(), tmp_path)
    assert {name: tuple(held.shape) for name, held in found.items()} == {
        name: tuple(held.shape) for name, held in wanted.items()
    }
    assert cases.differing(found, {name: held.flatten() for name, held in wanted.items()}) == []
