"""The source and the target of a switch: which elements each target member lacks, and which member sends them.

Coordinates are those of `space`, in which the parts of a cut matrix are few runs (`VirtualParameterSpace.tiled`).

Senders and receivers compute the same result without communication. A receiver splits the runs that it lacks by their
owners at the source. A sender starts from the runs that it owns, finds the target ranks that will hold them, and drops
what these members already hold or can cast. If the source is replicated, the runs that a receiver lacks are divided
evenly over all source ranks, beginning with a different rank for each receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.space import ABSENT, Kind, Layout, Sharding, VirtualParameterSpace, interval, row_of
from ds_dynatrain.space.interval import Ints, Runs
from ds_dynatrain.space.vps import check_members

AS_LAID_OUT: Mapping[str, str] = {}
Rows = tuple[Ints, Ints, Ints]
"""Runs of coordinates as arrays: (start, stop, rank)."""


class Needs(NamedTuple):
    """The elements of a kind that a target rank will hold, by origin: local first, then derived, then remote.

    local: the elements that the rank's member can copy from its source buffers of each kind, less those of earlier
    entries.
    derived: the elements that it can cast from its target buffers of each kind.
    remote: the remaining elements, which other members send.
    """

    local: list[tuple[str, Runs]]
    derived: list[tuple[str, Runs]]
    remote: Runs


@dataclass(frozen=True, eq=False)
class Sides:
    """The source (current layout and members of `vps`) and the target (`layout`, `members`) of a switch.

    kinds: the state kinds that move; their `sources` and `derived_from` refer only to each other.
    held_as: a map from a kind to the kind whose partitioning it has at the source.
    space: the space whose coordinates all questions and answers have.
    names: the names of `kinds`.
    code: the index of each kind in `vps.kinds`.
    source_rank: the rank of each member at the source.
    target_rank: the rank of each member at the target.
    source_ranks: for each target rank, the source rank of its member, or ABSENT.
    """

    vps: VirtualParameterSpace
    layout: Layout
    members: tuple[int, ...]
    kinds: tuple[Kind, ...]
    held_as: Mapping[str, str]
    space: VirtualParameterSpace = field(init=False)
    names: tuple[str, ...] = field(init=False)
    code: dict[str, int] = field(init=False)
    source_rank: dict[int, int] = field(init=False)
    target_rank: dict[int, int] = field(init=False)
    source_ranks: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Raise LayoutError if the members do not fill the world, SwitchRefused if the source lacks a kind."""
        check_members(self.layout, self.members)
        object.__setattr__(self, "space", self.vps.tiled(self.layout))
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
        """Return the sharding of a kind at the source."""
        return self.space.sharding(self.vps.layout, self.held_as.get(kind, kind))

    def target(self, kind: str) -> Sharding:
        """Return the sharding of a kind at the target."""
        return self.space.sharding(self.layout, kind)

    def alike(self) -> list[list[Kind]]:
        """Group the kinds: those of a group lie and move alike, such as a master and its moments."""
        found = dict[object, list[Kind]]()
        for kind in self.kinds:
            row = row_of(kind.name)
            own = kind.groups, kind.whole_tensors, kind.sources[1:], kind.derived_from, self.held_as.get(kind.name)
            found.setdefault((row.stages, row.whole_in, row.of_frozen, *own), []).append(kind)
        return list(found.values())

    def needs(self, kind: Kind, rank: int, source_rank: int) -> Needs:
        """Return the elements of a kind that a target rank needs.

        source_rank: the rank that its member has at the source, or ABSENT.
        """
        local, derived = list[tuple[str, Runs]](), list[tuple[str, Runs]]()
        want = _runs(self.target(kind.name), rank)
        for name in kind.sources if source_rank != ABSENT else ():
            want = _divide(want, _runs(self.source(name), source_rank), name, local)
        if kind.derived_from is not None:
            want = _divide(want, _runs(self.target(kind.derived_from), rank), kind.derived_from, derived)
        return Needs(local, derived, want)

    def read_from(self, kind: Kind) -> str:
        """Return the kind that senders read to provide `kind`: a replicated one of its sources, or `kind` itself."""
        for name in kind.sources:
            if self.source(name).replicated:
                return name
        return kind.name

    def senders(self, kind: Kind, rank: int, wanted: Runs) -> Rows:
        """Divide the runs that a target rank needs among their senders; return (start, stop, source rank).

        Raises SwitchRefused if no member of the source holds some of the elements.
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
        """Split the runs that a source rank sends by receiver; return (start, stop, target rank)."""
        cut, target = self.source(self.read_from(kind)), self.target(kind.name)
        if cut.replicated:  # all members of the source have it
            _, start, stop, rank = target.holders(*cut.region())
            start, stop, rank = (column[self.source_ranks[rank] == ABSENT] for column in (start, stop, rank))
        else:
            owned = cut.owned(sender)
            _, start, stop, rank = target.holders(owned.start, owned.stop)
            for name in kind.sources:
                row, start, stop = self.source(name).lacking(start, stop, self.source_ranks[rank])
                rank = rank[row]
        if kind.derived_from is not None:
            row, start, stop = self.target(kind.derived_from).lacking(start, stop, rank)
            rank = rank[row]
        return _share(start, stop, rank, cut.ranks, sender) if cut.replicated else (start, stop, rank)


def _runs(cut: Sharding, rank: int) -> Runs:
    """Return the coordinates that a rank holds."""
    held = cut.holding(rank)
    return interval.union(held.start, held.stop)


def _divide(want: Runs, held: Runs, name: str, into: list[tuple[str, Runs]]) -> Runs:
    """Add the wanted elements that are held to `into`, under the name of a kind, and return those that are left."""
    _, _, *common = interval.intersect(*want, *held)
    into.append((name, Runs(*common)))
    _, *left = interval.subtract(*want, *held)
    return Runs(*left)


def _even_shares(start: Ints, stop: Ints, ranks: int, rotation: int) -> Rows:
    """Split sorted runs that do not overlap into `ranks` equal shares, the first for rank `rotation` (modulo `ranks`).

    Return (start, stop, rank) of the resulting runs.
    """
    length = stop - start
    before = np.cumsum(length) - length
    total = int(length.sum())
    bounds = np.arange(ranks + 1, dtype=np.int64) * total // ranks
    filled = np.flatnonzero(np.diff(bounds))
    row, share, low, high = interval.intersect(before, before + length, bounds[filled], bounds[filled + 1])
    step = (start - before)[row]
    return low + step, high + step, (filled[share] + rotation) % ranks


def _share(start: Ints, stop: Ints, receiver: Ints, ranks: int, sender: int) -> Rows:
    """Return the share of one source rank in the runs that each receiver needs, as `_even_shares` divides them.

    receiver: the target rank of each run.
    """
    order = np.lexsort((start, receiver))
    start, stop, receiver = start[order], stop[order], receiver[order]
    ends = np.cumsum(stop - start)
    begins, opens = ends - stop + start, np.diff(receiver, prepend=-1) != 0
    first, last = interval.chains(~opens[1:], len(start))
    base, total, share = begins[first], ends[last] - begins[first], (sender - receiver[first]) % ranks
    one = np.cumsum(opens) - 1
    low = np.maximum(begins, (base + share * total // ranks)[one])
    high = np.minimum(ends, (base + (share + 1) * total // ranks)[one])
    kept = np.flatnonzero(low < high)
    step = (start - begins)[kept]
    return low[kept] + step, high[kept] + step, receiver[kept]
