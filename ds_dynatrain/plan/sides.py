"""The source and the target of a switch: which elements each target member lacks, and which member sends them.

Coordinates are those of a `space` in which the parts of a cut matrix are few runs (`VirtualParameterSpace.tiled`).

Senders and receivers compute the same result without communication. A receiver splits the runs that it lacks by their
owners at the source. A sender starts from the runs that it owns, finds the target ranks that will hold them, and drops
what these ranks already hold or can cast. If all ranks of a shard group hold the same elements, they take turns. The
elements are cut into runs of one length, which are assigned in turn to the ranks on the receiver's node, or to all
ranks if there are none on that node. Each receiver starts with another rank.

Elements that come from another node are sent to a node only once. If several members of the node need them, and whole
shard groups hold their kind, these members take turns as the *relay*: it receives the elements, and passes them on to
the others in a second phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.space import ABSENT, Kind, Layout, Sharding, VirtualParameterSpace, interval, row_of
from ds_dynatrain.space.interval import Ints, Runs
from ds_dynatrain.space.sharding import Copies
from ds_dynatrain.space.vps import check_members

AS_LAID_OUT: Mapping[str, str] = {}
ANYWHERE: Mapping[int, str] = {}
Rows = tuple[Ints, Ints, Ints]
"""Runs of coordinates as arrays: (start, stop, rank)."""
NO_ROWS: Rows = (interval.ints([]),) * 3
TURNS = 16
"""Average number of turns of each member that holds copies, when one receiver needs everything that is copied."""
SMALLEST_SHARE = 1 << 16
"""Smallest number of elements in a turn, so that messages stay large. Below `TURNS` such turns, each has one turn."""
RELAYED_PARTS = 1 << 12
"""Number of parts into which relayed elements are divided among a node's members, unless parts would be smaller than
`SMALLEST_SHARE`."""
NOWHERE, ELSEWHERE = -1, -2
"""Nodes of source and of target members whose nodes are unknown. No other member counts as being on the same node."""


class Needs(NamedTuple):
    """The elements of a kind that a target rank will hold, by origin: local first, then derived, then remote.

    local: for each state kind, the elements that the rank's member can copy from its source buffers of this kind,
        without those in earlier entries.
    derived: for each state kind, the elements that it can cast from its target buffers of this kind.
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
    nodes: the node of each member, the same on all members; some or all may be missing.
    space: the space to which all coordinates in arguments and results belong.
    names: the names of `kinds`.
    code: the index of each kind in `vps.kinds`.
    source_rank: the rank of each member at the source.
    target_rank: the rank of each member at the target.
    source_ranks: for each target rank, the source rank of its member, or ABSENT.
    source_nodes: a number for the node of each source rank, or NOWHERE.
    target_nodes: the same for each target rank. A rank without a node has a number of its own, below NOWHERE.
    """

    vps: VirtualParameterSpace
    layout: Layout
    members: tuple[int, ...]
    kinds: tuple[Kind, ...]
    held_as: Mapping[str, str]
    nodes: Mapping[int, str]
    space: VirtualParameterSpace = field(init=False)
    names: tuple[str, ...] = field(init=False)
    code: dict[str, int] = field(init=False)
    source_rank: dict[int, int] = field(init=False)
    target_rank: dict[int, int] = field(init=False)
    source_ranks: Ints = field(init=False)
    source_nodes: Ints = field(init=False)
    target_nodes: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Raise LayoutError unless each target rank has one member, and SwitchRefused if the source lacks a kind."""
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
        number = {name: index for index, name in enumerate(sorted({*self.nodes.values()}))}
        of_member = {member: number[name] for member, name in self.nodes.items()}
        at_source = [of_member.get(member, NOWHERE) for member in self.vps.members]
        at_target = [of_member.get(member, ELSEWHERE - rank) for rank, member in enumerate(self.members)]
        values = {
            "kinds": tuple(kinds),
            "names": names,
            "code": {kind.name: number for number, kind in enumerate(self.vps.kinds)},
            "source_rank": source_rank,
            "target_rank": dict(zip(self.members, range(len(self.members)), strict=True)),
            "source_ranks": interval.ints(ranks),
            "source_nodes": interval.ints(at_source),
            "target_nodes": interval.ints(at_target),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def source(self, kind: str) -> Sharding:
        """Return the sharding of a kind at the source."""
        return self.space.sharding(self.vps.layout, self.held_as.get(kind, kind))

    def target(self, kind: str) -> Sharding:
        """Return the sharding of a kind at the target."""
        return self.space.sharding(self.layout, kind)

    def alike(self) -> list[list[Kind]]:
        """Group kinds whose elements have the same positions and the same moves, such as a master and its moments."""
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
        """Return the kind that senders read to provide `kind`: a replicated kind among its sources, or `kind`
        itself.
        """
        for name in kind.sources:
            if self.source(name).replicated:
                return name
        return kind.name

    def senders(self, kind: Kind, rank: int, wanted: Runs) -> Rows:
        """Divide the runs that a target rank needs among their senders; return (start, stop, source rank).

        Raises SwitchRefused if no member of the source holds some of the elements.
        """
        cut = self.source(self.read_from(kind))
        _, low, high, sender = self.dealt(cut, *wanted, np.full_like(wanted.start, rank))
        lost = wanted.numel - int((high - low).sum())
        if lost:
            raise SwitchRefused(
                f"{kind.name}: {lost} elements that rank {rank} needs are held by no member of the source",
                "load a checkpoint that holds them: engine.load(folder)",
            )
        return low, high, sender

    def deliveries(self, kind: Kind, rank: int, wanted: Runs) -> tuple[Rows, tuple[Ints, Ints, Ints, Ints]]:
        """Return (runs from source ranks, runs by relays) that a target rank receives.

        A relay is a rank that receives runs from another node and passes them on within its node. The first result is
        that of `senders`, without what relays pass on. The second is (start, stop, relay, receiver), and includes what
        this rank, as a relay, passes on to others.
        """
        start, stop, sender = self.senders(kind, rank, wanted)
        far = self.source_nodes[sender] != self.target_nodes[rank]
        crossing = interval.union(start[far], stop[far])
        _, low, high, relay, receiver = self.relays(kind, *crossing, np.full_like(crossing.start, rank))
        is_received = (receiver == rank) & (relay != rank)
        row, start, stop = interval.subtract(start, stop, *interval.union(low[is_received], high[is_received]))
        mine = (relay == rank) != (receiver == rank)
        return (start, stop, sender[row]), (low[mine], high[mine], relay[mine], receiver[mine])

    def receivers(self, kind: Kind, sender: int) -> Rows:
        """Split the runs that a source rank sends by receiver; return (start, stop, target rank)."""
        cut, target = self.source(self.read_from(kind)), self.target(kind.name)
        if not cut.has_copies:
            owned = cut.owned(sender)
            return self._directly(kind, sender, *target.holders(owned.start, owned.stop)[1:])
        parts = [NO_ROWS]
        for each in cut.copies_of(sender):
            rank = target.candidates(each.start, each.stop)
            if cut.replicated:  # all other members already hold it
                rank = rank[self.source_ranks[rank] == ABSENT]
            start, stop, rank = self._own_share(each, sender, rank)
            row, start, stop = target.held(start, stop, rank)
            parts.append(self._directly(kind, sender, start, stop, rank[row]))
        return interval.join(parts)

    def _directly(self, kind: Kind, sender: int, start: Ints, stop: Ints, rank: Ints) -> Rows:
        """Return the runs that a source rank itself sends to target ranks.

        Runs that a target rank already has, can cast or gets through a relay (a rank on its node) are left out.
        """
        row, start, stop = self._still_needed(kind, start, stop, rank)
        rank = rank[row]
        if not self.has_relays(kind):
            return start, stop, rank
        far = self.target_nodes[rank] != self.source_nodes[sender]
        row, low, high, relay, receiver = self.relays(kind, start[far], stop[far], rank[far])
        own = (relay == rank[far][row]) & (receiver == relay)
        return interval.join([(start[~far], stop[~far], rank[~far]), (low[own], high[own], relay[own])])

    def _still_needed(self, kind: Kind, start: Ints, stop: Ints, rank: Ints) -> Rows:
        """Return (row, start, stop) of the parts of runs that their target rank neither holds already nor can cast.

        rank: the target rank of each run.
        """
        rows = np.arange(len(start), dtype=np.int64)
        for name in kind.sources:
            row, start, stop = self.source(name).lacking(start, stop, self.source_ranks[rank[rows]])
            rows = rows[row]
        if kind.derived_from is not None:
            row, start, stop = self.target(kind.derived_from).lacking(start, stop, rank[rows])
            rows = rows[row]
        return rows, start, stop

    # ---- relays ------------------------------------------------------------------------------------------------------

    @cached_property
    def _by_node(self) -> tuple[Ints, Ints, Ints]:
        """Three arrays: target ranks sorted by node; for each rank, where its node begins there; and the size of that
        node.
        """
        _, node, count = np.unique(self.target_nodes, return_inverse=True, return_counts=True)
        return np.argsort(node, kind="stable"), (np.cumsum(count) - count)[node], count[node]

    def has_relays(self, kind: Kind) -> bool:
        """Return whether target ranks may pass on elements of a kind to others on their node."""
        several = len({*self.target_nodes.tolist(), *self.source_nodes.tolist()}) > 1 and self._by_node[2].max() > 1
        return bool(several) and self.target(kind.name).has_copies

    def relays(self, kind: Kind, start: Ints, stop: Ints, rank: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Find the relays and receivers of runs that come to the nodes of the given target ranks from other nodes.

        Returns (row, start, stop, relay, receiver), with an entry for each rank of the node that needs the run. The
        relay is one of these ranks, and receives the run from the other node. The result is empty for a kind without
        relays.
        """
        order, begin, count = self._by_node
        if not self.has_relays(kind):
            start, stop, rank = NO_ROWS
        width = max(SMALLEST_SHARE, int(self.space.bases[-1]) // RELAYED_PARTS)
        run, low, high, turn = interval.cut_every(start, stop, np.full_like(start, width))
        row, nth = interval.expand(count[rank[run]])
        able = order[begin[rank[run]][row] + nth]
        held, start, stop = self.target(kind.name).held(low[row], high[row], able)
        left, start, stop = self._still_needed(kind, start, stop, able[held])
        row, able = row[held[left]], able[held[left]]
        at = row * (width + 1) - low[row]  # a line on which the rows lie one after another
        edges = np.unique(np.concatenate([at + start, at + stop]))
        first = np.searchsorted(edges, at + start)
        again, nth = interval.expand(np.searchsorted(edges, at + stop) - first)
        part, able, row = first[again] + nth, able[again], row[again]
        sorting = np.lexsort((able, part))
        part, able, row, at = part[sorting], able[sorting], row[sorting], at[again[sorting]]
        _, opens, which, members = np.unique(part, return_index=True, return_inverse=True, return_counts=True)
        relay = able[opens + turn[row[opens]] % members][which]
        return run[row], edges[part] - at, edges[part + 1] - at, relay, able

    # ---- senders of what several members hold ------------------------------------------------------------------------

    def dealt(self, cut: Sharding, start: Ints, stop: Ints, rank: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Divide runs that target ranks need among their senders. Return (row, start, stop, source rank).

        cut: the sharding that senders read. Elements that no source rank holds are left out.
        rank: the target rank that needs each run.
        """
        if not cut.has_copies:
            return cut.owners(start, stop)
        found = [(*NO_ROWS, NO_ROWS[0])]
        for each in cut.copies(*interval.union(start, stop)):
            row, _, low, high = interval.intersect(start, stop, each.start, each.stop)
            part, low, high, share = interval.cut_every(low, high, np.full_like(low, width_of_shares(each)))
            row = row[part]
            turn, node = share + self._turn(each, rank)[row], self.target_nodes[rank][row]
            order = np.argsort(self.source_nodes[each.ranks], kind="stable")
            nodes = self.source_nodes[each.ranks][order]
            first, last = (np.searchsorted(nodes, node, side=side) for side in ("left", "right"))
            near = each.ranks[order][np.minimum(first + turn % np.maximum(last - first, 1), len(order) - 1)]
            found.append((row, low, high, np.where(first < last, near, each.ranks[turn % len(each.ranks)])))
        return interval.join(found)

    def _own_share(self, copies: Copies, sender: int, rank: Ints) -> Rows:
        """Return (start, stop, target rank) of the runs that a source rank sends to each target rank that needs them.

        The division is that of `dealt`.

        copies: the runs that the sender's shard group holds.
        """
        if not len(copies.start):
            return NO_ROWS
        node, there = self.source_nodes[copies.ranks], self.target_nodes[rank]
        mine = self.source_nodes[sender]
        is_near, has_near = there == mine, np.isin(there, node)
        rank, is_near = (column[is_near | ~has_near] for column in (rank, is_near))
        near = copies.ranks[node == mine]
        count = np.where(is_near, len(near), len(copies.ranks))
        place = np.where(is_near, *(int(np.flatnonzero(able == sender)[0]) for able in (near, copies.ranks)))
        width = width_of_shares(copies)
        first, last = (int(edge) // width for edge in (copies.start[0], copies.stop[-1] - 1))
        share = first + (place - self._turn(copies, rank) - first) % count  # the first share of this sender
        row, nth = interval.expand(np.maximum((last - share) // count + 1, 0))
        begin = (share[row] + nth * count[row]) * width
        part, _, start, stop = interval.intersect(begin, begin + width, copies.start, copies.stop)
        return start, stop, rank[row[part]]

    def _turn(self, copies: Copies, rank: Ints) -> Ints:
        """Return, for each target rank, the index in a shard group of the rank that sends first to it.

        The indices are evenly spaced, so that receivers start with different senders.
        """
        groups = self.layout.expert if copies.experts else self.layout.tensor
        index = rank % self.layout.ranks_per_stage // groups
        return index * len(copies.ranks) // (self.layout.ranks_per_stage // groups)


def width_of_shares(copies: Copies) -> int:
    """Return the length of the runs that ranks with copies of the same elements send in turn."""
    return copies.each // TURNS if copies.each >= TURNS * SMALLEST_SHARE else max(1, copies.each)


def _runs(cut: Sharding, rank: int) -> Runs:
    """Return the coordinates that a rank holds."""
    held = cut.holding(rank)
    return interval.union(held.start, held.stop)


def _divide(want: Runs, held: Runs, name: str, into: list[tuple[str, Runs]]) -> Runs:
    """Divide the wanted runs into those that are held and those that are left; return the latter.

    name: the state kind that is held; (name, held runs) is appended to `into`.
    """
    row, _, low, high = interval.intersect(*want, *held)
    into.append((name, Runs(low, high)))
    return Runs(*interval.outside(*want, row, low, high)[1:])
