"""Digests of one side of a change: what a member holds, and what the members hold together.

Per state kind a member has one 64-bit digest per logical tensor over the pieces that it holds. Of a partitioned kind
the members' digests add up to that of the whole tensor, of a replicated one each member's is that of the whole, and so
is that of each holder where a kind keeps tensors whole. `transaction.shares` makes of this what always adds up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.space import ABSENT, MASTER, WEIGHT, BufferId, Layout, Mesh, Pieces, VirtualParameterSpace
from ds_dynatrain.space.overlapping import is_overlapping
from ds_dynatrain.space.tensor import Ints
from ds_dynatrain.transfer import digest_pieces

Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SideDigests:
    """One member's digests of one side: kind -> one number per logical tensor."""

    of: Mapping[str, Digests]


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
    sides: Mapping[int, SideDigests],
    side: str,
) -> dict[str, Digests]:
    """Kind -> digests of whole tensors. members: at each rank of the layout.

    Replicas must agree, whether data-parallel copies or tensors that the other axes leave whole on several places.
    """
    first = sides[members[0]]
    for member, other in sides.items():
        if set(other.of) != set(first.of):
            kinds = sorted(set(other.of) ^ set(first.of))
            raise CertificateError(f"{side}: only one of members {members[0]} and {member} holds {', '.join(kinds)}")
    mesh = vps.mesh(layout)
    whole: dict[str, Digests] = {}
    for kind in first.of:
        what = f"{side}: {kind}"
        found = _of_shard_groups(
            vps, layout, members, {member: held.of[kind] for member, held in sides.items()}, kind, what
        )
        for number, one, two in drifted(mesh, found) if mesh is not None else ():
            raise CertificateError(_replica_text(vps.tensors[number].name, (members[one], members[two]), what))
        whole[kind] = found[0] if mesh is None else _joined(mesh, found)
    return whole


def _of_shard_groups(
    vps: VirtualParameterSpace,
    layout: Layout,
    members: tuple[int, ...],
    digests: Mapping[int, Digests],
    kind: str,
    what: str,
) -> list[Digests]:
    """The digests of one kind for each shard group of the mesh, or of the one group that there is without a mesh."""
    mesh = vps.mesh(layout)
    routed = np.array([tensor.expert for tensor in vps.tensors], dtype=bool)
    shard_groups = [(np.arange(len(members)), np.ones(len(routed), dtype=bool))]
    if mesh is not None:
        shard_groups = [(group.ranks, routed == group.experts) for group in mesh.shard_groups]
    replicated, overlapping = vps.is_replicated(layout, kind), is_overlapping(vps.kind(kind), layout)
    found = []
    for ranks, rows in shard_groups:
        held = {members[rank]: np.where(rows, digests[members[rank]], 0) for rank in ranks.tolist()}
        if overlapping:
            whose = {members[rank]: np.unique(vps.local(layout, rank).rows(kind)[0]) for rank in ranks.tolist()}
            found.append(_overlapping_digest(vps, held, whose, what))
        else:
            found.append(_shard_group_digest(vps, held, replicated, what))
    return found


def _shard_group_digest(
    vps: VirtualParameterSpace, held: Mapping[int, Digests], replicated: bool, what: str
) -> Digests:
    """One digest for each tensor, of what the members of a ZeRO group hold together; 0 for those of other groups."""
    if not replicated:
        total: Digests = np.sum(list(held.values()), axis=0, dtype=np.uint64)
        return total
    first, *others = held
    for member in others:
        _check_replica(vps, held[first], held[member], (first, member), what)
    return held[first]


def _overlapping_digest(
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
    """(tensor, rank, rank) where two shard groups hold the same part of a tensor and their digests differ."""
    tensors, shard_groups, firsts = mesh.holders
    every = np.stack(found)
    for row in np.flatnonzero(every[shard_groups, tensors] != every[firsts, tensors]).tolist():
        one, other = mesh.shard_groups[firsts[row]], mesh.shard_groups[shard_groups[row]]
        yield int(tensors[row]), int(one.ranks[0]), int(other.ranks[0])


def _joined(mesh: Mesh, found: list[Digests]) -> Digests:
    """Digests of whole tensors out of those of shard groups: parts add up, and one shard group speaks for each."""
    tensors, shard_groups, firsts = mesh.holders
    speaks = shard_groups == firsts
    total = np.zeros(len(found[0]), np.uint64)
    np.add.at(total, tensors[speaks], np.stack(found)[shard_groups[speaks], tensors[speaks]])
    return total


def _check_replica(vps: VirtualParameterSpace, one: Digests, other: Digests, pair: tuple[int, int], what: str) -> None:
    different = np.flatnonzero(one != other)
    if len(different):
        raise CertificateError(_replica_text(vps.tensors[int(different[0])].name, pair, what))


def _replica_text(name: str, pair: tuple[int, int], what: str) -> str:
    kind = what.split(": ")[-1]
    return f"{what} of {name!r} differs between the replicas of members {pair[0]} and {pair[1]}{hint(kind)}"


def hint(kind: str) -> str:
    """What may be behind it: a weight is cast from its master where that is cheaper than to send it."""
    if kind not in (WEIGHT, MASTER):
        return ""
    return (
        "; was it changed in place, a weight without its fp32 master? Change both alike, or switch after the next step"
    )


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
