"""What members hold together, as sums: of each member's digests a share, and the shares add up in any order.

Three vectors of one 64-bit number per logical tensor, for each state kind (modulo 2^64):

- `whole`: of every element one holder gives its digest, so that the sum is the digest of the whole tensor;
- `copies`: the holders of one element in a ZeRO group give their digests times a weight of their own, and the one that
  counts for `whole` gives its own times what brings the sum of weights to 0. So the sum is 0 where all copies are
  equal, and where they are not it is 0 with the odds that two digests are equal by chance;
- `places`: the same for tensors that several places on the pipe and tensor axes hold.

A sum that is not 0 names the tensor. Whose copies differ, members then tell for these tensors alone (`explained`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_dynatrain.engine.digests import Digests, SideDigests, hint
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.space import Layout, VirtualParameterSpace
from ds_dynatrain.space.interval import Ints

Doubts = dict[str, list[int]]
"""Kind -> numbers of tensors whose copies are not equal."""
_PLACES = 1 << 32
"""Weights of ranks and those of places are different numbers."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Those of some members of a side.

    kinds: of the first of them, with its number, and of one that holds others, if there is one.
    """

    kinds: list[tuple[int, list[str]]]
    whole: Mapping[str, Digests]
    copies: Mapping[str, Digests]
    places: Mapping[str, Digests]

    def __add__(self, other: Shares) -> Shares:
        first = self.kinds[0]
        differing = [each for each in (*self.kinds[1:], *other.kinds) if each[1] != first[1]]
        sums = (_added(getattr(self, name), getattr(other, name)) for name in ("whole", "copies", "places"))
        return Shares([first, *differing[:1]], *sums)

    def to_json(self) -> dict[str, Any]:
        """A record (see `pack`)."""
        return {"kinds": self.kinds, "whole": self.whole, "copies": self.copies, "places": self.places}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Shares:
        """The inverse of `to_json`."""
        kinds = [(int(member), list(kinds)) for member, kinds in record["kinds"]]
        return Shares(kinds, record["whole"], record["copies"], record["places"])

    def check_kinds(self, side: str) -> None:
        """CertificateError if members hold different state kinds."""
        if len(self.kinds) > 1:
            (one, first), (other, second) = self.kinds
            only = ", ".join(sorted(set(first) ^ set(second)))
            raise CertificateError(f"{side}: only one of members {one} and {other} holds {only}")


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two records of shares as one."""
    return (Shares.from_json(one) + Shares.from_json(other)).to_json()


def doubts(sums: Mapping[str, Digests]) -> Doubts:
    """The tensors whose sums are not 0."""
    found = {kind: np.flatnonzero(values).tolist() for kind, values in sums.items()}
    return {kind: numbers for kind, numbers in found.items() if numbers}


def shares(vps: VirtualParameterSpace, layout: Layout, members: tuple[int, ...], rank: int, own: SideDigests) -> Shares:
    """A member's part in the sums over all ranks of a layout."""
    whole, copies, places = dict[str, Digests](), dict[str, Digests](), dict[str, Digests]()
    for kind, digests in own.of.items():
        is_counted, by_copy, by_place = _weights(vps, layout, kind, rank)
        whole[kind] = np.where(is_counted, digests, np.uint64(0))
        for sums, weights in ((copies, by_copy), (places, by_place)):
            if weights.any():
                sums[kind] = weights * digests
        if not is_counted.any():
            del whole[kind]
    return Shares([(members[rank], sorted(own.of))], whole, copies, places)


