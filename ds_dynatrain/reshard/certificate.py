"""The certificate: proof that all members together hold the same state after a change as before it, element for
element.

Each member weights the digests of its own state; the result is its share. The shares of all members are summed, in any
order.

There are three vectors of one 64-bit number per logical tensor, for each state kind (modulo 2^64):

- `whole`: one holder of each element contributes its digest, so the sum is the digest of the whole tensor;
- `copies`: the holders of one element in a ZeRO group contribute their digests, each times a weight of its own. The
  holder that counts for `whole` has the weight that makes the sum of all weights 0. If all copies are equal, the sum is
  0; if not, a sum of 0 is as unlikely as two different values with equal digests;
- `places`: the same for tensors that several ranks along the pipe and tensor axes hold.

A sum other than 0 identifies the tensor. Members then exchange the digests of that tensor alone, to find out whose
copies differ (`explained`).

To find out whether anything differs, members first add up one number for each vector, its fold (`folded`), and add up
the vectors only if folds differ.

For each state kind, a member has one digest per logical tensor, over the pieces that it holds. For a partitioned kind,
the digests of all members add up to that of the whole tensor. For a replicated kind, or one that keeps tensors whole,
each holder's digest is already that of the whole tensor. A switch makes the tables that map buffers to tensors, for the
layouts before and after it, while training runs (`preparation`), so that its pause only has to read memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import compress, count
from operator import is_
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.membership.session import Session, first_and_other
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, Pieces, VirtualParameterSpace, of_kind
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.transfer import Form, ReadyDigest
from ds_dynatrain.transfer.weighing import mixed_odd

Digests = npt.NDArray[np.uint64]
SideDigests = dict[str, Digests]
"""For each state kind, one number per logical tensor: the digests of the elements that one member holds."""
Names = tuple[BufferId, ...]


class DigestedBuffers(NamedTuple):
    """The buffers of one state kind whose digests are to be computed.

    kind: the state kind.
    twin: whether these are weights that share the masters' memory, which is then read only once.
    stay: names of the buffers that the next layout reuses.
    others: names of the remaining buffers.
    """

    kind: str
    twin: bool
    stay: Names
    others: Names


class DigestSide:
    """Tables for computing digests of the buffers of one rank, in the layout before or after a change.

    A table is reused for buffers of the same names, element sizes and devices; otherwise a new table is made. Kinds
    with equal pieces share a table.

    nbytes: total size of the tables.
    """

    def __init__(self, vps: VirtualParameterSpace, layout: Layout, rank: int) -> None:
        self.vps, self.layout, self.rank, self.nbytes = vps, layout, rank, 0
        self._names: dict[str, Names] = {}
        self._ready: dict[tuple[str, Names], ReadyDigest] = {}
        self._cut: list[tuple[Pieces, ReadyDigest]] = []
        self._pieces = lru_cache(1)(partial(vps.holding, layout, rank))

    def is_of(self, vps: VirtualParameterSpace, layout: Layout, rank: int) -> bool:
        """Return whether these tables are valid for a rank of a layout, and for the tensors, rules and kinds of
        `vps`."""
        mine, other = (self.vps.line, self.vps.rules, self.vps.kinds), (vps.line, vps.rules, vps.kinds)
        return (self.layout, self.rank) == (layout, rank) and all(map(is_, mine, other))

    def parts(
        self, buffers: Buffers, kinds: tuple[str, ...], kept: Collection[tuple[str, BufferId]]
    ) -> Iterator[DigestedBuffers]:
        """Yield the buffers to read, kind by kind. Weights come last, because they may share the masters' memory.

        kept: (kind, name) of the buffers that the next layout reuses.
        """
        for kind in sorted(kinds, key=WEIGHT.__eq__):
            if kind not in self._names:
                pieces = self._pieces(kind)
                used = np.bincount(pieces.buffer, minlength=len(pieces.buffers))
                self._names[kind] = tuple(compress(pieces.buffers, used))
            names = self._names[kind]
            may_be = kind == WEIGHT and MASTER in kinds
            masters = [name for name in names if may_be and (MASTER, name) in buffers]
            twin = bool(masters)
            for name in masters:
                twin &= buffers[MASTER, name].data_ptr() == buffers[WEIGHT, name].data_ptr()
            stay, others = list[BufferId](), list[BufferId]()
            for name in names:
                if not twin or (MASTER, name) not in buffers:
                    (stay if (kind, name) in kept else others).append(name)
            yield DigestedBuffers(kind, twin, tuple(stay), tuple(others))

    def of(self, kind: str, names: Names, held: Mapping[BufferId, torch.Tensor]) -> ReadyDigest:
        """Return the prepared digest computation for some buffers of one state kind; prepare it if necessary.

        names: the names of these buffers.
        held: all buffers of the kind.
        """
        forms = Form.all_of(held, names)
        found = self._ready.get((kind, names))
        if found is not None and found.forms == forms:
            return found
        pieces = only(self._pieces(kind), names)
        for cut, found in self._cut:
            if found.forms == forms and names == cut.buffers and all(map(np.array_equal, cut.columns, pieces.columns)):
                break
        else:
            found = ReadyDigest.of(pieces, forms, self.vps.bases)
            self._cut.append((pieces, found))
            self.nbytes += found.nbytes
        self._ready[kind, names] = found
        return found

    def make_ready(
        self,
        buffers: Buffers,
        kinds: tuple[str, ...],
        kept: set[tuple[str, BufferId]],
        room: int,
        has_share: bool = False,
    ) -> None:
        """Prepare the tables for `buffers` in advance, until all tables together take `room` bytes.

        Kinds without buffers are left out.

        kept: (kind, name) of the buffers that the next layout reuses.
        has_share: whether tables of the other layout already cover the reused buffers, so that tables are needed only
            for the other buffers.
        """
        parts = self.parts(buffers, kinds, kept)
        for kind, names in ((part.kind, names) for part in parts for names in (part.stay, part.others)[has_share:]):
            held = of_kind(buffers, kind)
            if not held.keys() >= set(names):
                continue
            self.of(kind, names, held)
            if self.nbytes > room:
                self.nbytes -= self._ready.pop((kind, names)).nbytes
                break
        self._cut = []
        self._pieces.cache_clear()


def side_digests(
    vps: VirtualParameterSpace,
    layout: Layout,
    rank: int,
    buffers: Buffers,
    kinds: tuple[str, ...],
    kept: Collection[tuple[str, BufferId]] = (),
    known: Mapping[str, Digests] | None = None,
    ready: DigestSide | None = None,
) -> tuple[SideDigests, SideDigests]:
    """Return the digests of a rank's state before or after a change, and the part of these digests that covers the
    buffers `kept`.

    Kinds that share memory are read once.

    kept: (kind, name) of the buffers that the next layout reuses.
    known: the digests of these buffers if they were computed before the moves, so that they are not computed twice.
    ready: tables made in advance; they are ignored if they belong to another rank or another space.
    """
    found, share = SideDigests(), SideDigests()
    side = ready if ready is not None and ready.is_of(vps, layout, rank) else DigestSide(vps, layout, rank)
    for kind, twin, stay, others in side.parts(buffers, kinds, kept):
        held = of_kind(buffers, kind)
        if known is not None and kind in known:
            share[kind] = known[kind]
        else:
            share[kind] = side.of(kind, stay, held).digests(held)
            share[kind] = share[kind] + (share[MASTER] if twin else np.uint64(0))
        moved = side.of(kind, others, held).digests(held)
        found[kind] = share[kind] + moved + (found[MASTER] - share[MASTER] if twin else np.uint64(0))
    return found, share


def fold(digests: Digests) -> Digests:
    """Return one number (as a vector of length 1) for the digests of many tensors: their sum with an odd weight for
    each tensor.

    Such folds can be added up over members instead of the digests. If one tensor's digests differ, so do the folds; if
    several differ, equal folds are as unlikely as two different values with equal digests. Folding twice changes
    nothing.
    """
    weights = mixed_odd(np.arange(len(digests), dtype=np.uint64))
    weights[:1] = 1
    total: Digests = (weights * digests).sum(keepdims=True, dtype=np.uint64)
    return total


def state_digest(whole: Mapping[str, Digests]) -> str:
    """Return one digest of the whole state, computed from the digests of all tensors of all state kinds."""
    summary = hashlib.blake2b(digest_size=16)
    for kind in sorted(whole):
        summary.update(kind.encode())
        summary.update(fold(whole[kind]).tobytes())
    return summary.hexdigest()


def hint(kind: str) -> str:
    """Return a likely reason why the digests of a state kind differ, as the end of an error message; "" if none is
    known.

    A weight is cast from its master where that is cheaper than sending it, so a script that changes one must also
    change the other.
    """
    if kind not in (WEIGHT, MASTER):
        return ""
    return (
        "; was it changed in place, a weight without its fp32 master? Change both alike, or switch after the next step"
    )


def only(pieces: Pieces, names: Names) -> Pieces:
    """Return the pieces that lie in the named buffers. In the result, buffer numbers are indices into `names`."""
    if names == pieces.buffers:
        return pieces
    number = dict(zip(names, count()))
    code = np.array([number.get(name, -1) for name in pieces.buffers] or [-1], dtype=np.int64)[pieces.buffer]
    rows = np.flatnonzero(code >= 0)
    return Pieces(pieces.start[rows], pieces.stop[rows], code[rows], pieces.offset[rows], names)


SIDES = ("source", "target")
PARTS: tuple[Literal["whole", "copies", "places"], ...] = ("whole", "copies", "places")
Doubts = dict[str, list[int]]
"""For each state kind, the numbers of the tensors whose copies differ."""
_PLACES = np.uint64(1 << 32)
"""Offset that keeps the weights for `places` apart from the weights of ranks in `copies`."""


class Shares(TypedDict):
    """Weighted digests of a state before or after a change, summed over some members. Members send these records to
    each other.

    kinds: (member, its state kinds) of the first member, and of one member with other kinds if there is one.
    whole: for each state kind, the digests of whole tensors: a vector `whole` as in the module's docstring.
    copies: for each state kind, sums that are 0 if all copies within a ZeRO group are equal.
    places: for each state kind, sums that are 0 if all copies along the pipe and tensor axes are equal.
    """

    kinds: Sequence[tuple[int, list[str]]]
    whole: SideDigests
    copies: SideDigests
    places: SideDigests


def joined(one: Shares, other: Shares) -> Shares:
    """Add up the weighted digests of two groups of members."""
    total = Shares(kinds=first_and_other(one["kinds"], other["kinds"]), whole={}, copies={}, places={})
    for part in PARTS:
        total[part] = {**one[part], **other[part]}
        for kind in one[part].keys() & other[part].keys():
            total[part][kind] = one[part][kind] + other[part][kind]
    return total


def joined_sides(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Add up two reports. A report has the weighted digests before ("source") and after ("target") the change; None for
    members that have no rank there."""
    found = dict[str, Any]()
    for side in SIDES:
        mine, theirs = one[side], other[side]
        found[side] = joined(mine, theirs) if mine and theirs else mine or theirs
    return found


