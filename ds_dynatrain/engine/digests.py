"""Digests of one side of a change: what a member holds, and what the members hold together.

Per state kind a member has one 64-bit digest per logical tensor over the pieces that it holds. Of a partitioned kind
the members' digests add up to that of the whole tensor, of a replicated one each member's is that of the whole, and so
is that of each holder where a kind keeps tensors whole. `transaction.shares` makes of this what always adds up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, Pieces, VirtualParameterSpace
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
            share[kind] = digest_pieces(only(pieces, stay), of_kind(buffers, kind), vps.bases)
            share[kind] = share[kind] + (share[MASTER] if twin else np.uint64(0))
        others = [name for name in read if name not in stay]
        moved = digest_pieces(only(pieces, others), of_kind(buffers, kind), vps.bases)
        found[kind] = share[kind] + moved + (found[MASTER] - share[MASTER] if twin else np.uint64(0))
    return SideDigests(found), share


def state_digest(whole: Mapping[str, Digests]) -> str:
    """One digest over the whole state: of the tensors of every kind, in the order of the kinds' names."""
    summary = hashlib.blake2b(digest_size=16)
    for kind in sorted(whole):
        summary.update(kind.encode())
        summary.update(whole[kind].tobytes())
    return summary.hexdigest()


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


def of_kind(buffers: Buffers, kind: str) -> dict[BufferId, Any]:
    """The buffers of one kind, by their names."""
    return {name: held for (held_kind, name), held in buffers.items() if held_kind == kind}


def only(pieces: Pieces, names: list[BufferId]) -> Pieces:
    """The pieces in the named buffers, with a table of just these."""
    number = {name: index for index, name in enumerate(names)}
    code = np.array([number.get(name, -1) for name in pieces.buffers] or [-1], dtype=np.int64)[pieces.buffer]
    rows = code >= 0
    return Pieces(pieces.start[rows], pieces.stop[rows], code[rows], pieces.offset[rows], tuple(names))
