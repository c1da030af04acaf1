"""What two members send each other, message by message: of which bytes of which buffers each one is made."""

from __future__ import annotations

from dataclasses import dataclass

from ds_dynatrain.transfer.messages import messages
from ds_dynatrain.transfer.regions import Places
from ds_dynatrain.transfer.series import Matrix
from ds_dynatrain.transfer.staging import SLOTS


@dataclass(frozen=True)
class Parcel:
    """A message, and where its bytes lie: in matrices, one after another."""

    nbytes: int
    matrices: tuple[Matrix, ...]

    @property
    def is_packed(self) -> bool:
        """Whether the bytes must be put together in memory of their own."""
        return len(self.matrices) > 1 or self.matrices[0].number > 1


@dataclass(frozen=True)
class Outline:
    """One direction of an exchange."""

    places: Places
    parcels: tuple[Parcel, ...]

    @staticmethod
    def of(places: Places, chunk: int, longest: int) -> Outline:
        """The messages of moves, the same at both ends; which of them are packed is each end's own affair."""
        parcels = []
        for message in messages(places.length.tolist(), chunk, longest):
            if len(message.rows) > 1:
                parcels.append(Parcel(message.nbytes, tuple(places.matrices(message.rows))))
            else:
                (row,) = message.rows
                begin = int(places.begin[row]) + message.start
                part = Matrix(int(places.which[row]), begin, message.nbytes, 1, message.nbytes)
                parcels.append(Parcel(message.nbytes, (part,)))
        return Outline(places, tuple(parcels))

    @property
    def longest(self) -> int:
        """Bytes of its longest message."""
        return max((parcel.nbytes for parcel in self.parcels), default=0)

    @property
    def slots(self) -> int:
        """How many slots of staging it can use."""
        return min(SLOTS, sum(parcel.is_packed for parcel in self.parcels))