def folded(side: Shares) -> Shares:
    """Return the weighted digests with each vector reduced to one number; see `fold`."""
    found = side.copy()
    for part in PARTS:
        found[part] = {kind: fold(digests) for kind, digests in side[part].items()}
    return found


def certify(vps: VirtualParameterSpace, source: Layout, target: Layout, report: Mapping[str, Shares]) -> dict[str, Any]:
    """Compare the state before and after a change. Return {"digest": digest of the whole state} if both are equal and
    all copies are equal.

    Returns {"doubts": ...} if copies differ. Raises CertificateError, naming the tensor and the kind, if the states
    before and after differ.

    report: the sums over all members, for "source" (before) and "target" (after).
    """
    wrong, wholes, nothing = dict[str, Doubts](), list[SideDigests](), np.zeros(len(vps.tensors), np.uint64)
    for side in SIDES:
        sums = report[side]
        _check_kinds(sums, side)
        wrong[side] = {**doubts(sums["places"]), **doubts(sums["copies"])}
        wholes.append({**dict.fromkeys(sums["kinds"][0][1], nothing), **sums["whole"]})  # a kind of which none has any
    if wrong["source"] or wrong["target"]:
        return {"doubts": wrong}
    (held, arrived), kept = wholes, SideDigests()
    for kind in held:
        if kind not in arrived:
            if not vps.is_held(target, kind):
                continue
            raise CertificateError(f"state kind {kind!r} was there before the switch and is not after it")
        different = np.flatnonzero(held[kind] != arrived[kind])
        if len(different):
            name = vps.tensors[int(different[0])].name
            raise CertificateError(
                f"{kind} of {name!r} is not the same after the moves ({len(different)} of {len(vps.tensors)} tensors "
                f"differ in this kind){hint(kind)}"
            )
        kept[kind] = held[kind]
    if new := arrived.keys() - held.keys():
        extra = sorted(kind for kind in new if vps.is_held(source, kind))
        if extra:
            raise CertificateError(f"state kinds {extra} appeared in the switch")
    return {"digest": state_digest(kept)}


