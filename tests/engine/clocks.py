"""Clocks that are told how long things take, instead of looking: the same on any machine, and nobody waits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from ds_dynatrain.balance.adapters import timing
from ds_dynatrain.balance.window import StepSeconds

TICK = 1e-5
"""Seconds that each look at a counted clock takes."""
STEP = 0.5
"""Seconds that a step is said to take."""
CLOCKS = [pytest.param(True, id="said"), pytest.param(False, id="by the clock", marks=pytest.mark.full)]
"""Where ranks share cores the clock also has what others do to them; told times say the same on any machine."""


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
def clock(said: bool, step_seconds: Callable[[], float] = lambda: STEP) -> Iterator[None]:
    """That of this machine, or one that is told: layers take what they burn, and each step what `step_seconds` says."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(timing, "waited", lambda: 0.0))  # ranks of a test wait for each other's cores
        if said:
            stack.enter_context(counted_clock())
            stack.enter_context(said_to_take(step_seconds))
        yield
