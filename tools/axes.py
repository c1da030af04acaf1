"""Walks over the axes other than data: for each axis, a model that has it, the changes of a lap, and a training step.

All models have twelve layers, about 25 million parameters, and bf16 weights with fp32 masters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from variants import Change, Variant

from ds_dynatrain.comparison.workload import TransformerBlock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
LAYERS, WIDTH, HEADS, KEYS, WORDS = 12, 384, 8, 4, 8192
EXPERTS = 4


def _hugging(kind: str, **sizes: int) -> nn.Module:
    """Return a model of transformers with a configuration of these sizes."""
    import transformers

    given = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    config = getattr(transformers, f"{kind}Config")(**{**given, **sizes})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def llama() -> nn.Module:
    """Return a Llama. The tensor axis cuts grouped queries, gate and up projections, and rows and columns."""
    return _hugging("Llama", intermediate_size=1024)


def mixtral() -> nn.Module:
    """Return a Mixtral with four experts in every layer."""
    return _hugging("Mixtral", intermediate_size=256, num_local_experts=EXPERTS, num_experts_per_tok=2)


def hugging_step(engine: Any, batches: Iterator[Tensor]) -> None:
    """Train one optimizer step of a transformers language model."""
    tokens = next(batches)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


class Words(nn.Module):
    """The embedding layer, which is also the last layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, width)."""
        return F.embedding(tokens, self.weight)


def guess(words: Words, hidden: Tensor) -> Tensor:
    """Return the logits, computed with the embedding matrix."""
    return hidden @ words.weight.t()


def pipeline() -> nn.Module:
    """Return a pipeline of twelve blocks whose embedding is tied to its last layer."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("words", Words),
        *(LayerSpec(TransformerBlock, WIDTH, HEADS) for _ in range(LAYERS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", Words, forward_fn=guess),
    ]
    model: nn.Module = PipelineModule(layers, num_stages=1, loss_fn=pipeline_loss)
    return model


def pipeline_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def pair(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Collate samples into (inputs, targets), as a pipeline expects."""
    tokens = torch.stack(samples)
    return tokens, tokens


def pipeline_step(engine: Any, batches: Iterator[Any]) -> None:
    """Train one global batch of a pipeline."""
    engine.train_batch(batches)


class SpreadBlock(nn.Module):
    """A transformer block whose attention spans the sequence ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = DistributedAttention(_attend, None, 2, 1)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, part of the length, width) to the same shape."""
        query, key, value = (part.unflatten(2, (self.heads, -1)) for part in self.qkv(self.norm(x)).chunk(3, 2))
        x = x + self.out(self.attention(query, key, value, 0).flatten(2))
        fed: Tensor = self.feed(x)
        return x + fed


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Compute causal attention over (batch, length, heads, size)."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class SpreadGPT(nn.Module):
    """A GPT without position embeddings, which computes the loss of this rank's part of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(SpreadBlock(WIDTH, HEADS) for _ in range(LAYERS)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of this rank's tokens."""
        logits = F.linear(self.blocks(self.tokens(tokens)), self.tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def spread_step(engine: Any, batches: Iterator[Tensor]) -> None:
    """Train one optimizer step on this rank's part of each sequence."""
    tokens = next(batches)
    inputs, targets = (
        whole.chunk(engine.sequence, 1)[engine.sequence_rank] for whole in (tokens[:, :-1], tokens[:, 1:])
    )
    engine.backward(engine(inputs, targets) / engine.sequence)
    engine.step()


def _lap(*changes: tuple[str, dict[str, int]]) -> tuple[Change, ...]:
    return changes


AXES: dict[str, Variant] = {
    "tensor": Variant(
        "bf16, Llama under AutoTP",
        "bf16",
        build=llama,
        step=hugging_step,
        start={"data": 1, "tensor": 1, "zero_stage": 1},
        lap=_lap(
            ("tensor 1→2", {"data": 1, "tensor": 2, "zero_stage": 1}),
            ("tensor 2→4", {"data": 1, "tensor": 4, "zero_stage": 1}),
            ("tensor 4→3", {"data": 1, "tensor": 3, "zero_stage": 1}),
            ("tensor 3→1", {"data": 1, "tensor": 1, "zero_stage": 1}),
            ("1→tensor 2 data 2 stage 3", {"data": 2, "tensor": 2, "zero_stage": 3}),
            ("tensor 2 data 2 stage 3→data 4 stage 1", {"data": 4, "tensor": 1, "zero_stage": 1}),
            ("data 4→tensor 4", {"data": 1, "tensor": 4, "zero_stage": 1}),
            ("tensor 4→tensor 2 data 2", {"data": 2, "tensor": 2, "zero_stage": 1}),
            ("tensor 2 data 2→1", {"data": 1, "tensor": 1, "zero_stage": 1}),
        ),
    ),
    "expert": Variant(
        "bf16, Mixtral under AutoEP",
        "bf16",
        {"expert_parallel": {"enabled": True, "autoep_size": 1}},
        build=mixtral,
        step=hugging_step,
        start={"data": 4, "expert": 1, "zero_stage": 1},
        lap=_lap(
            ("expert 1→2", {"data": 4, "expert": 2, "zero_stage": 1}),
            ("expert 2→4", {"data": 4, "expert": 4, "zero_stage": 1}),
            ("expert 4→1", {"data": 4, "expert": 1, "zero_stage": 1}),
            ("expert 1→4 stage 3", {"data": 4, "expert": 4, "zero_stage": 3}),
            ("expert 4 stage 3→expert 2 stage 1", {"data": 4, "expert": 2, "zero_stage": 1}),
            ("expert 2→1", {"data": 4, "expert": 1, "zero_stage": 1}),
        ),
    ),
    "pipe": Variant(
        "bf16, a PipelineModule with a tied embedding",
        "bf16",
        {"data_types": {"grad_accum_dtype": "bf16"}, "dataloader_drop_last": True},
        build=pipeline,
        step=pipeline_step,
        collate=pair,
        start={"data": 1, "pipe": 1, "zero_stage": 1},
        lap=_lap(
            ("pipe 1→2", {"data": 1, "pipe": 2, "zero_stage": 1}),
            ("pipe 2→4", {"data": 1, "pipe": 4, "zero_stage": 1}),
            ("pipe 4→2", {"data": 1, "pipe": 2, "zero_stage": 1}),
            ("pipe 2→pipe 2 data 2", {"data": 2, "pipe": 2, "zero_stage": 1}),
            ("pipe 2 data 2→pipe 4", {"data": 1, "pipe": 4, "zero_stage": 1}),
            ("pipe 4→1", {"data": 1, "pipe": 1, "zero_stage": 1}),
        ),
    ),
    "sequence": Variant(
        "bf16, Ulysses attention",
        "bf16",
        build=SpreadGPT,
        step=spread_step,
        start={"data": 1, "sequence": 1, "zero_stage": 1},
        lap=_lap(
            ("sequence 1→2", {"data": 1, "sequence": 2, "zero_stage": 1}),
            ("sequence 2→data 2", {"data": 2, "sequence": 1, "zero_stage": 1}),
            ("data 2→data 2 sequence 2", {"data": 2, "sequence": 2, "zero_stage": 1}),
            ("data 2 sequence 2→sequence 4 stage 3", {"data": 1, "sequence": 4, "zero_stage": 3}),
            ("sequence 4 stage 3→sequence 2 stage 1", {"data": 1, "sequence": 2, "zero_stage": 1}),
            ("sequence 2→1", {"data": 1, "sequence": 1, "zero_stage": 1}),
        ),
    ),
}
"""The models and changes of each axis, keyed by axis."""
