"""Layers that take a known processor time in each pass, and what a stage of them takes, measured apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
from torch import nn

from ds_dynatrain.adapters.versions.replaced import replaced

WIDTH = 4


def burn(seconds: float) -> None:
    """Processor time of this thread."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


class Burn(torch.autograd.Function):
    """Hands a tensor on, and burns processor time in the backward pass; notes in which thread that is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, seen: list[int]) -> torch.Tensor:
        """A copy. seen: gets the thread of each backward pass."""
        ctx.given = seconds, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Burn."""
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
        """[samples, WIDTH] to the same."""
        hidden, *others = given if isinstance(given, tuple) else (given,)
        burn(self.seconds[0])
        made = Burn.apply(self.matrix(hidden), self.seconds[1], [])  # type: ignore[no-untyped-call]
        return (made, *(others or [hidden * 2])) if self.pairs else made


class Points(torch.utils.data.Dataset[Any]):
    """Always the same."""

    def __len__(self) -> int:
        return 12_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(WIDTH), torch.zeros(WIDTH)


@contextmanager
def busy(engine: Any) -> Iterator[list[float]]:
    """The processor time of this rank's passes in the block, in seconds, taken around DeepSpeed's instructions."""
    found, known = [0.0], engine._INSTRUCTION_MAP

    def timed(run: Any) -> Any:
        def call(engine: Any, **given: Any) -> None:
            begin = time.thread_time()
            run(engine, **given)
            found[0] += time.thread_time() - begin

        return call

    passes = {kind: timed(known[kind]) for kind in (ForwardPass, BackwardPass)}
    with replaced(engine, _INSTRUCTION_MAP={**known, **passes}):
        yield found
