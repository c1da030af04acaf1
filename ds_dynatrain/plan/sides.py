"""The source and the target of a switch: which elements each target member lacks, and which member sends them.

Senders and receivers compute the same result without communication. A receiver splits the runs that it lacks by their
owners at the source. A sender starts from the runs that it owns, finds the target ranks that will hold them, and drops
what these members already hold or can cast. If all ranks of a shard group hold the same, they take turns: runs of one
length are dealt out to those on the receiver's node, or to all if there are none, beginning with another for each
receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.space import ABSENT, Kind, Layout, Pieces, Sharding, VirtualParameterSpace, interval
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.sharding import Copies
from ds_dynatrain.space.vps import check_members

AS_LAID_OUT: Mapping[str, str] = {}
ANYWHERE: Mapping[int, str] = {}
Rows = tuple[Ints, Ints, Ints]
"""Runs of coordinates as arrays: (start, stop, rank)."""
NO_ROWS: Rows = (interval.ints([]), interval.ints([]), interval.ints([]))
TURNS = 8
"""How often each member that holds copies has its turn, on average, if a receiver needs all of them."""
SMALLEST_SHARE = 1 << 16
"""Fewest elements of a turn, so that messages do not become small; members with less than all turns have one turn."""
NOWHERE, ELSEWHERE = -1, -2
"""Nodes of source and of target members whose nodes are unknown: no member is on the node of such a member."""


class Needs(NamedTuple):
    """The elements of a kind that a target rank will hold, by origin: local first, then derived, then remote.

    local: (kind, wanted, held) for each kind of source buffers from which the rank's member can copy. `wanted` are the
    elements that earlier entries did not provide, and `held` are those in these buffers.
    derived: the same for the target buffers from which the kind can be cast.
    remote: the remaining elements, which other members send.
    """

    local: list[tuple[str, Pieces, Pieces]]
    derived: list[tuple[str, Pieces, Pieces]]
    remote: Pieces


@dataclass(frozen=True, eq=False)
class Sides:
    """The source (current layout and members of `vps`) and the target (`layout`, `members`) of a switch.

    kinds: the state kinds that move; their `sources` and `derived_from` refer only to each other.
    held_as: a map from a kind to the kind whose partitioning it has at the source.
    nodes: the node of each member, the same on all members; some or all may be missing.
    names: the names of `kinds`.
    code: the index of each kind in `vps.kinds`.
    source_rank: the rank of each member at the source.
    target_rank: the rank of each member at the target.
    source_ranks: for each target rank, the source rank of its member, or ABSENT.
    source_nodes: a number for the node of each source rank, or NOWHERE.
    target_nodes: the same for each target rank, or ELSEWHERE.
    """

    vps: VirtualParameterSpace
    layout: Layout
    members: tuple[int, ...]
    kinds: tuple[Kind, ...]
    held_as: Mapping[str, str]
    nodes: Mapping[int, str]
    names: tuple[str, ...] = field(init=False)
    code: dict[str, int] = field(init=False)
    source_rank: dict[int, int] = field(init=False)
    target_rank: dict[int, int] = field(init=False)
    source_ranks: Ints = field(init=False)
    source_nodes: Ints = field(init=False)
    target_nodes: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Raise LayoutError if the members do not fill the world, SwitchRefused if the source lacks a kind."""
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
        number = {name: index for index, name in enumerate(sorted({*self.nodes.values()}))}
        of_member = {member: number[name] for member, name in self.nodes.items()}
        at_source = [of_member.get(member, NOWHERE) for member in self.vps.members]
        object.__setattr__(self, "source_nodes", interval.ints(at_source))
        at_target = [of_member.get(member, ELSEWHERE) for member in self.members]
        object.__setattr__(self, "target_nodes", interval.ints(at_target))

    def source(self, kind: str) -> Sharding:
        """Return the sharding of a kind at the source."""
        return self.vps.sharding(self.vps.layout, self.held_as.get(kind, kind))

    def target(self, kind: str) -> Sharding:
        """Return the sharding of a kind at the target."""
        return self.vps.sharding(self.layout, kind)

    def needs(self, kind: Kind, rank: int, source_rank: int) -> Needs:
        """Return the elements of a kind that a target rank needs.

        source_rank: the rank that its member has at the source, or ABSENT.
        """
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
        """Return the kind that senders read to provide `kind`: a replicated one of its sources, or `kind` itself."""
        for name in kind.sources:
            if self.source(name).replicated:
                return name
        return kind.name

    def senders(self, kind: Kind, rank: int, wanted: Pieces) -> Rows:
        """Divide the runs that a target rank needs among their senders; return (start, stop, source rank).

        Raises SwitchRefused if no member of the source holds some of the elements.
        """
        cut = self.source(self.read_from(kind))
        if cut.has_copies:
            shares = [self._shares(each, rank) for each in cut.copies(wanted.start, wanted.stop)]
            low, high, sender = interval.join([NO_ROWS, *shares])
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
        cut = self.source(self.read_from(kind))
        if not cut.has_copies:
            owned = cut.owned(sender)
            return self._still_needed(kind, owned.start, owned.stop)
        parts = [NO_ROWS]
        for each in cut.copies_of(sender):
            start, stop, rank = self._still_needed(kind, each.start, each.stop)
            parts.append(self._own_share(each, sender, start, stop, rank))
        return interval.join(parts)

    def _still_needed(self, kind: Kind, start: Ints, stop: Ints) -> Rows:
        """Return the parts of runs of the source that target ranks have to receive, as (start, stop, target rank)."""
        _, start, stop, rank = self.target(kind.name).holders(start, stop)
        for name in kind.sources:
            row, start, stop = self.source(name).lacking(start, stop, self.source_ranks[rank])
            rank = rank[row]
        if kind.derived_from is not None:
            row, start, stop = self.target(kind.derived_from).lacking(start, stop, rank)
            rank = rank[row]
        return start, stop, rank

    # ---- senders of what several members hold ------------------------------------------------------------------------

    def _shares(self, copies: Copies, rank: int) -> Rows:
        """Divide runs that a target rank needs among the ranks that hold copies; return (start, stop, source rank)."""
        near = copies.ranks[self.source_nodes[copies.ranks] == self.target_nodes[rank]]
        able = near if len(near) else copies.ranks
        _, low, high, share = interval.cut_every(copies.start, copies.stop, _share(copies, len(copies.start)))
        return low, high, able[(share + self._turn(copies, rank)) % len(able)]

    def _own_share(self, copies: Copies, sender: int, start: Ints, stop: Ints, rank: Ints) -> Rows:
        """Return the parts of runs that go from a source rank to the given target ranks, as `_shares` has it."""
        node, there = self.source_nodes[copies.ranks], self.target_nodes[rank]
        mine = self.source_nodes[sender]
        is_near, has_near = there == mine, np.isin(there, node)
        start, stop, rank, is_near = (column[is_near | ~has_near] for column in (start, stop, rank, is_near))
        near = copies.ranks[node == mine]
        count = np.where(is_near, len(near), len(copies.ranks))
        place = np.where(is_near, *(int(np.flatnonzero(able == sender)[0]) for able in (near, copies.ranks)))
        width = _share(copies, len(start))
        first = start // width
        share = first + (place - self._turn(copies, rank) - first) % count  # the first one that is this sender's
        row, nth = interval.expand(np.maximum(-(-(-(-stop // width) - share) // count), 0))
        begin = (share[row] + nth * count[row]) * width[row]
        low, high = np.maximum(start[row], begin), np.minimum(stop[row], begin + width[row])
        return low, high, rank[row]

    def _turn(self, copies: Copies, rank: Ints | int) -> Ints | int:
        """Return the index of target ranks in their shard groups: each begins with another sender."""
        return rank % self.layout.ranks_per_stage // (self.layout.expert if copies.experts else self.layout.tensor)


def _share(copies: Copies, rows: int) -> Ints:
    """Return the length of the runs that are dealt out in turn to those who hold copies, for each of some rows."""
    share = copies.each // TURNS if copies.each >= TURNS * SMALLEST_SHARE else max(1, copies.each)
    return np.full(rows, share, dtype=np.int64)
