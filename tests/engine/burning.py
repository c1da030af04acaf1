"""Layers that take a known processor time in each pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

WIDTH = 4


def burn(seconds: float) -> None:
    """Processor time of this thread."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


class Burn(torch.autograd.Function):
    """Burns processor time in the backward pass, and notes in which thread that is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, seen: list[int]) -> torch.Tensor:
        ctx.given = seconds, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        seconds, seen = ctx.given
        seen.append(threading.get_ident())
        burn(seconds)
        return gradient, None, None


class Burning(nn.Module):
    """A matrix, and known times in both passes. pairs: it hands a second tensor on as it is."""

    def __init__(self, forward: float, backward: float, pairs: bool = False) -> None:
        super().__init__()
        self.matrix, self.seconds, self.pairs = nn.Linear(WIDTH, WIDTH), (forward, backward), pairs

    def forward(self, given: Any) -> Any:
        hidden, *others = given if isinstance(given, tuple) else (given,)
        burn(self.seconds[0])
        made = Burn.apply(self.matrix(hidden), self.seconds[1], [])
        return (made, *(others or [hidden * 2])) if self.pairs else made


class Points(torch.utils.data.Dataset[Any]):
    """Always the same."""

    def __len__(self) -> int:
        return 12_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(WIDTH), torch.zeros(WIDTH)


def burning(seconds: Sequence[float]) -> PipelineModule:
    """Layers of these forward seconds, and twice as many backward."""
    return PipelineModule([LayerSpec(Burning, each, 2 * each) for each in seconds], num_stages=1, loss_fn=nn.MSELoss())
