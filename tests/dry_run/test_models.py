"""Models by their configuration, against those that transformers builds on the meta device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_dynatrain.dry_run.models import FAMILIES, REGISTRY, model_named, model_of
from ds_dynatrain.errors import ConfigError, LayoutError
from ds_dynatrain.space import DimCut, Layout

COMMON = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {
        **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24},
        "num_key_value_heads": 8,
    },
}
LLAMA = model_of({"model_type": "llama", **COMMON}, "tiny")
OURS = ("mlp.router", "mlp.experts", "mlp.shared_experts")
"""Parts of a layer with experts, which AutoEP names and stacks in its own way."""


def check(values: dict[str, Any]) -> None:
    """Names and shapes agree; those of layers with experts in the number of their elements."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    theirs = {name: tuple(held.shape) for name, held in model.named_parameters()}
    ours = model_of(values, "it")
    assert sum(map(math.prod, theirs.values())) == ours.parameters
    plain = {held.name: held.shape for held in ours.tensors if not any(part in held.name for part in OURS)}
    assert {name: theirs.get(name) for name in plain} == plain
    if not ours.has_experts:
        assert [*plain] == [*theirs]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_as_transformers_builds_it(family: str) -> None:
    check({"model_type": family, **COMMON, **TINY[family]})


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-0.6b", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_the_registry_has_the_shapes_of_real_models(name: str) -> None:
    check({**REGISTRY[name]})


def test_every_model_has_the_size_of_its_name() -> None:
    for name in REGISTRY:
        words = [word for word in name.split("-") if word.endswith("b") and word[:-1].replace(".", "").isdigit()]
        for word in words:
            assert model_named(name).parameters == pytest.approx(float(word[:-1]) * 1e9, rel=0.2), name


def test_tensors_are_cut_as_autotp_cuts_them() -> None:
    """The sizes are those that AutoTP of DeepSpeed 0.19.8 recorded for this configuration."""
    cuts = dict(
        zip((held.name for held in LLAMA.tensors), LLAMA.partition(Layout(tensor=3, zero_stage=1)), strict=True)
    )
    block = "model.layers.0."
    assert cuts["model.embed_tokens.weight"].tensor is None and cuts["model.norm.weight"].tensor is None
    assert cuts[f"{block}self_attn.q_proj.weight"].tensor == DimCut(0, ((32, 16, 16),))
    assert cuts[f"{block}self_attn.k_proj.weight"].tensor == DimCut(0, ((16, 8, 8),))
    assert cuts[f"{block}self_attn.o_proj.weight"].tensor == DimCut(1, ((32, 16, 16),))
    assert cuts[f"{block}mlp.down_proj.weight"].tensor == DimCut(1, ((32, 32, 32),))
    assert cuts["lm_head.weight"].tensor == DimCut(0, ((107, 107, 106),))


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    tied = model_of({"model_type": "llama", **COMMON, "tie_word_embeddings": True}, "tied")
    assert tied.partition(Layout(pipe=3, zero_stage=1))[0].stages == (0, 2)
    assert tied.partition(Layout(tensor=3, zero_stage=1))[0].tensor == DimCut(0, ((107, 107, 106),))


def test_what_a_model_cannot_have_is_refused() -> None:
    with pytest.raises(LayoutError, match="share 3 blocks"):
        LLAMA.partition(Layout(pipe=4, zero_stage=1))
    with pytest.raises(LayoutError, match="end with block 2"):
        LLAMA.partition(Layout(pipe=2, boundaries=(0, 1, 2), zero_stage=1))
    with pytest.raises(LayoutError, match="does not divide the 8 experts"):
        model_named("mixtral-8x7b").partition(Layout(data=3, expert=3, zero_stage=1))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is no known family; give one of llama"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is set"),
        ({"model_type": "llama", "vocab_size": 10}, "hidden_size is missing"),
    ],
)
def test_a_configuration_that_is_not_known_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of(values, "it")
