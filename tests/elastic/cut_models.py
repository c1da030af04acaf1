"""Models that jobs build under `deepspeed.zero.Init`, as they are when they are built plainly."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.models import WORDS

SEED = 11
MEGABYTE = 1 << 20
LLAMA: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 256,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""20 MB in bfloat16."""


def save_pretrained(folder: Path, **sizes: int) -> dict[str, torch.Tensor]:
    """A Llama in bfloat16, its output tied to its embedding, in several files; its weights by name."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | sizes)).bfloat16()
    model.save_pretrained(folder, max_shard_size="3MB")
    return {name: held.detach() for name, held in model.named_parameters()}


class Layers(nn.Module):
    """75 MB, called as `model(inputs, targets)` for a loss.

    It has a parameter of its own, tied ones and a buffer, and draws its layers once more when it has them all.
    """

    def __init__(self, width: int = 1024, depth: int = 18) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.out = nn.Linear(width, WORDS, bias=False)
        self.out.weight = self.words.weight
        self.apply(self._redraw)

    def _redraw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.words(inputs)
        for layer in self.layers:
            hidden = hidden + self.scale * torch.tanh(layer(hidden))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten())


def layers(**sizes: int) -> Layers:
    """From a seed."""
    torch.manual_seed(SEED)
    return Layers(**sizes)


def digests(values: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of the bytes of each, by name."""
    return {
        name: hashlib.blake2b(held.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, held in values.items()
    }
