"""The certificate: what every member reports of its state before and after, and what must be equal for a commit.

Per state kind a member reports one 64-bit digest per logical tensor over the pieces it holds. Of a partitioned kind the
members' digests add up to that of the whole tensor, of a replicated one each member's is that of the whole, and so is
that of each holder where a kind keeps tensors whole. Every member reads all reports and comes to the same verdict.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.engine import streams
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.space import ABSENT, MASTER, WEIGHT, BufferId, Layout, Mesh, Pieces, VirtualParameterSpace
from ds_dynatrain.space.tensor import Ints
from ds_dynatrain.space.widened import is_widened
from ds_dynatrain.transfer import digest_pieces

Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SideDigests:
    """One member's digests of one side: kind -> one number per logical tensor."""

    of: Mapping[str, Digests]

    def to_json(self) -> dict[str, str]:
        """Plain JSON."""
        return {kind: base64.b64encode(values.tobytes()).decode() for kind, values in self.of.items()}

    @staticmethod
    def from_json(record: Mapping[str, str]) -> SideDigests:
        """The inverse of `to_json`."""
        return SideDigests({kind: np.frombuffer(base64.b64decode(text), np.uint64) for kind, text in record.items()})


def side_digests(
    vps: VirtualParameterSpace,
    layout: Layout,
    rank: int,
    buffers: Buffers,
    kinds: tuple[str, ...],
    kept: set[tuple[str, BufferId]],
    known: Mapping[str, Digests] | None = None,
) -> tuple[SideDigests, dict[str, Digests]]:
    """(digests of a side, their share that lies in `kept` buffers).

    known: the share of the kept buffers, where it was computed before the moves; it is then not computed again.
    Kinds that are the same memory are read once.
    """
    found: dict[str, Digests] = {}
    share: dict[str, Digests] = {}
    for kind in sorted(kinds, key=lambda name: name == WEIGHT):  # the weight last: it may be the master's memory
        pieces = vps.holding(layout, rank, kind)
        names = [pieces.buffers[index] for index in np.unique(pieces.buffer).tolist()]
        twin = kind == WEIGHT and MASTER in found and _same_memory(buffers, names)
        read = [name for name in names if not (twin and (MASTER, name) in buffers)]
        stay = [name for name in read if (kind, name) in kept]
        if known is not None and kind in known:
            share[kind] = known[kind]
        else:
            share[kind] = digest_pieces(_only(pieces, stay), _of(buffers, kind), vps.bases)
            share[kind] = share[kind] + (share[MASTER] if twin else np.uint64(0))
        moved = digest_pieces(_only(pieces, [name for name in read if name not in stay]), _of(buffers, kind), vps.bases)
        found[kind] = share[kind] + moved + (found[MASTER] - share[MASTER] if twin else np.uint64(0))
    return SideDigests(found), share


def verdict(
    vps: VirtualParameterSpace,
    source: Layout,
    target: Layout,
    reports: Mapping[int, Mapping[str, Any]],
    source_members: tuple[int, ...],
    target_members: tuple[int, ...],
) -> str:
    """One digest over the whole state, equal on both sides.

    reports: of every member, with "source" and "target" digests and "carry" fingerprints. CertificateError names the
    tensor, kind and member (a replica that differs), or the members whose carry differs.
    """
    _check_carry(reports, source_members, target_members)
    _check_streams(reports, source, target, source_members, target_members)
    _check_newcomers(reports, source_members, target_members)
    given = {member: reports[member]["source"] for member in source_members}
    arrived = {member: reports[member]["target"] for member in target_members}
    before = whole_digests(vps, source, source_members, given, "source")
    after = whole_digests(vps, target, target_members, arrived, "target")
    kept: dict[str, Digests] = {}
    for kind in before:
        if kind not in after:
            if not vps.is_held(target, kind):
                continue
            raise CertificateError(f"state kind {kind!r} was there before the switch and is not after it")
        different = np.flatnonzero(before[kind] != after[kind])
        if len(different):
            name = vps.tensors[int(different[0])].name
            raise CertificateError(
                f"{kind} of {name!r} is not the same after the moves ({len(different)} of {len(vps.tensors)} tensors "
                f"differ in this kind){_hint(kind)}"
            )
        kept[kind] = before[kind]
    extra = sorted(kind for kind in set(after) - set(before) if vps.is_held(source, kind))
    if extra:
        raise CertificateError(f"state kinds {extra} appeared in the switch")
    return state_digest(kept)


