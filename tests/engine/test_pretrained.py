"""Language models of transformers: from training to `from_pretrained`, and from `save_pretrained` to training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import axis_walks, oracle
from tests.engine.language_models import MODELS, transformers
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model
from tests.engine.test_conversions import converted
from tests.engine.test_converted import ours
from tests.engine.transitions import layout

TOKENS = torch.arange(12).view(2, 6)


def saving_case(name: str, folder: Path) -> oracle.State | None:
    subject = language_model(name)
    with axis_walks.started(subject, "bf16", layout("d2z3")) as made:
        if made.engine.idle:
            return None
        for _, batch in zip(range(2), made.loader, strict=False):
            subject.step(made.engine, batch)
        made.engine.save(folder)
        return oracle.gather(made.engine)
    return None


def loading_case(name: str, folder: Path) -> Any:
    subject = language_model(name)
    with axis_walks.started(subject, "bf16", layout("d2t2z1")) as made:
        if made.engine.idle:
            return None
        made.engine.load(folder)
        state = oracle.gather(made.engine, subject.places)
        subject.step(made.engine, next(iter(made.loader)))
        return state
    return None


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama tied", marks=pytest.mark.full)])
def test_from_pretrained(pool: RankPool, tmp_path: Path, name: str) -> None:
    state = pool.run(saving_case, name=name, folder=tmp_path / "ours")[0]
    (tmp_path / "pretrained").mkdir()
    MODELS[name]().config.save_pretrained(tmp_path / "pretrained")
    assert "pretrained/model.safetensors" in converted(tmp_path / "ours", str(tmp_path / "pretrained"))
    found, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "pretrained", dtype="auto", output_loading_info=True
    )
    assert not any(said.values()), said
    for parameter, held in found.named_parameters():
        assert torch.equal(held.flatten(), state.tensors[parameter, "weight"].flatten()), parameter
    assert torch.isfinite(found(TOKENS).logits).all()


@pytest.mark.parametrize("name", ["llama tied", pytest.param("qwen2", marks=pytest.mark.full)])
def test_from_what_transformers_saved(pool: RankPool, tmp_path: Path, name: str) -> None:
    """In several files with an index; loaded by tensor ranks, too."""
    model = MODELS[name]()
    with torch.no_grad():
        for held in model.parameters():
            held.mul_(3)
    model.save_pretrained(tmp_path / "pretrained", max_shard_size="10KB")
    assert (tmp_path / "pretrained" / "model.safetensors.index.json").is_file()
    ours(tmp_path / "pretrained", tmp_path / "ours")
    for state in pool.run(loading_case, name=name, folder=tmp_path / "ours"):
        for parameter, held in model.named_parameters():
            assert torch.equal(state.tensors[parameter, "master"], held.detach().flatten()), parameter
