"""The two sides of a switch: what each member of the target lacks, and who sends it, found by set operations on runs.

Both ends find the senders by the same arithmetic, without communication. A receiver cuts what it wants by the owners at
the source. A sender starts from what it owns, finds the target ranks that will hold it, and drops what their members
hold already or can cast. If the source is replicated, the runs that a receiver wants are split evenly over all source
ranks, beginning with a different one for each receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.space import ABSENT, Kind, Layout, Pieces, Sharding, VirtualParameterSpace, interval
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.vps import check_members

AS_LAID_OUT: Mapping[str, str] = {}


@dataclass(frozen=True, eq=False)
class Sides:
    """Source (the space's present layout and members) and target of a switch.

    kinds: the kinds that are present at the source and move; every other one is absent on both sides. held_as: kinds
    that the source does not hold as its layout would, but cut as another kind is.
    """

    vps: VirtualParameterSpace
    layout: Layout
    members: tuple[int, ...]
    kinds: tuple[Kind, ...]
    held_as: Mapping[str, str]

    def __post_init__(self) -> None:
        """Raise LayoutError for members that do not fill the world, SwitchRefused for a kind that the source lacks."""
        check_members(self.layout, self.members)
        names = [kind.name for kind in self.kinds]
        if len(set(names)) != len(names):
            raise LayoutError(f"a state kind is named twice in {names}; name each once")
        present = self.vps.present_kinds()
        for name in names:
            if name not in present and not self.target(name).is_empty:
                raise SwitchRefused(
                    f"{name} is needed under {self.layout} and held by no rank under {self.vps.layout}",
                    "leave it out of the kinds of this switch",
                )

    @cached_property
    def source_rank(self) -> dict[int, int]:
        """The rank of each member at the source."""
        return {member: rank for rank, member in enumerate(self.vps.members)}

    @cached_property
    def target_rank(self) -> dict[int, int]:
        """The rank of each member at the target."""
        return {member: rank for rank, member in enumerate(self.members)}

    @property
    def source_ranks(self) -> Ints:
        """Source rank of each target rank's member, or ABSENT."""
        return np.array([self.source_rank.get(member, ABSENT) for member in self.members], dtype=np.int64)

    def source(self, kind: str) -> Sharding:
        """Return how the source holds a kind."""
        return self.vps.sharding(self.vps.layout, self.held_as.get(kind, kind))

    def target(self, kind: str) -> Sharding:
        """Return how the target holds a kind."""
        return self.vps.sharding(self.layout, kind)

    def sources(self, kind: Kind) -> tuple[str, ...]:
        """Return the kinds present at the source that may be read for `kind`, itself first."""
        present = {other.name for other in self.kinds}
        return tuple(name for name in kind.sources if name in present)

    def derived_from(self, kind: Kind) -> str | None:
        """Return the kind that `kind` can be cast from, if that one moves too, or None."""
        present = {other.name for other in self.kinds}
        return kind.derived_from if kind.derived_from in present else None

    def held(self, kind: Kind, rank: int) -> Iterator[tuple[str, Pieces]]:
        """Yield the pieces at a source rank that may be read for `kind`, best first: (source kind, pieces)."""
        if rank == ABSENT:
            return
        for name in self.sources(kind):
            yield name, self.source(name).holding(rank)

    def wanted(self, kind: Kind, rank: int, source_rank: int) -> tuple[Ints, Ints]:
        """Return the tidy runs that a target rank must receive; its member had `source_rank` (or ABSENT) at the source.

        These are all that it will hold, except what its member holds now or can cast from another kind.
        """
        want = self.target(kind.name).holding(rank)
        for _, held in self.held(kind, source_rank):
            want = want.subtract(held.start, held.stop)
        origin = self.derived_from(kind)
        if origin is not None:
            held = self.target(origin).holding(rank)
            want = want.subtract(held.start, held.stop)
        return want.start, want.stop


Rows = tuple[Ints, Ints, Ints]


def read_from(sides: Sides, kind: Kind) -> str:
    """Return the kind that senders read for `kind`: a replicated one if there is any, else the kind itself."""
    names = sides.sources(kind)
    replicated = [name for name in names if sides.source(name).replicated]
    return (replicated or list(names))[0]


def senders_of(sides: Sides, kind: Kind, rank: int, start: Ints, stop: Ints) -> Rows:
    """Cut the runs that a target rank wants by sender: (start, stop, source rank).

    Raise SwitchRefused if elements have no holder at the source.
    """
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
    """Return the runs that a source rank sends, by receiver: (start, stop, target rank)."""
    cut = sides.source(read_from(sides, kind))
    if not cut.replicated:
        return _receivers_of_owned(sides, kind, cut, sender)
    nothing = interval.ints([])
    parts = [(nothing, nothing, nothing)]
    for rank in np.flatnonzero(sides.source_ranks == ABSENT).tolist():
        low, high, senders = senders_of(sides, kind, rank, *sides.wanted(kind, rank, ABSENT))
        mine = senders == sender
        parts.append((low[mine], high[mine], np.full(int(mine.sum()), rank, dtype=np.int64)))
    return interval.join(parts)


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
    """Return the parts of runs that a sharding covers."""
    _, _, low, high = interval.intersect(start, stop, *cut.region())
    return low, high


def _drop_held(rows: Rows, cut: Sharding, holder: Ints) -> Rows:
    """Return the parts of each row that its `holder` (a rank of `cut`, or ABSENT) does not hold."""
    start, stop, rank = rows
    if not len(start) or cut.is_empty:
        return rows
    row, low, high = cut.lacking(start, stop, holder)
    return low, high, rank[row]


def _even_shares(start: Ints, stop: Ints, ranks: int, rotation: int) -> Rows:
    """Cut tidy runs in `ranks` shares of equal size; share i goes to rank (i + rotation) modulo `ranks`."""
    length = stop - start
    before = np.cumsum(length) - length
    total = int(length.sum())
    bounds = np.arange(ranks + 1, dtype=np.int64) * total // ranks
    filled = np.flatnonzero(np.diff(bounds))
    row, share, low, high = interval.intersect(before, before + length, bounds[filled], bounds[filled + 1])
    step = (start - before)[row]
    return low + step, high + step, (filled[share] + rotation) % ranks
