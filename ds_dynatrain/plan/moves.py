"""Moves: copies of runs of coordinates from one member's buffers into another's, as a struct of arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_dynatrain.space import BufferId, Kind
from ds_dynatrain.space.tensor import Ints

COLUMNS = (
    "kind",
    "start",
    "stop",
    "source",
    "target",
    "source_kind",
    "source_buffer",
    "source_offset",
    "target_buffer",
    "target_offset",
)


@dataclass(frozen=True, eq=False)
class Moves:
    """Runs to copy, as int64 arrays of one length.

    kind, source_kind: index into `kinds`. start, stop: coordinates. source, target: members. source_buffer,
    target_buffer: index into `source_buffers`, `target_buffers`; source_offset, target_offset: elements into them.
    The bytes that move are those of `source_kind`; they differ from `kind` in size only where a weight is cast from
    its master.
    """

    kind: Ints
    start: Ints
    stop: Ints
    source: Ints
    target: Ints
    source_kind: Ints
    source_buffer: Ints
    source_offset: Ints
    target_buffer: Ints
    target_offset: Ints
    kinds: tuple[Kind, ...]
    source_buffers: tuple[BufferId, ...]
    target_buffers: tuple[BufferId, ...]

    @classmethod
    def empty(
        cls, kinds: tuple[Kind, ...], source_buffers: tuple[BufferId, ...], target_buffers: tuple[BufferId, ...]
    ) -> Moves:
        """No move."""
        columns = {name: np.empty(0, np.int64) for name in COLUMNS}
        return cls(kinds=kinds, source_buffers=source_buffers, target_buffers=target_buffers, **columns)

    @classmethod
    def concatenate(cls, parts: Iterable[Moves], default: Moves) -> Moves:
        """Moves one after another; all share the tables of `default`, which is the answer for no parts."""
        filled = [part for part in parts if len(part)]
        if not filled:
            return default
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in filled]) for name in COLUMNS}
        return replace(default, **columns)

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.start)

    @property
    def itemsize(self) -> Ints:
        """Bytes of an element of each run, as it is read."""
        return np.array([kind.itemsize for kind in self.kinds], dtype=np.int64)[self.source_kind]

    @property
    def nbytes(self) -> int:
        """Bytes of all runs, as they are read."""
        return int(((self.stop - self.start) * self.itemsize).sum())

    def select(self, rows: Ints | slice) -> Moves:
        """The moves at a slice or array of row numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def only(self, kinds: Collection[str]) -> Moves:
        """The moves of some kinds."""
        is_one = np.array([kind.name in kinds for kind in self.kinds], dtype=bool)
        return self.select(np.flatnonzero(is_one[self.kind]))

    def cut(self, row: Ints, start: Ints, stop: Ints) -> Moves:
        """The parts [start[i], stop[i]) of the moves row[i], with the offsets of the parts."""
        chosen = self.select(row)
        step = start - chosen.start
        return replace(
            chosen,
            start=start,
            stop=stop,
            source_offset=chosen.source_offset + step,
            target_offset=chosen.target_offset + step,
        )

    def canonical(self) -> Moves:
        """The same elements sorted by (target, source, kind, target buffer, start), in the fewest runs.

        Runs that are neighbors on the line and in both buffers become one. Two members that reach the same elements by
        different ways get the same arrays: a sender's list equals its receiver's.
        """
        if not len(self):
            return self
        moves = self.select(np.lexsort((self.start, self.target_buffer, self.kind, self.source, self.target)))
        step = np.diff(moves.start)
        joined = moves.start[1:] == moves.stop[:-1]
        for name in ("kind", "source", "target", "source_kind", "source_buffer", "target_buffer"):
            joined &= np.diff(getattr(moves, name)) == 0
        for name in ("source_offset", "target_offset"):
            joined &= np.diff(getattr(moves, name)) == step
        first = np.flatnonzero(np.append(True, ~joined))
        last = np.append(first[1:], len(moves)) - 1
        return moves.cut(first, moves.start[first], moves.stop[last])
