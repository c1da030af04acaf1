"""A small language model with all that a layout can trip over, and a data set that is the same everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 23
LENGTH = 6


class Block(nn.Module):
    """Causal mixing and an MLP of odd sizes; `dropout` draws from torch's default stream."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        steps = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device).view(1, -1, 1)
        mixed = hidden + self.mix(torch.cumsum(normed, 1) / steps)
        return mixed + self.drop(self.down(F.gelu(self.up(mixed))))


class SmallGPT(nn.Module):
    """Tied embedding, a frozen parameter, norms and biases of odd sizes, a buffer; a BatchNorm if asked for."""

    def __init__(
        self, width: int = 15, hidden: int = 21, depth: int = 2, dropout: float = 0.0, norm: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList([Block(width, hidden, dropout) for _ in range(depth)])
        self.batch_norm = nn.BatchNorm1d(width) if norm else None
        self.last_norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(width, WORDS, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch of token ids, both of shape (batch, LENGTH)."""
        if self.training:
            self.calls += 1
        hidden = self.words(inputs) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        if self.batch_norm is not None:
            hidden = self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2)
        logits = self.out(self.last_norm(hidden) * self.scale)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def small_gpt(seed: int = 7, **sizes: object) -> SmallGPT:
    """The model, with the same weights on every rank; the caller's random stream is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SmallGPT(**sizes)  # type: ignore[arg-type]


def decay_groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, object]]:
    """Two optimizer groups: matrices decay, vectors do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in trainable if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def named_groups(model: nn.Module) -> list[dict[str, object]]:
    """Two groups by name, of what is trained: parameters of `zero.Init` or on the meta device tell no dims."""
    trainable = [(name, held) for name, held in model.named_parameters() if held.requires_grad]
    return [
        {"params": [held for name, held in trainable if "norm" not in name], "weight_decay": 0.1},
        {"params": [held for name, held in trainable if "norm" in name], "weight_decay": 0.0},
    ]


class Sequences(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`length` pairs of token sequences; sample i is the same in every process."""

    def __init__(self, length: int = 96, tokens: int = LENGTH, words: int = WORDS) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randint(0, words, (length, tokens), generator=generator)
        self.words = words

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.inputs[index]
        return inputs, (inputs * 5 + torch.roll(inputs, 1)) % self.words
