"""Moves: blocks of elements to copy from buffers of one member into buffers of another member, or of the same one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import BufferId, Kind, interval
from ds_dynatrain.space.interval import Ints, chains
from ds_dynatrain.space.strips import Strips, reach


@dataclass(frozen=True, eq=False)
class Moves:
    """Blocks of elements to copy, as int64 arrays with one entry per block.

    A block is `number` rows of `length` elements each. Row i begins at coordinate start + i * step, and lies at
    source_offset + i * source_step and at target_offset + i * target_step. A block of one row has steps of 0.

    kind: index into `kinds` of the state kind that is written.
    source, target: the members that send and receive.
    source_kind: index into `kinds` of the state kind that is read. Its element size differs from that of `kind` only if
    a weight is cast from its master.
    source_buffer, target_buffer: indices into `source_buffers` and `target_buffers`.
    source_offset, target_offset: the first element within these buffers.
    """

    kind: Ints
    start: Ints
    length: Ints
    number: Ints
    step: Ints
    source: Ints
    target: Ints
    source_kind: Ints
    source_buffer: Ints
    source_offset: Ints
    source_step: Ints
    target_buffer: Ints
    target_offset: Ints
    target_step: Ints
    kinds: tuple[Kind, ...]
    source_buffers: tuple[BufferId, ...]
    target_buffers: tuple[BufferId, ...]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all blocks, as read at the source."""
        itemsize = np.array([kind.itemsize for kind in self.kinds], dtype=np.int64)
        return int((self.length * self.number * itemsize[self.source_kind]).sum())

    def select(self, rows: Ints | slice) -> Moves:
        """Return the moves selected by a slice or an array of row numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def only(self, kinds: Collection[str]) -> Moves:
        """Return the moves of the given state kinds."""
        is_one = np.array([kind.name in kinds for kind in self.kinds], dtype=bool)
        return self.select(np.flatnonzero(is_one[self.kind]))

    def split(self, kinds: Collection[str], into: Collection[str] | None) -> tuple[Moves, Moves]:
        """Return (all other moves, the moves from buffers of `kinds` into buffers of `into`).

        into: the state kinds that are written; None for any kind.
        """
        is_apart = np.array([kind.name in kinds for kind in self.kinds], dtype=bool)[self.source_kind]
        if into is not None:
            is_apart &= np.array([kind.name in into for kind in self.kinds], dtype=bool)[self.kind]
        return self.select(np.flatnonzero(~is_apart)), self.select(np.flatnonzero(is_apart))

    def canonical(self) -> Moves:
        """Return the same moves sorted by (target, source, kind, target buffer, start), in the fewest blocks.

        Rows that are adjacent on the line and in both buffers are merged.
        """
        moves = self.select(np.lexsort((self.start, self.target_buffer, self.kind, self.source, self.target)))
        step = np.diff(moves.start)
        joined = (moves.number[1:] == 1) & (moves.number[:-1] == 1) & (step == moves.length[:-1])
        for name in ("kind", "source", "target", "source_kind", "source_buffer", "target_buffer"):
            joined &= np.diff(getattr(moves, name)) == 0
        for name in ("source_offset", "target_offset"):
            joined &= np.diff(getattr(moves, name)) == step
        first, last = chains(joined, len(moves))
        length = (moves.start + moves.length)[last] - moves.start[first]
        found = moves.select(first)
        return replace(found, length=np.where(found.number == 1, length, found.length))


COLUMNS = tuple(each.name for each in fields(Moves) if each.type == "Ints")


# ---- runs on the line of a switch ------------------------------------------------------------------------------------

RUNS = (
    "kind",
    "source",
    "target",
    "source_kind",
    "source_buffer",
    "target_buffer",
    "source_step",
    "target_step",
    "source_origin",
    "target_origin",
    "strip",
    "start",
    "stop",
)
"""The rows of a table of runs, each of which lies in one strip of `Sides.space.logical`.