def state_digest(whole: Mapping[str, Digests]) -> str:
    """One digest over the whole state: of the tensors of every kind, in the order of the kinds' names."""
    summary = hashlib.blake2b(digest_size=16)
    for kind in sorted(whole):
        summary.update(kind.encode())
        summary.update(whole[kind].tobytes())
    return summary.hexdigest()


def whole_digests(
    vps: VirtualParameterSpace,
    layout: Layout,
    members: tuple[int, ...],
    records: Mapping[int, Mapping[str, str]],
    side: str,
) -> dict[str, Digests]:
    """Kind -> digests of whole tensors. members: at each rank of the layout.

    Replicas must agree, whether data-parallel copies or tensors that the other axes leave whole on several places.
    """
    sides = {member: SideDigests.from_json(record) for member, record in records.items()}
    first = sides[members[0]]
    for member, other in sides.items():
        if set(other.of) != set(first.of):
            kinds = sorted(set(other.of) ^ set(first.of))
            raise CertificateError(f"{side}: only one of members {members[0]} and {member} holds {', '.join(kinds)}")
    mesh = vps.mesh(layout)
    whole: dict[str, Digests] = {}
    for kind in first.of:
        what = f"{side}: {kind}"
        found = _of_decks(vps, layout, members, {member: held.of[kind] for member, held in sides.items()}, kind, what)
        for number, one, two in drifted(mesh, found) if mesh is not None else ():
            raise CertificateError(_replica_text(vps.tensors[number].name, (members[one], members[two]), what))
        whole[kind] = found[0] if mesh is None else _joined(mesh, found)
    return whole


def drifts(
    vps: VirtualParameterSpace, layout: Layout, members: tuple[int, ...], records: Mapping[int, Mapping[str, str]]
) -> dict[str, list[int]]:
    """Kind -> numbers of the tensors whose replicas at several places of the pipe and tensor axes are not equal.

    records: digests of the source by member. CertificateError for replicas of the data axis that are not.
    """
    mesh, found = vps.mesh(layout), dict[str, list[int]]()
    sides = {member: SideDigests.from_json(record) for member, record in records.items()}
    for kind in sides[members[0]].of:
        held = {member: side.of[kind] for member, side in sides.items()}
        of_decks = _of_decks(vps, layout, members, held, kind, f"source: {kind}")
        found[kind] = sorted({number for number, _, _ in drifted(mesh, of_decks)}) if mesh is not None else []
    return {kind: numbers for kind, numbers in found.items() if numbers}


def _of_decks(
    vps: VirtualParameterSpace,
    layout: Layout,
    members: tuple[int, ...],
    digests: Mapping[int, Digests],
    kind: str,
    what: str,
) -> list[Digests]:
    """The digests of one kind for each deck of the mesh, or of the one group that there is without a mesh."""
    mesh = vps.mesh(layout)
    routed = np.array([tensor.expert for tensor in vps.tensors], dtype=bool)
    decks = [(np.arange(len(members)), np.ones(len(routed), dtype=bool))]
    if mesh is not None:
        decks = [(deck.ranks, routed == deck.experts) for deck in mesh.decks]
    replicated, widened = vps.is_replicated(layout, kind), is_widened(vps.kind(kind), layout)
    found = []
    for ranks, rows in decks:
        held = {members[rank]: np.where(rows, digests[members[rank]], 0) for rank in ranks.tolist()}
        if widened:
            whose = {members[rank]: np.unique(vps.local(layout, rank).rows(kind)[0]) for rank in ranks.tolist()}
            found.append(_widened_digest(vps, held, whose, what))
        else:
            found.append(_deck_digest(vps, held, replicated, what))
    return found


def _deck_digest(vps: VirtualParameterSpace, held: Mapping[int, Digests], replicated: bool, what: str) -> Digests:
    """One digest for each tensor, of what the members of a ZeRO group hold together; 0 for those of other groups."""
    if not replicated:
        total: Digests = np.sum(list(held.values()), axis=0, dtype=np.uint64)
        return total
    first, *others = held
    for member in others:
        _check_replica(vps, held[first], held[member], (first, member), what)
    return held[first]


def _widened_digest(
    vps: VirtualParameterSpace, held: Mapping[int, Digests], whose: Mapping[int, Ints], what: str
) -> Digests:
    """The same where whoever has a tensor has all of it; whose: the numbers of the tensors that each member has."""
    found, holder = np.zeros(len(vps.tensors), np.uint64), np.full(len(vps.tensors), ABSENT)
    for member, numbers in whose.items():
        fresh = numbers[holder[numbers] == ABSENT]
        found[fresh], holder[fresh] = held[member][fresh], member
        different = numbers[found[numbers] != held[member][numbers]]
        if len(different):
            number = int(different[0])
            raise CertificateError(_replica_text(vps.tensors[number].name, (int(holder[number]), member), what))
    return found


