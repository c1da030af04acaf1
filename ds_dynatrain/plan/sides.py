"""The two sides of a switch: what each member of the target lacks, and who sends it, found by set operations on runs.

Both ends find the senders by the same arithmetic, without communication. A receiver cuts what it wants by the owners at
the source. A sender starts from what it owns, finds the target ranks that will hold it, and drops what their members
hold already or can cast. If the source is replicated, the runs that a receiver wants are split evenly over all source
ranks, beginning with a different one for each receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.space import ABSENT, Kind, Layout, Pieces, Sharding, VirtualParameterSpace, interval
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.vps import check_members

AS_LAID_OUT: Mapping[str, str] = {}
Rows = tuple[Ints, Ints, Ints]
"""(start, stop, rank) of runs."""


class Needs(NamedTuple):
    """Elements of a kind that a target rank will hold, by origin: local before derived before remote.

    local: (source kind, wanted, held) for each kind of source buffers that its member holds. derived: the same for the
    target buffers that it can be cast from. Wanted elements that are held come from there. remote: the rest.
    """

    local: list[tuple[str, Pieces, Pieces]]
    derived: list[tuple[str, Pieces, Pieces]]
    remote: Pieces


@dataclass(frozen=True, eq=False)
class Sides:
    """Source (the space's present layout and members) and target of a switch.

    kinds: the kinds that are present at the source and move; every other one is absent on both sides, and they name
    only each other. held_as: kinds that the source does not hold as its layout would, but cut as another kind is.
    names: those of the kinds. code: the number of each kind of the space. source_rank, target_rank: the rank of each
    member. source_ranks: the source rank of each target rank's member, or ABSENT.
    """

    vps: VirtualParameterSpace
    layout: Layout
    members: tuple[int, ...]
    kinds: tuple[Kind, ...]
    held_as: Mapping[str, str]
    names: tuple[str, ...] = field(init=False)
    code: dict[str, int] = field(init=False)
    source_rank: dict[int, int] = field(init=False)
    target_rank: dict[int, int] = field(init=False)
    source_ranks: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Raise LayoutError for members that do not fill the world, SwitchRefused for a kind that the source lacks."""
        check_members(self.layout, self.members)
        names = tuple(kind.name for kind in self.kinds)
        if len(set(names)) != len(names):
            raise LayoutError(f"a state kind is named twice in {list(names)}; name each once")
        present, kinds = self.vps.present_kinds(), []
        for kind in self.kinds:
            if kind.name not in present and len(self.target(kind.name).region()[0]):
                raise SwitchRefused(
                    f"{kind.name} is needed under {self.layout} and held by no rank under {self.vps.layout}",
                    "leave it out of the kinds of this switch",
                )
            origin = kind.derived_from if kind.derived_from in names else None
            kinds.append(replace(kind, sources=tuple(filter(names.__contains__, kind.sources)), derived_from=origin))
        source_rank = dict(zip(self.vps.members, range(len(self.vps.members)), strict=True))
        ranks = [source_rank.get(member, ABSENT) for member in self.members]
        object.__setattr__(self, "kinds", tuple(kinds))
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "code", {kind.name: number for number, kind in enumerate(self.vps.kinds)})
        object.__setattr__(self, "source_rank", source_rank)
        object.__setattr__(self, "target_rank", dict(zip(self.members, range(len(self.members)), strict=True)))
        object.__setattr__(self, "source_ranks", np.array(ranks, dtype=np.int64))

    def source(self, kind: str) -> Sharding:
        """Return how the source holds a kind."""
        return self.vps.sharding(self.vps.layout, self.held_as.get(kind, kind))

    def target(self, kind: str) -> Sharding:
        """Return how the target holds a kind."""
        return self.vps.sharding(self.layout, kind)

    def needs(self, kind: Kind, rank: int, source_rank: int) -> Needs:
        """Return what a target rank needs; its member had `source_rank` (or ABSENT) at the source."""
        local, derived = list[tuple[str, Pieces, Pieces]](), list[tuple[str, Pieces, Pieces]]()
        want = self.target(kind.name).holding(rank)
        for name in kind.sources if source_rank != ABSENT else ():
            held = self.source(name).holding(source_rank)
            local.append((name, want, held))
            want = want.subtract(held.start, held.stop)
        if kind.derived_from is not None:
            held = self.target(kind.derived_from).holding(rank)
            derived.append((kind.derived_from, want, held))
            want = want.subtract(held.start, held.stop)
        return Needs(local, derived, want)

    def read_from(self, kind: Kind) -> str:
        """Return the kind that senders read for `kind`: a replicated one if there is any, else the kind itself."""
        for name in kind.sources:
            if self.source(name).replicated:
                return name
        return kind.name

    def senders(self, kind: Kind, rank: int, wanted: Pieces) -> Rows:
        """Cut the runs that a target rank wants by sender: (start, stop, source rank).

        Raise SwitchRefused if elements have no holder at the source.
        """
        cut = self.source(self.read_from(kind))
        if cut.replicated:
            _, _, low, high = interval.intersect(wanted.start, wanted.stop, *cut.region())
            low, high, sender = _even_shares(low, high, cut.ranks, rank)
        else:
            _, low, high, sender = cut.owners(wanted.start, wanted.stop)
        lost = wanted.numel - int((high - low).sum())
        if lost:
            raise SwitchRefused(
                f"{kind.name}: {lost} elements that rank {rank} needs are held by no member of the source",
                "load a checkpoint that holds them: engine.load(folder)",
            )
        return low, high, sender

    def receivers(self, kind: Kind, sender: int) -> Rows:
        """Return the runs that a source rank sends, by receiver: (start, stop, target rank)."""
        cut = self.source(self.read_from(kind))
        if not cut.replicated:
            owned = cut.owned(sender)
            _, start, stop, rank = self.target(kind.name).holders(owned.start, owned.stop)
            for name in kind.sources:
                row, start, stop = self.source(name).lacking(start, stop, self.source_ranks[rank])
                rank = rank[row]
            if kind.derived_from is not None:
                row, start, stop = self.target(kind.derived_from).lacking(start, stop, rank)
                rank = rank[row]
            return start, stop, rank
        nothing = interval.ints([])
        parts = [(nothing, nothing, nothing)]
        for newcomer in np.flatnonzero(self.source_ranks == ABSENT).tolist():
            low, high, senders = self.senders(kind, newcomer, self.needs(kind, newcomer, ABSENT).remote)
            mine = senders == sender
            parts.append((low[mine], high[mine], np.full(int(mine.sum()), newcomer, dtype=np.int64)))
        return interval.join(parts)


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
