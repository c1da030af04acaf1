"""Layers that use a known processor time in each pass, and an independent measurement of the time of a stage."""

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


def longer() -> float:
    """Return by how much burning takes longer than asked. A lowered clock replaces this function."""
    return 1.0


def burn(seconds: float) -> None:
    """Use this much processor time in this thread, or more if its clock is lowered."""
    begin, seconds = time.thread_time(), seconds * longer()
    while time.thread_time() - begin < seconds:
        pass


class Burn(torch.autograd.Function):
    """A function that copies a tensor, and uses processor time in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, seen: list[int]) -> torch.Tensor:
        """Return a copy.

        seconds: the processor time of the backward pass.
        seen: a list to which the thread of each backward pass is appended.
        """
        ctx.given = seconds, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Use the processor time, and return the gradient unchanged."""
        seconds, seen = ctx.given
        seen.append(threading.get_ident())
        burn(seconds)
        return gradient, None, None


class Burning(nn.Module):
    """A small layer with known times in both passes.

    pairs: whether it also passes a second tensor on unchanged.
    """

    def __init__(self, forward: float, backward: float, pairs: bool = False) -> None:
        super().__init__()
        self.matrix, self.seconds, self.pairs = nn.Linear(WIDTH, WIDTH), (forward, backward), pairs

    def forward(self, given: Any) -> Any:
        """Map [samples, WIDTH] to the same shape."""
        hidden, *others = given if isinstance(given, tuple) else (given,)
        burn(self.seconds[0])
        made = Burn.apply(self.matrix(hidden), self.seconds[1], [])  # type: ignore[no-untyped-call]
        return (made, *(others or [hidden * 2])) if self.pairs else made


class Points(torch.utils.data.Dataset[Any]):
    """A data set whose samples are all equal."""

    def __len__(self) -> int:
        return 12_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(WIDTH), torch.zeros(WIDTH)


@contextmanager
def busy(engine: Any) -> Iterator[list[float]]:
    """Context manager that measures the processor time of this rank's passes. Yields a list with the sum in seconds."""
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