def drifted(mesh: Mesh, found: list[Digests]) -> Iterator[tuple[int, int, int]]:
    """(tensor, rank, rank) where two decks hold the same part of a tensor and their digests differ."""
    tensors, decks, firsts = mesh.holders
    every = np.stack(found)
    for row in np.flatnonzero(every[decks, tensors] != every[firsts, tensors]).tolist():
        one, other = mesh.decks[firsts[row]], mesh.decks[decks[row]]
        yield int(tensors[row]), int(one.ranks[0]), int(other.ranks[0])


def _joined(mesh: Mesh, found: list[Digests]) -> Digests:
    """Digests of whole tensors out of those of decks: parts add up, and one deck speaks for each."""
    tensors, decks, firsts = mesh.holders
    speaks = decks == firsts
    total = np.zeros(len(found[0]), np.uint64)
    np.add.at(total, tensors[speaks], np.stack(found)[decks[speaks], tensors[speaks]])
    return total


def _check_replica(vps: VirtualParameterSpace, one: Digests, other: Digests, pair: tuple[int, int], what: str) -> None:
    different = np.flatnonzero(one != other)
    if len(different):
        raise CertificateError(_replica_text(vps.tensors[int(different[0])].name, pair, what))


def _replica_text(name: str, pair: tuple[int, int], what: str) -> str:
    kind = what.split(": ")[-1]
    return f"{what} of {name!r} differs between the replicas of members {pair[0]} and {pair[1]}{_hint(kind)}"


def _hint(kind: str) -> str:
    """A weight is cast from its master where that is cheaper than to send it."""
    if kind not in (WEIGHT, MASTER):
        return ""
    return (
        "; was it changed in place, a weight without its fp32 master? Change both alike, or switch after the next step"
    )


def _check_carry(
    reports: Mapping[int, Mapping[str, Any]], source_members: tuple[int, ...], target_members: tuple[int, ...]
) -> None:
    expected = reports[source_members[0]]["carry_before"]
    for when, members in (("before", source_members), ("after", target_members)):
        for member in members:
            mine = reports[member][f"carry_{when}"]
            parts = sorted(part for part in expected if mine.get(part) != expected[part])
            if parts:
                raise CertificateError(
                    f"carry of member {member} {when} the moves differs from rank 0's before them in: "
                    f"{', '.join(parts)}"
                )


def _check_streams(
    reports: Mapping[int, Mapping[str, Any]],
    source: Layout,
    target: Layout,
    source_members: tuple[int, ...],
    target_members: tuple[int, ...],
) -> None:
    """A place that lives on has the random streams it had, whoever holds it now."""
    for rank, after in enumerate(target_members):
        origin = streams.origin(source, target, rank)
        if origin is None:
            continue
        before, which = source_members[origin], "shared_stream" if streams.is_forked(source, target, rank) else "stream"
        if reports[before][f"{which}_before"] != reports[after][f"{which}_after"]:
            raise CertificateError(
                f"random streams of data index {target.coordinate(rank)['data']}: those of member {after} are not "
                f"those that member {before} had"
            )


def _check_newcomers(
    reports: Mapping[int, Mapping[str, Any]], source_members: tuple[int, ...], target_members: tuple[int, ...]
) -> None:
    """What only rank 0 could give (module buffers, the user's objects) arrived as it was sent."""
    for member in target_members:
        if member not in source_members and reports[member]["rest"] != reports[source_members[0]]["rest"]:
            raise CertificateError(f"module buffers or carried objects of member {member} are not those of rank 0")


def _same_memory(buffers: Buffers, names: list[BufferId]) -> bool:
    paired = [(buffers[WEIGHT, name], buffers[MASTER, name]) for name in names if (MASTER, name) in buffers]
    return bool(paired) and all(weight.data_ptr() == master.data_ptr() for weight, master in paired)


def _of(buffers: Buffers, kind: str) -> dict[BufferId, Any]:
    return {name: held for (held_kind, name), held in buffers.items() if held_kind == kind}


def _only(pieces: Pieces, names: list[BufferId]) -> Pieces:
    """The pieces in the named buffers, with a table of just these."""
    number = {name: index for index, name in enumerate(names)}
    code = np.array([number.get(name, -1) for name in pieces.buffers] or [-1], dtype=np.int64)[pieces.buffer]
    rows = code >= 0
    return Pieces(pieces.start[rows], pieces.stop[rows], code[rows], pieces.offset[rows], tuple(names))
