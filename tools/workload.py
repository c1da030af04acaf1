"""The job that the measurements train: a GPT of a given size, samples that cost nothing, and DeepSpeed's
configuration.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn
from torch.nn import functional as F

import ds_dynatrain
from ds_dynatrain.comparison.workload import TransformerBlock

CONTEXT = 256
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "vocabulary": 512},
    "8M": {"layers": 6, "width": 320, "heads": 5, "vocabulary": 997},
    "25M": {"layers": 12, "width": 384, "heads": 8, "vocabulary": 8192},
    "30M": {"layers": 6, "width": 512, "heads": 8, "vocabulary": 20480},
    "125M": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304},
    "1.3B": {"layers": 24, "width": 2048, "heads": 16, "vocabulary": 50304},
}
"""Shapes by name: 29.6, 124 and 1312 million parameters, with a tied embedding as in GPT-2. "25M" is the shape of the
samples for the models of `axes.py`."""


class GPT(nn.Module):
    """A GPT that returns the loss of predicting each next token of a (batch, length) tensor."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Trainer:
    """An engine with its loader."""

    def __init__(self, engine: Any, loader: Any) -> None:
        self._engine = engine
        self._batches: Iterator[Any] = iter(loader)

    def step(self) -> tuple[float, float]:
        """Wait for the other ranks, and train one step. Return its (wall, processor) seconds, including data
        loading.
        """
        td.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(self._engine.gradient_accumulation_steps()):
            self._engine.backward(self._engine(next(self._batches)))
            self._engine.step()
        return time.perf_counter() - wall, time.process_time() - processor


class Samples(torch.utils.data.Dataset[Tensor]):
    """A data set that returns the same tokens `count` times."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.count = count
        self.tokens = torch.arange(length + 1) * 7 % vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """Return the (length + 1,) tokens."""
        return self.tokens


def config(dtype: str, stage: int, batch: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration with torch's AdamW, because DeepSpeed's own needs a compiler."""
    wanted: dict[str, Any] = {
        "train_batch_size": batch,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
    }
    if dtype == "bf16":
        wanted["bf16"] = {"enabled": True}
    return wanted


def engine_in_leaves(wanted: Mapping[str, Any], block: Mapping[str, Any]) -> tuple[Any, Trainer]:
    """Return an engine over all ranks, with the same weights on each, and its `Trainer`.

    wanted: "size", "stage", "leaves" of a global batch, "samples" of a leaf, and "length" in tokens.
    block: further entries of the `dynatrain` block.
    """
    shape, stage = SIZES[wanted["size"]], wanted["stage"]
    settings = config("fp32", stage, wanted["leaves"] * wanted["samples"])
    settings |= {"train_micro_batch_size_per_gpu": wanted["samples"], "gradient_clipping": 1.0}
    block = {"layout": {"data": td.get_world_size(), "zero_stage": stage}, **block}
    torch.manual_seed(0)
    engine, *_ = ds_dynatrain.initialize(config={**settings, "dynatrain": block}, model=GPT(**shape))
    data = Samples(10**6, wanted["length"], shape["vocabulary"])
    return engine, Trainer(engine, engine.loader(data, num_workers=0))


def quiet() -> None:
    """Use one thread per rank, and turn off DeepSpeed's log."""
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
