"""Exact jobs whose activations are computed again in the backward pass, and models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.engine import exactly, jobs, language_models
from tests.engine.exactly import NOT_ON_DEVICE, Bits, differences, together
from tests.engine.models import WORDS, Block
from tests.engine.pool import RankPool
from tests.engine.test_exact import SWITCHES, WORLDS

FULL = pytest.mark.full
STREAM = "blocks"
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}


class Checkpointed(nn.Module):
    """Blocks with dropout, each run by `style`; `tracked`: some of it is drawn from a stream of DeepSpeed's tracker."""

    def __init__(self, style: str, tracked: bool, width: int = 15) -> None:
        super().__init__()
        self.style, self.tracked = style, tracked
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width, 21, dropout=0.3) for _ in range(3)])
        self.out = nn.Linear(width, WORDS)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        hidden = self.words(inputs)
        for block in self.blocks:
            hidden = self._run(block, hidden)
        return functional.cross_entropy(self.out(hidden).flatten(0, 1).float(), targets.flatten())

    def _run(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        def inside(hidden: torch.Tensor) -> Any:
            hidden = functional.dropout(hidden, 0.1)
            with get_cuda_rng_tracker().fork(STREAM) if self.tracked else nullcontext():
                return block(hidden)

        if self.style == "deepspeed":
            return deepspeed.checkpointing.checkpoint(inside, hidden)
        if self.style == "deepspeed, not reentrant":
            return checkpointing.non_reentrant_checkpoint(inside, hidden)
        if self.style.startswith("torch"):
            return checkpoint(inside, hidden, use_reentrant=self.style == "torch, reentrant")
        return inside(hidden)


def checkpointed(style: str, tracked: bool) -> Checkpointed:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Checkpointed(style, tracked)


def case(style: str, tracked: bool, start: jobs.Sizes, options: dict[str, Any] | None = None, **more: Any) -> Bits:
    """The tracker's stream begins as another one on each rank."""
    get_cuda_rng_tracker().reset()
    try:
        deepspeed.checkpointing.configure(None, **(options or {}))
        get_cuda_rng_tracker().add(STREAM, 70 + torch.distributed.get_rank())
        return exactly.run(start, model=partial(checkpointed, style, tracked), **more)
    finally:
        get_cuda_rng_tracker().reset()
        checkpointing._configure_defaults()


def plain(pool: RankPool, tracked: bool, **more: Any) -> Bits:
    """Nothing is computed again: the masks that all others must have. One rank, stage 1."""
    return together(pool.once(case, style="none", tracked=tracked, start=(1, 1), **more))


IN_ONE_BUFFER = {"partition_activations": True, "contiguous_checkpointing": True}
STYLES: dict[str, dict[str, Any]] = {
    "none": {"style": "none", "tracked": True},
    "torch": {"style": "torch", "tracked": False},
    "torch, reentrant": {"style": "torch, reentrant", "tracked": False},
    "deepspeed": {"style": "deepspeed", "tracked": True},
    "deepspeed, not reentrant": {"style": "deepspeed, not reentrant", "tracked": True},
    "deepspeed, by parts": {
        "style": "deepspeed",
        "tracked": True,
        "options": {"partition_activations": True, "checkpoint_in_cpu": True},
    },
    "deepspeed, in one buffer": {
        "style": "deepspeed",
        "tracked": True,
        "options": {**IN_ONE_BUFFER, "num_checkpoints": 3, "profile": True, "synchronize": True},
    },
}


@pytest.mark.full
@NOT_ON_DEVICE
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "deepspeed" else FULL) for name in STYLES])
def test_what_is_computed_again_has_the_masks_of_its_leaf(pool: RankPool, name: str) -> None:
    style = STYLES[name]
    found = together(pool.run(case, start=(2, 1), schedule=SWITCHES, **style))
    assert differences(plain(pool, style["tracked"]), found) == []


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("precision", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["torch", "torch, reentrant", "deepspeed"])
def test_in_all_worlds(pool: RankPool, name: str, precision: dict[str, Any]) -> None:
    style = STYLES[name]
    for start in WORLDS:
        found = together(pool.run(case, start=start, **style, **precision))
        assert differences(plain(pool, style["tracked"], **precision), found) == [], start


# ---- models of transformers --------------------------------------------------------------------------------------


class Language(nn.Module):
    """A model of transformers as one of (inputs, targets). again: the library computes its layers again."""

    def __init__(self, name: str, again: bool, dropout: float) -> None:
        super().__init__()
        self.inner = language_models.MODELS[name]()
        if again:
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = dropout
            if hasattr(part, "attention_dropout"):
                part.attention_dropout = dropout

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next words."""
        loss: torch.Tensor = self.inner(input_ids=inputs, labels=inputs).loss
        return loss


def language_model(name: str, again: bool, dropout: float) -> nn.Module:
    """The same on every rank."""
    with torch.random.fork_rng():
        return Language(name, again, dropout)


def language_case(name: str, start: jobs.Sizes, again: bool = False, dropout: float = 0.1, **more: Any) -> Bits:
    """As `exactly.run`."""
    return exactly.run(start, model=partial(language_model, name, again, dropout), **more)


FAMILIES = ("llama", "llama tied", "gpt2")
RUN: Callable[..., Any] = language_case


@pytest.mark.full
@NOT_ON_DEVICE
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "llama" else FULL) for name in FAMILIES])
def test_live_switches_of_language_models(pool: RankPool, name: str) -> None:
    found = together(pool.run(RUN, name=name, start=(2, 1), schedule=SWITCHES, again=True))
    assert differences(together(pool.once(RUN, name=name, start=(1, 1))), found) == []


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("precision", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_language_models_in_all_worlds(pool: RankPool, name: str, precision: dict[str, Any]) -> None:
    first = together(pool.once(RUN, name=name, start=(1, 1), **precision))
    for start in WORLDS[1:]:
        found = together(pool.run(RUN, name=name, start=start, again=start[0] % 2 == 0, **precision))
        assert differences(first, found) == [], start