def _check_kinds(sums: Shares, side: str) -> None:
    """Raise CertificateError if members do not all hold the same state kinds.

    side: "source" (before) or "target" (after), for the error.
    """
    if len(sums["kinds"]) > 1:
        (one, first), (other, second) = sums["kinds"]
        only = ", ".join(sorted(set(first) ^ set(second)))
        raise CertificateError(f"{side}: only one of members {one} and {other} holds {only}")


def doubts(sums: Mapping[str, Digests]) -> Doubts:
    """Return, for each state kind, the indices of the tensors whose sums are not 0."""
    found = Doubts()
    for kind, values in sums.items():
        if values.any():
            found[kind] = np.flatnonzero(values).tolist()
    return found


def shares(vps: VirtualParameterSpace, layout: Layout, members: tuple[int, ...], rank: int, own: SideDigests) -> Shares:
    """Return one member's weighted digests, which are added up over all ranks of a layout.

    own: the digests of that member.
    """
    whole, copies, places = SideDigests(), SideDigests(), SideDigests()
    for kind, digests in own.items():
        is_counted, by_copy, by_place = _weights(vps, layout, kind, rank)
        for sums, weights in ((copies, by_copy), (places, by_place)):
            if weights.any():
                sums[kind] = weights * digests
        if is_counted.any():
            whole[kind] = np.where(is_counted, digests, np.uint64(0))
    return Shares(kinds=[(members[rank], sorted(own))], whole=whole, copies=copies, places=places)


