"""What the passes of a model without stages take on this rank, in the steps that are timed: the model is one layer.

On a CPU that is the time of the thread that trains, which does not run where it waits for others. On an accelerator the
stream may wait for messages between the two moments, and that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from ds_dynatrain.adapters.device import synchronize
from ds_dynatrain.balance.adapters.timing import Floats, StageTimes, UpdateTimer, between, now

_Pass = tuple[Any, Any, float]
"""Begin and end of a pass, and its samples as a share of a micro-batch."""


class PassTimer:
    """The clock of the model that an engine has now. optimizer: the one that steps the elements, without ZeRO."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._passes: tuple[list[_Pass], list[_Pass]] = [], []
        self._updates = UpdateTimer(optimizer)

    def timing(self) -> AbstractContextManager[None]:
        """Do nothing: a step is several calls."""
        return nullcontext()

    @contextmanager
    def passing(self, is_backward: bool, share: float) -> Iterator[None]:
        """Time a pass. share: its samples, by those of a micro-batch as the profile counts them."""
        begin = now()
        yield
        self._passes[is_backward].append((begin, now(), share))

    def updating(self) -> AbstractContextManager[None]:
        """Time the optimizer's step."""
        return self._updates.timing()

    def times(self) -> StageTimes:
        """Return the times of all passes so far, once the device has done them."""
        synchronize()
        forward, backward = (self._seconds(each) for each in self._passes)
        return StageTimes(forward, backward, self._updates.seconds, self._updates.stepped, (0,), (0,))

    @staticmethod
    def _seconds(passes: list[_Pass]) -> Floats:
        """[passes, 1] of a whole micro-batch each; those that have no sample of their own count nothing."""
        found = [between(begin, end) / share for begin, end, share in passes if share]
        return np.array(found, dtype=np.float64).reshape(-1, 1)
