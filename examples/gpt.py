"""A small GPT in plain torch, and text to train it on: the source code of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 64  # bytes in a sample
MOST_BYTES = 4_000_000  # bytes of the standard library


class Block(nn.Module):
    """A transformer block: causal attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attend(self.norm_attention(x))
        return x + self.feed(self.norm_feed(x))

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention layer's result: each position attends to itself and to earlier positions."""
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.mix(query, key, value)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of queries to keys and values, (batch, heads, length, width of a head) each."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def feed(self, x: Tensor) -> Tensor:
        """Return the feed-forward layer's result, computed for each position separately."""
        fed: Tensor = self.down(F.gelu(self.up(x)))
        return fed


class GPT(nn.Module):
    """A model that predicts each byte from the bytes before it."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predicting `y` from `x`, both (batch, length) of byte values."""
        hidden = self.byte(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A data set of `count` pieces of a text, spread evenly over it, each together with the piece one byte later."""

    def __init__(self, text: bytes, count: int, length: int = CONTEXT) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.count, self.length = count, length
        self.stride = (len(text) - length - 1) / count

    def __len__(self) -> int:
        """Return the number of pieces."""
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one piece and its continuation, both (length,) of byte values."""
        start = int(index * self.stride)
        piece = self.text[start : start + self.length + 1].long()
        return piece[:-1], piece[1:]


def texts(file: Path | None = None) -> tuple[bytes, bytes]:
    """Return (text to train on, text held out): nine tenths and one tenth of the file, or of the standard library."""
    whole = standard_library() if file is None else file.read_bytes()
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def standard_library() -> bytes:
    """Return the source files of Python's standard library as bytes, the same on every rank."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
    return bytes(text[:MOST_BYTES])