def agreed(
    session: Session, step: str, vps: VirtualParameterSpace, layout: Layout, rank: int, own: SideDigests, side: str
) -> SideDigests:
    """Return the digests of the whole tensors that the members of the session hold together, keyed by state kind.

    step: a name that is unique in the session.
    own: this member's digests.
    side: a name for the state, used in errors.

    Raises CertificateError on all members if copies differ. The error names the tensor, the kind and two members.
    """
    members = session.members

    def judge(found: Shares) -> dict[str, Any]:
        wrong = {**doubts(found["places"]), **doubts(found["copies"])}
        return {"doubts": wrong, "kinds": found["kinds"], "whole": {} if wrong else found["whole"]}

    found = session.reduce(step, shares(vps, layout, members, rank, own), joined, judge)
    _check_kinds(found, side)
    if found["doubts"]:
        what = session, f"{step}/differing", vps, layout, members, own, found["doubts"], side
        raise CertificateError(explained(*what))
    return {**dict.fromkeys(own, np.zeros(len(vps.tensors), np.uint64)), **found["whole"]}


def differing(
    session: Session, step: str, vps: VirtualParameterSpace, layout: Layout, rank: int, own: SideDigests, side: str
) -> Doubts:
    """Return, for each state kind, the tensors whose copies differ between ranks along the pipe and tensor axes.

    The arguments are those of `agreed`. Raises CertificateError if copies within a ZeRO group differ.
    """
    members = session.members

    def judge(found: Shares) -> dict[str, Doubts]:
        return {"copies": doubts(found["copies"]), "places": doubts(found["places"])}

    mine = shares(vps, layout, members, rank, own)
    for name, terms in ((f"{step}/folds", folded(mine)), (step, mine)):
        found = session.reduce(name, terms, joined, judge)
        if not found["copies"] and not found["places"]:
            return {}
    if found["copies"]:
        what = session, f"{step}/differing", vps, layout, members, own, found["copies"], side
        raise CertificateError(explained(*what))
    places: Doubts = found["places"]
    return places


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
    """Return an error message about copies that differ; it names the tensor and two members that hold different copies.

    Called on all members of the session.

    members: the member at each rank of the layout.
    own: the digests of this member; None if it has no rank in the layout.
    wrong: for each state kind, the indices of the tensors whose copies differ.
    """
    kind, (number, *_) = next(iter(wrong.items()))
    mine = {} if own is None else {str(session.board.member): int(own[kind][number])}

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
    """Return two ranks whose copies of a tensor differ; None if no copies differ.

    number: the index of the tensor.
    held: each rank's digest of the tensor.
    """
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
    """Return, for every ZeRO group, its ranks and whether each tensor belongs to it."""
    mesh = vps.mesh(layout)
    if mesh is None:
        return [(np.arange(layout.world_size), np.ones(len(vps.tensors), bool))]
    return [(group.ranks, vps.line.experts == group.experts) for group in mesh.shard_groups]


