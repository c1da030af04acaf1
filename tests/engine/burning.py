"""Pipelines of layers that take a known processor time in each pass, and clocks that are told how long things take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_dynatrain.balance.steps import StepSeconds
from tools.burning import Burning

TICK = 1e-5
"""Seconds that each look at a counted clock takes."""
STEP = 0.5
"""Seconds that a step is said to take."""
CLOCKS = [pytest.param(True, id="said"), pytest.param(False, id="by the clock", marks=pytest.mark.full)]
"""Where ranks share cores the clock also has what others do to them; told times say the same on any machine."""


def burning(seconds: Sequence[float]) -> PipelineModule:
    """Layers of these forward seconds, and twice as many backward."""
    return PipelineModule([LayerSpec(Burning, each, 2 * each) for each in seconds], num_stages=1, loss_fn=nn.MSELoss())


@contextmanager
def said_to_take(seconds: Callable[[], float]) -> Iterator[None]:
    """For every step. seconds: asked after each."""
    whole = StepSeconds.add

    def add(steps: StepSeconds, _: float) -> None:
        whole(steps, seconds())

    with patch.object(StepSeconds, "add", add):
        yield


def counted_clock() -> AbstractContextManager[Any]:
    """In it the time of a thread is how often it was asked for: what burns takes its seconds, and none in truth."""
    looks = itertools.count()
    return patch.object(time, "thread_time", lambda: TICK * next(looks))


@contextmanager
def clock(said: bool, seconds: Mapping[Any, float] | None = None, engines: Sequence[Any] = ()) -> Iterator[None]:
    """That of this machine, or one that is told: layers take what they burn, and steps what is said here.

    seconds: of a step of the only engine of `engines`, by its boundaries; STEP with all others.
    """

    def of_step() -> float:
        return (seconds or {}).get(engines[0].layout.boundaries, STEP) if engines else STEP

    with ExitStack() as stack:
        if said:
            stack.enter_context(counted_clock())
            stack.enter_context(said_to_take(of_step))
        yield
