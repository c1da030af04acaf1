"""Where training stands in its data: a place in global batches, which is the same in every world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_dynatrain.errors import DataError


@dataclass(frozen=True, order=True)
class Cursor:
    """The first global batch that has not been dealt in full: batch `step` of epoch `epoch`, both from 0.

    `step` may equal the number of global batches of an epoch: all are dealt, and the loop over them has not ended yet.
    """

    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            raise DataError(
                f"a position in the data cannot be negative: epoch {self.epoch}, step {self.step}; give what "
                "state_dict() returned"
            )

    def advance(self) -> Cursor:
        """The next global batch of the same epoch."""
        return Cursor(self.epoch, self.step + 1)

    def next_epoch(self) -> Cursor:
        """The first global batch of the next epoch."""
        return Cursor(self.epoch + 1, 0)

    def to_dict(self) -> dict[str, int]:
        """Plain integers, for a checkpoint or the carry."""
        return {"epoch": self.epoch, "step": self.step}

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> Cursor:
        """The inverse of `to_dict`; `DataError` if a field is missing or no integer."""
        fields = {name: state.get(name) for name in ("epoch", "step")}
        numbers = {name: value for name, value in fields.items() if isinstance(value, int)}
        if len(numbers) < len(fields):
            raise DataError(
                f"a position in the data needs the integers epoch and step, not {fields}; give what state_dict() "
                "returned"
            )
        return cls(**numbers)
