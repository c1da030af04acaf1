"""Language models of transformers at toy sizes, from configurations: nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import ParamAffineMap
from torch import nn

from tests.engine.oracle import Place

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

WORDS = 50

SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Two query heads of 8 for each of two key-value heads."""


def _of(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
        name = next(name for name in (f"{kind}ForCausalLM", f"{kind}LMHeadModel") if hasattr(transformers, name))
        model: nn.Module = getattr(transformers, name)(config)
        with torch.no_grad():
            for held in model.parameters():
                held.add_(torch.randn_like(held) * 0.1)  # away from zeros and ones, and from a uniform attention
        return model

    return build


_GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}

MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": _of("Llama"),
    "llama of 4 kv": _of("Llama", num_key_value_heads=4),
    "llama tied": _of("Llama", tie_word_embeddings=True),
    "qwen2": _of("Qwen2"),
    "qwen3": _of("Qwen3", head_dim=8, tie_word_embeddings=True),
    "mistral": _of("Mistral", intermediate_size=45),
    "neox": _of("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
    "gpt2": _of("GPT2", **_GPT2),
    "bloom": _of("Bloom", n_layer=2, n_head=4),
}
"""By name. "qwen3" normalizes heads, and ties its output to its embedding; "qwen2" has biases, "neox" fused QKV."""


def tokens(step: int, samples: int = 4, length: int = 8) -> torch.Tensor:
    """A batch of token ids that only the step decides."""
    return torch.randint(0, WORDS, (samples, length), generator=torch.Generator().manual_seed(step))


def places(engine: Any) -> dict[str, Place]:
    """Where local parameters lie by DeepSpeed's own maps: what of a row of numbers they would hold."""
    found = {}
    size = engine.layout.tensor
    for name, held in engine.module.named_parameters():
        written = getattr(held, "ds_autotp_universal_checkpoint_meta", None)
        described = written and written["conversion"].get("affine_map")
        if described is not None:
            whole = ParamAffineMap.from_dict(described)
            numbers = torch.arange(whole.numel).view(whole.logical_shape)
            found[name] = Place(name, whole.extract(numbers, engine.rank % size).flatten(), whole.numel)
    return found
