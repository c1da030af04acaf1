"""Models that a scenario names, with their data and the way that a script trains each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, LENGTH, SAMPLES, WIDTH = 23, 12, 60, 24
Batch = Sequence[torch.Tensor]
"""Numbers of samples, token ids, and the ids to predict."""


class Texts(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
    """Token sequences that are the same in every process, each with its number unless `numbered` is false."""

    def __init__(self, numbered: bool = True) -> None:
        self.inputs = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
        self.targets = (self.inputs * 5 + self.inputs.roll(1, 1)) % WORDS
        self.numbered = numbered

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        sample = self.inputs[index], self.targets[index]
        return (torch.tensor(index), *sample) if self.numbered else sample


class Block(nn.Module):
    """Causal mixing of tokens and an MLP whose width no number of ranks divides."""

    def __init__(self, width: int = WIDTH - 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 37), nn.Linear(37, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype).view(1, -1, 1)
        mixed = hidden + self.mix(torch.cumsum(self.norm(hidden), 1) / places)
        fed: torch.Tensor = mixed + self.drop(self.down(F.gelu(self.up(mixed))))
        return fed


class GPT(nn.Module):
    """Two blocks with a tied embedding, a frozen parameter and a buffer that counts calls."""

    calls: torch.Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        width = WIDTH - 1
        self.words = nn.Embedding(WORDS, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(2)])
        self.last = nn.LayerNorm(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.words(inputs) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.last(hidden), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Causal attention over (batch, length, heads, size)."""
    turned = [part.transpose(1, 2) for part in (query, key, value)]
    return F.scaled_dot_product_attention(turned[0], turned[1], turned[2], is_causal=True).transpose(1, 2)


class UlyssesBlock(nn.Module):
    """Attention over the whole sequence, an MLP over this rank's part of it."""

    def __init__(self) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH)
        self.spread = DistributedAttention(attend, None, scatter_idx=2, gather_idx=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(2, (4, -1)) for part in self.qkv(self.norm(hidden)).chunk(3, 2))
        hidden = hidden + self.out(self.spread(*parts, 0).flatten(2))
        fed: torch.Tensor = hidden + self.down(F.gelu(self.up(hidden)))
        return fed


class UlyssesGPT(nn.Module):
    """A language model whose attention DeepSpeed's Ulysses spreads over sequence ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.2)
        self.blocks = nn.ModuleList([UlyssesBlock(), UlyssesBlock()])

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(F.linear(hidden, self.words.weight).flatten(0, 1).float(), targets.flatten())


class Routed(nn.Module):
    """A language model with a layer of DeepSpeed's own experts, which drop no token."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 19), nn.GELU(), nn.Linear(19, WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.feed = MoE(WIDTH, expert, num_experts=4, k=1, drop_tokens=False, use_rts=False)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(inputs)
        return token_loss(self.last(hidden + self.feed(hidden)[0]), targets)


class Words(nn.Module):
    """The embedding of a pipeline, which its last layer uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH - 1) * 0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.embedding(inputs, self.weight)


def logits(words: Words, hidden: torch.Tensor) -> torch.Tensor:
    """Scores of all words, by the tied embedding."""
    return hidden @ words.weight.t()


def token_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of a micro-batch of a pipeline."""
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def pipeline() -> nn.Module:
    """Seven layers with a tied embedding, as one stage on every process."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("words", Words),
        *(LayerSpec(Block) for _ in range(4)),
        LayerSpec(nn.LayerNorm, WIDTH - 1),
        TiedLayerSpec("words", Words, forward_fn=logits),
    ]
    module: nn.Module = PipelineModule(layers, num_stages=1, loss_fn=token_loss)
    return module


def frozen() -> nn.Module:
    """The GPT with a first block that is not trained."""
    model = GPT()
    model.blocks[0].requires_grad_(False)
    return model


def language_model(kind: str, **sizes: Any) -> nn.Module:
    """A model of transformers at toy size, from a configuration."""
    import transformers

    common = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": False}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**common, **heads, **ids, **sizes})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for held in model.parameters():
            held.add_(torch.randn_like(held) * 0.1)
    return model


def plain_loss(engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss that the model itself returns."""
    loss: torch.Tensor = engine(inputs, targets)
    return loss


def logits_loss(engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a model of transformers."""
    return token_loss(engine(input_ids=inputs).logits, targets)


def part_loss(engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of this rank's part of the sequences."""
    parts = (whole.chunk(engine.sequence, 1)[engine.sequence_rank] for whole in (inputs, targets))
    return plain_loss(engine, *parts)


@dataclass(frozen=True)
class Model:
    """How a model is built, how a script gets its loss, and what its configuration needs."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = plain_loss
    config: Mapping[str, Any] | None = None
    is_pipeline: bool = False


MODELS: Mapping[str, Model] = {
    "gpt": Model(GPT),
    "gpt with dropout": Model(lambda: GPT(dropout=0.1)),
    "ulysses": Model(UlyssesGPT, part_loss),
    "moe": Model(Routed),
    "frozen": Model(frozen),
    "pipeline": Model(pipeline, is_pipeline=True),
    "llama": Model(lambda: language_model("Llama"), logits_loss),
    "mixtral": Model(
        lambda: language_model("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        logits_loss,
        {"expert_parallel": {"enabled": True}, "tensor_parallel": {"preset_model": "mixtral"}},
    ),
}


def build(name: str) -> nn.Module:
    """The model of that name with the same weights in every process."""
    torch.manual_seed(7)
    return MODELS[name].build()