An origin is the offset at which the strip would begin in the buffer. The parts of a run therefore differ only in start
and stop, and can be merged again.
"""


def runs(
    sides: Sides, kind: Kind, read: str, start: Ints, stop: Ints, sender: Ints, receiver: Ints, is_derived: bool = False
) -> Ints:
    """Return a table of runs to copy from buffers of kind `read` into buffers of `kind`. `RUNS` names its rows.

    sender, receiver: the source rank and the target rank of each run.
    is_derived: whether target buffers are read; then senders are target ranks.
    """
    line, target, members = sides.space.logical, sides.target(kind.name), np.array(sides.members)
    source, origins = (sides.target(read), members) if is_derived else (sides.source(read), np.array(sides.vps.members))
    row, strip, start, stop = interval.intersect(start, stop, line.start, line.stop)
    part, start, stop, buffer, offset, step = source.place(start, stop, sender[row])
    row, strip = row[part], strip[part]
    origin = offset - reach(start - line.start[strip], line.width[strip], step)
    part, start, stop, into, offset, pace = target.place(start, stop, receiver[row])
    row, strip = row[part], strip[part]
    columns = (
        sides.code[kind.name],
        origins[sender[row]],
        members[receiver[row]],
        sides.code[read],
        buffer[part],
        into,
        step[part],
        pace,
        origin[part],
        offset - reach(start - line.start[strip], line.width[strip], pace),
        strip,
        start,
        stop,
    )
    return np.stack(np.broadcast_arrays(*columns))


def for_all(sides: Sides, kinds: Sequence[Kind], table: Ints) -> Ints:
    """Repeat a table of runs for every kind in a group of state kinds that move alike."""
    written, read, tables = RUNS.index("kind"), RUNS.index("source_kind"), list[Ints]()
    first = sides.code[kinds[0].name]
    for code in (sides.code[kind.name] for kind in kinds):
        again = table.copy()
        again[written], again[read] = code, np.where(table[read] == first, code, table[read])
        tables.append(again)
    return np.concatenate(tables, axis=1)


def moves(sides: Sides, tables: Sequence[Ints], is_derived: bool = False) -> Moves:
    """Merge tables of runs into one `Moves` object, in canonical order and in the fewest blocks.

    A sender and a receiver that compute the same moves in different ways therefore get equal arrays.

    is_derived: whether the moves read from target buffers.
    """
    table = np.concatenate([np.empty((len(RUNS), 0), np.int64), *tables], axis=1)
    by_name = dict(zip(RUNS, table, strict=True))
    table = table[:, np.lexsort([by_name[name] for name in ("start", "target_buffer", "kind", "source", "target")])]
    start, stop = table[-2:]
    first, last = chains((start[1:] == stop[:-1]) & (np.diff(table[:-2]) == 0).all(axis=0), len(start))
    table = np.concatenate([table[:-1, first], stop[None, last]])
    source, target = sides.vps.buffers(sides.vps.layout), sides.vps.buffers(sides.layout)
    columns: dict[str, Any] = _blocks(sides.space.logical, dict(zip(RUNS, table, strict=True)))
    read = target if is_derived else source
    return Moves(**columns, kinds=sides.vps.kinds, source_buffers=read, target_buffers=target).canonical()


def _blocks(line: Strips, table: Mapping[str, Ints]) -> dict[str, Ints]:
    """Cut runs into blocks, and return the columns of `Moves`.

    A run becomes up to three blocks: the rest of the row in which it begins, whole rows, and the start of the last row.
    """
    begin, width = line.start[table["strip"]], line.width[table["strip"]]
    low, high = table["start"] - begin, table["stop"] - begin
    head = np.minimum(-(-low // width) * width, high)
    tail = np.maximum(high // width * width, head)
    edges = np.stack([low, head, tail, high])
    row, part = np.nonzero((edges[:-1] < edges[1:]).T)
    at, size, width = edges[part, row], edges[part + 1, row] - edges[part, row], width[row]
    number = np.maximum(size // width, 1)
    found = {name: table[name][row] for name in RUNS if name in COLUMNS}
    found |= {"length": size // number, "number": number}
    strip = table["strip"][row]
    for step, offset, origin, pace in (
        ("step", "start", line.address[strip], line.step[strip]),
        ("source_step", "source_offset", table["source_origin"][row], table["source_step"][row]),
        ("target_step", "target_offset", table["target_origin"][row], table["target_step"][row]),
    ):
        found[offset] = origin + reach(at, width, pace)
        found[step] = np.where(number > 1, pace, 0)
    return found