def agreed(
    session: Session, step: str, vps: VirtualParameterSpace, layout: Layout, rank: int, own: SideDigests, side: str
) -> dict[str, Digests]:
    """Kind -> digests of whole tensors, of what all members of the session hold at the ranks of a layout.

    side: a word for it. CertificateError, on all alike, names the tensor, the kind and two members whose copies differ.
    """
    members = session.members

    def judge(found: dict[str, Any]) -> dict[str, Any]:
        sums = Shares.from_json(found)
        wrong = {**doubts(sums.places), **doubts(sums.copies)}
        return {"doubts": wrong, "kinds": sums.kinds, "whole": {} if wrong else sums.whole}

    found = session.reduce(step, shares(vps, layout, members, rank, own).to_json(), joined, judge)
    Shares.from_json({**found, "copies": {}, "places": {}}).check_kinds(side)
    if found["doubts"]:
        raise CertificateError(
            explained(session, f"{step}/differing", vps, layout, members, own, found["doubts"], side)
        )
    return filled(found["whole"], vps, own.of)


def differing(
    session: Session, step: str, vps: VirtualParameterSpace, layout: Layout, rank: int, own: SideDigests, side: str
) -> Doubts:
    """Tensors whose copies on several places of the pipe and tensor axes are not equal; as `agreed`, for what else is
    not.
    """
    members = session.members

    def judge(found: dict[str, Any]) -> dict[str, Any]:
        sums = Shares.from_json(found)
        return {"copies": doubts(sums.copies), "places": doubts(sums.places)}

    found = session.reduce(step, shares(vps, layout, members, rank, own).to_json(), joined, judge)
    if found["copies"]:
        wrong = found["copies"]
        raise CertificateError(explained(session, f"{step}/differing", vps, layout, members, own, wrong, side))
    places: Doubts = found["places"]
    return places


def filled(whole: Mapping[str, Digests], vps: VirtualParameterSpace, kinds: Iterable[str]) -> dict[str, Digests]:
    """With zeros for a kind of which nobody has an element."""
    return {kind: whole.get(kind, np.zeros(len(vps.tensors), np.uint64)) for kind in kinds}


def explained(
    session: Session,
    step: str,
    vps: VirtualParameterSpace,
    layout: Layout,
    members: tuple[int, ...],
    own: SideDigests | None,
    wrong: Doubts,
    side: str,
) -> str:
    """Words for copies that differ, with two members that hold them; all members of the session call it.

    members: at each rank of the layout. own: of a member that is one of them.
    """
    kind, (number, *_) = next(iter(wrong.items()))
    mine = {} if own is None else {str(session.board.member): int(own.of[kind][number])}

    def judge(found: dict[str, int]) -> str:
        what = f"{side}: {kind} of {vps.tensors[number].name!r} differs between"
        pair = _two_that_differ(vps, layout, kind, number, [found[str(member)] for member in members])
        if pair is None:
            return f"{what} its replicas{hint(kind)}"
        return f"{what} the replicas of members {members[pair[0]]} and {members[pair[1]]}{hint(kind)}"

    said: str = session.reduce(step, mine, lambda one, other: {**one, **other}, judge)
    return said


def _two_that_differ(
    vps: VirtualParameterSpace, layout: Layout, kind: str, number: int, held: Sequence[int]
) -> tuple[int, int] | None:
    """Two ranks whose copies of a tensor are not equal. held: each rank's digest of it."""
    mesh, together = vps.mesh(layout), list[int]()
    for ranks, rows in _groups(vps, layout):
        holders = _holders(vps, layout, kind, number, ranks) if rows[number] else []
        for other in holders[1:]:
            if held[other] != held[holders[0]]:
                return holders[0], other
        parts = holders[:1] if holders else ranks.tolist()
        together.append(sum(held[rank] for rank in parts) % (1 << 64))
    tensors, groups, firsts = (np.empty(0, np.int64),) * 3 if mesh is None else mesh.holders
    for row in np.flatnonzero(tensors == number).tolist():
        if mesh is not None and together[groups[row]] != together[firsts[row]]:
            one, other = (mesh.shard_groups[index].ranks[0] for index in (firsts[row], groups[row]))
            return int(one), int(other)
    return None


