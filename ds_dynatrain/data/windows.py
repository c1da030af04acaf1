"""Global batches as one object each: for whoever draws all micro-batches of a step before the first pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ds_dynatrain.data.batch import Slot


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass is about.

    data: what the data set and `collate_fn` made. slot: which samples of the global batch these are, and what they
    weigh. is_last: of this rank's micro-batches of the global batch. generation: of the world that deals it.
    """

    data: Any
    slot: Slot
    is_last: bool
    generation: int

    @property
    def samples(self) -> int:
        """Samples of its own; 0 for one that repeats another's sample."""
        return self.slot.samples

    @property
    def is_borrowed(self) -> bool:
        """Whether it has no sample of its own: it counts nothing."""
        return self.slot.is_borrowed

    @property
    def weight(self) -> float:
        """What the mean of its losses is multiplied by, so that the gradient is the mean over all samples."""
        return self.slot.weight


class Drawing(Protocol):
    """A pass that can give whole global batches."""

    def next_window(self) -> tuple[MicroBatch, ...]: ...


@dataclass(frozen=True)
class Windows:
    """A train loader whose items are global batches: this rank's micro-batches of one optimizer step.

    There are as many of them in every world. Each `iter` is a pass over the loader, and whatever holds for that holds
    here. begin: makes one. steps: global batches of an epoch.
    """

    begin: Callable[[], Drawing]
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> WindowPass:
        return WindowPass(self.begin())


class WindowPass(Iterator[tuple[MicroBatch, ...]]):
    """The iterator of `Windows`."""

    def __init__(self, batches: Drawing) -> None:
        self._pass = batches

    def __next__(self) -> tuple[MicroBatch, ...]:
        return self._pass.next_window()
