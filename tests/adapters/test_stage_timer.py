"""What the timer of a stage relies on of torch, and what it makes of passes whose times are known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda run, x: run(x),
    "torch, reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "torch": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "deepspeed": lambda run, x: deepspeed.checkpointing.non_reentrant_checkpoint(run, x),
}


class Noting(torch.autograd.Function):
    """Burns processor time in the backward pass, and notes in which thread that is."""

    seen: list[int]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[int], seconds: float) -> torch.Tensor:
        ctx.given = seen, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        seen, seconds = ctx.given
        seen.append(threading.get_ident())
        burn(seconds)
        return gradient, None, None


def burn(seconds: float) -> None:
    """Processor time of this thread."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


@pytest.mark.parametrize("way", WAYS)
def test_the_backward_pass_on_a_cpu_runs_in_the_calling_thread(way: str) -> None:
    seen: list[int] = []
    linear = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    out = WAYS[way](lambda given: Noting.apply(linear(given), seen, 0.02), x)
    begin = time.thread_time()
    out.sum().backward()
    took = time.thread_time() - begin
    assert seen == [threading.get_ident()]
    assert 0.02 <= took < 0.03
