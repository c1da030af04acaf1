"""Who sends what to whom: found from either end by the same arithmetic, without communication.

A receiver cuts what it wants by the owners at the source. A sender starts from what it owns, finds the target ranks
that will hold it, and drops what their members hold already or can cast. Where the source is replicated, what a
receiver wants is split evenly over all source ranks, beginning with a different one for each receiver.
"""

from __future__ import annotations

import numpy as np

from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.plan.sides import Sides
from ds_dynatrain.space import ABSENT, Kind, Sharding, interval
from ds_dynatrain.space.tensor import Ints

Rows = tuple[Ints, Ints, Ints]


def read_from(sides: Sides, kind: Kind) -> str:
    """The kind that senders read for `kind`: one that is replicated if there is any, else the kind itself."""
    names = sides.sources(kind)
    replicated = [name for name in names if sides.source(name).replicated]
    return (replicated or list(names))[0]


def senders_of(sides: Sides, kind: Kind, rank: int, start: Ints, stop: Ints) -> Rows:
    """Cut the runs that a target rank wants by sender: (start, stop, source rank); SwitchRefused if one has none."""
    cut = sides.source(read_from(sides, kind))
    if not cut.replicated:
        _, low, high, sender = cut.owners(start, stop)
    else:
        low, high, sender = _even_shares(*_within(start, stop, cut), cut.ranks, rank)
    lost = int((stop - start).sum() - (high - low).sum())
    if lost:
        raise SwitchRefused(
            f"{kind.name}: {lost} elements that rank {rank} needs are held by no member of the source",
            "load a checkpoint that holds them: engine.load(folder)",
        )
    return low, high, sender


def receivers_of(sides: Sides, kind: Kind, sender: int) -> Rows:
    """The runs that a source rank sends, by receiver: (start, stop, target rank)."""
    cut = sides.source(read_from(sides, kind))
    if not cut.replicated:
        return _receivers_of_owned(sides, kind, cut, sender)
    parts = []
    for rank in np.flatnonzero(sides.source_ranks == ABSENT).tolist():
        low, high, senders = senders_of(sides, kind, rank, *sides.wanted(kind, rank, ABSENT))
        mine = senders == sender
        parts.append((low[mine], high[mine], np.full(int(mine.sum()), rank, dtype=np.int64)))
    return _join(parts)


def _receivers_of_owned(sides: Sides, kind: Kind, cut: Sharding, sender: int) -> Rows:
    owned = cut.owned(sender)
    _, low, high, rank = sides.target(kind.name).holders(owned.start, owned.stop)
    rows = low, high, rank
    for name in sides.sources(kind):
        rows = _drop_held(rows, sides.source(name), sides.source_ranks[rows[2]])
    origin = sides.derived_from(kind)
    if origin is not None:
        rows = _drop_held(rows, sides.target(origin), rows[2])
    return rows


def _within(start: Ints, stop: Ints, cut: Sharding) -> tuple[Ints, Ints]:
    """The parts of runs that a sharding covers."""
    _, _, low, high = interval.intersect(start, stop, *cut.region())
    return low, high


def _drop_held(rows: Rows, cut: Sharding, holder: Ints) -> Rows:
    """What of each row its `holder` (a rank of `cut`, or ABSENT) does not hold."""
    start, stop, rank = rows
    if not len(start) or cut.is_empty:
        return rows
    row, low, high = cut.lacking(start, stop, holder)
    return low, high, rank[row]


def _even_shares(start: Ints, stop: Ints, ranks: int, rotation: int) -> Rows:
    """Tidy runs cut in `ranks` shares of equal size; share i goes to rank (i + rotation) modulo `ranks`."""
    length = stop - start
    before = np.cumsum(length) - length
    total = int(length.sum())
    bounds = np.arange(ranks + 1, dtype=np.int64) * total // ranks
    filled = np.flatnonzero(np.diff(bounds))
    row, share, low, high = interval.intersect(before, before + length, bounds[filled], bounds[filled + 1])
    step = (start - before)[row]
    return low + step, high + step, (filled[share] + rotation) % ranks


def _join(parts: list[Rows]) -> Rows:
    if not parts:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    start, stop, rank = (np.concatenate(column) for column in zip(*parts, strict=True))
    return start, stop, rank