def _holders(vps: VirtualParameterSpace, layout: Layout, kind: str, number: int, ranks: Ints) -> list[int]:
    """Return the ranks of a ZeRO group that hold a whole tensor; [] if each rank holds only a part.

    number: the index of the tensor.
    """
    if vps.kind(kind).overlaps(layout):
        return [rank for rank in ranks.tolist() if number in vps.local(layout, rank).rows(kind)[0]]
    return ranks.tolist() if vps.is_replicated(layout, kind) else []


# ---- who counts for what ---------------------------------------------------------------------------------------------


def _weights(vps: VirtualParameterSpace, layout: Layout, kind: str, rank: int) -> tuple[Ints, Digests, Digests]:
    """Return three arrays with one entry per tensor: whether this rank's digest counts for `whole`, its weight in
    `copies`, and its weight in `places` (see the module's docstring)."""
    count, mesh = len(vps.tensors), vps.mesh(layout)
    if mesh is None:
        ((ranks, rows),) = _groups(vps, layout)
        return *_in_group(vps, layout, kind, rank, ranks, rows), np.zeros(count, np.uint64)
    tensors, groups, firsts = mesh.holders
    is_counted, copies, places = np.zeros(count, bool), np.zeros(count, np.uint64), np.zeros(count, np.uint64)
    weights = mixed_odd(np.arange(len(mesh.shard_groups), dtype=np.uint64) + _PLACES)
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
    """Return two arrays with one entry per tensor: whether the rank's digest counts for `whole` in its ZeRO group, and
    its weight in `copies`.

    ranks: the ranks of the group.
    rows: whether each tensor belongs to the group.
    """
    weights, mine = mixed_odd(ranks.astype(np.uint64)), int(np.flatnonzero(ranks == rank)[0])
    if vps.kind(kind).overlaps(layout):
        holds = np.zeros((len(ranks), len(rows)), bool)
        for place, other in enumerate(ranks.tolist()):
            holds[place, np.unique(vps.local(layout, other).rows(kind)[0])] = True
        holds &= rows
        counts = holds[mine] & ~holds[:mine].any(axis=0)
        weighed = np.where(holds, weights[:, None], np.uint64(0))
        others = np.uint64(0) - (weighed.sum(axis=0, dtype=np.uint64) - weighed[mine])
        return counts, np.where(counts, others, weighed[mine])
    if not vps.is_replicated(layout, kind):
        return rows, np.zeros(len(rows), np.uint64)
    weight = weights[mine] if mine else np.zeros(1, np.uint64) - weights[1:].sum(dtype=np.uint64)  # arrays wrap around
    return rows & (mine == 0), np.where(rows, weight, np.uint64(0))