def _groups(vps: VirtualParameterSpace, layout: Layout) -> list[tuple[Ints, Ints]]:
    """(ranks, whose tensors are its own) of each ZeRO group."""
    mesh, routed = vps.mesh(layout), np.array([tensor.expert for tensor in vps.tensors], dtype=bool)
    if mesh is None:
        return [(np.arange(layout.world_size), np.ones(len(routed), bool))]
    return [(group.ranks, routed == group.experts) for group in mesh.shard_groups]


def _holders(vps: VirtualParameterSpace, layout: Layout, kind: str, number: int, ranks: Ints) -> list[int]:
    """The ranks of a group that hold a tensor whole; none where each holds a part."""
    if vps.kind(kind).overlaps(layout):
        return [rank for rank in ranks.tolist() if number in vps.local(layout, rank).rows(kind)[0]]
    return ranks.tolist() if vps.is_replicated(layout, kind) else []


def _added(one: Mapping[str, Digests], other: Mapping[str, Digests]) -> dict[str, Digests]:
    both = {**one, **other}
    return {kind: one[kind] + other[kind] if kind in one and kind in other else held for kind, held in both.items()}


# ---- who counts for what ---------------------------------------------------------------------------------------------


def _weights(vps: VirtualParameterSpace, layout: Layout, kind: str, rank: int) -> tuple[Ints, Digests, Digests]:
    """(whether its digest counts for `whole`, its weight in `copies`, its weight in `places`), by tensor."""
    count, mesh = len(vps.tensors), vps.mesh(layout)
    if mesh is None:
        ((ranks, rows),) = _groups(vps, layout)
        return *_in_group(vps, layout, kind, rank, ranks, rows), np.zeros(count, np.uint64)
    tensors, groups, firsts = mesh.holders
    is_counted, copies, places = np.zeros(count, bool), np.zeros(count, np.uint64), np.zeros(count, np.uint64)
    weights = _odd(np.arange(len(mesh.shard_groups)) + _PLACES)
    for index, (ranks, rows) in enumerate(_groups(vps, layout)):
        if rank not in ranks:
            continue
        counts, by_copy = _in_group(vps, layout, kind, rank, ranks, rows)
        mine, first, of_first = groups == index, np.zeros(count, bool), np.zeros(count, np.uint64)
        first[tensors[mine & (firsts == groups)]] = True
        others = (firsts == index) & (groups != index)
        np.subtract.at(of_first, tensors[others], weights[groups[others]])
        later = np.zeros(count, bool)
        later[tensors[mine & (firsts != groups)]] = True
        is_counted |= counts & first
        copies += by_copy
        places += np.where(counts, np.where(later, weights[index], of_first), np.uint64(0))
    return is_counted, copies, places


def _in_group(
    vps: VirtualParameterSpace, layout: Layout, kind: str, rank: int, ranks: Ints, rows: Ints
) -> tuple[Ints, Digests]:
    """(whether a rank gives its digests for its ZeRO group, its weight in `copies`), by tensor; rows: the group's."""
    nothing, mine = np.zeros(len(rows), np.uint64), int(np.flatnonzero(ranks == rank)[0])
    if vps.kind(kind).overlaps(layout):
        holds = np.zeros((len(ranks), len(rows)), bool)
        for place, other in enumerate(ranks.tolist()):
            holds[place, np.unique(vps.local(layout, other).rows(kind)[0])] = True
        holds &= rows
        counts = holds[mine] & ~holds[:mine].any(axis=0)
        weighed = np.where(holds, _odd(ranks)[:, None], np.uint64(0))
        others = np.uint64(0) - (weighed.sum(axis=0, dtype=np.uint64) - weighed[mine])
        return counts, np.where(counts, others, weighed[mine])
    if not vps.is_replicated(layout, kind):
        return rows, nothing
    weights = _odd(ranks)
    weight = weights[mine] if mine else np.zeros(1, np.uint64) - weights[1:].sum(dtype=np.uint64)  # arrays wrap around
    return rows & (mine == 0), np.where(rows, weight, np.uint64(0))


def _odd(numbers: Ints) -> Digests:
    """An odd number for each, as if drawn at random: splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
