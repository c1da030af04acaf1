"""Digests of one side of a change: what a member holds, and what the members hold together.

Per state kind a member has one 64-bit digest per logical tensor over the pieces that it holds. Of a partitioned kind
the members' digests add up to that of the whole tensor, of a replicated one each member's is that of the whole, and so
is that of each holder where a kind keeps tensors whole. `transaction.shares` makes of this what always adds up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.engine.sides import Side, of_kind
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, VirtualParameterSpace

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
    ready: Side | None = None,
) -> tuple[SideDigests, dict[str, Digests]]:
    """(digests of a side, their share that lies in `kept` buffers).

    known: the share of the kept buffers, where it was computed before the moves; it is then not computed again. ready:
    what was made ahead; nothing is taken from that of another rank or space. Kinds that are one memory are read once.
    """
    found: dict[str, Digests] = {}
    share: dict[str, Digests] = {}
    side = ready if ready is not None and ready.is_of(vps, layout, rank, kinds) else Side(vps, layout, rank)
    for kind, twin, stay, others in side.parts(buffers, kinds, kept):
        held = of_kind(buffers, kind)
        if known is not None and kind in known:
            share[kind] = known[kind]
        else:
            share[kind] = side.of(kind, stay, held).digests(held)
            share[kind] = share[kind] + (share[MASTER] if twin else np.uint64(0))
        moved = side.of(kind, others, held).digests(held)
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
