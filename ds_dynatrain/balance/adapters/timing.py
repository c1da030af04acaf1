"""The clock by which passes and optimizer steps are timed, and what was timed on one rank.

On a CPU it is the time of this thread: wall time on cores that others share says little. On an accelerator a moment is
an event on the present stream, which is read once the device has reached it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynatrain.adapters.device import is_accelerated

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageTimes:
    """What was timed on one rank. forward, backward: [passes, layers of the stage], seconds.

    step_seconds: of the optimizer, norms and messages not included, for `stepped` elements. output_bytes: of each
    layer's output for one micro-batch. kept_bytes: of what its forward pass leaves for the backward pass; with
    activation checkpointing the inputs of what is computed again; 0 for a layer that is compiled.

    load_seconds, message_seconds, beside_seconds: see `balance.profile.Profile`; of the thread, so 0 on accelerators.
    """

    forward: Floats
    backward: Floats
    step_seconds: float
    stepped: int
    output_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    load_seconds: float = 0.0
    message_seconds: float = 0.0
    beside_seconds: float = 0.0


def now() -> Any:
    """A moment on this thread's clock, or on the device's."""
    if not is_accelerated():
        return time.thread_time()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Seconds; of events the device must have reached the second."""
    return end - begin if isinstance(begin, float) else 1e-3 * float(begin.elapsed_time(end))


class UpdateTimer:
    """What an optimizer's steps take. optimizer: the one that steps the elements, without ZeRO."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._took: list[tuple[Any, Any]] = []
        self._began: Any = None
        self.stepped = 0
        """Elements, in all steps."""

    @property
    def seconds(self) -> float:
        """The time of all steps; the device must have done them."""
        return sum(between(*each) for each in self._took)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the optimizer's steps in this block."""
        with ExitStack() as stack:
            for handle in (
                self._optimizer.register_step_pre_hook(self._before_step),
                self._optimizer.register_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            yield

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        self.stepped += sum(each.numel() for each in held if each.grad is not None)
        self._began = now()

    def _after_step(self, *_: Any) -> None:
        self._took.append((self._began, now()))
