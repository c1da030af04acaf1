"""Digests of what one rank holds on one side of a change, and how its buffers are cut for them.

Per state kind a member has one 64-bit digest per logical tensor over the pieces that it holds. The members' digests of
a partitioned kind add up to that of the whole tensor. Of a replicated kind, or one that keeps tensors whole, each
holder's digest is that of the whole tensor. `transaction.certificate` turns both into sums.

A switch cuts both sides while training runs (`engine.preparation`); its pause only reads memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, Pieces, VirtualParameterSpace
from ds_dynatrain.transfer import Form, ReadyDigest

Digests = npt.NDArray[np.uint64]
SideDigests = dict[str, Digests]
"""State kind -> one number per logical tensor: one member's digests of one side."""
Names = tuple[BufferId, ...]


class Part(NamedTuple):
    """Buffers of one kind that are read: those that stay, and the others.

    twin: the masters are the same memory as these weights; nothing of it is read again.
    """

    kind: str
    twin: bool
    stay: Names
    others: Names


class Side:
    """One rank's side of a change, and the tables by which its buffers are cut.

    A table serves the same buffers with elements of the same size on the same device; other buffers are cut anew. Kinds
    with equal pieces are cut once.
    """

    def __init__(self, vps: VirtualParameterSpace, layout: Layout, rank: int) -> None:
        self.vps, self.layout, self.rank = vps, layout, rank
        self._names: dict[str, Names] = {}
        self._ready: dict[tuple[str, Names], ReadyDigest] = {}
        self._cut: list[tuple[Pieces, ReadyDigest]] = []
        self._last: tuple[str, Pieces] | None = None

    def is_of(self, vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: tuple[str, ...]) -> bool:
        """Return whether this is the side of a rank in a layout, as this space cuts these kinds."""
        if (self.layout, self.rank) != (layout, rank) or vps.line is not self.vps.line:
            return False
        return all(vps.sharding(layout, kind) is self.vps.sharding(layout, kind) for kind in kinds)

    def parts(self, buffers: Buffers, kinds: tuple[str, ...], kept: Collection[tuple[str, BufferId]]) -> Iterator[Part]:
        """Yield the buffers to read, kind by kind; the weight comes last, as it may be the master's memory."""
        for kind in sorted(kinds, key=lambda name: name == WEIGHT):
            names = self._names_of(kind)
            twin = kind == WEIGHT and MASTER in kinds and _same_memory(buffers, names)
            read = [name for name in names if not (twin and (MASTER, name) in buffers)]
            stay = tuple(name for name in read if (kind, name) in kept)
            yield Part(kind, twin, stay, tuple(name for name in read if (kind, name) not in kept))

    def of(self, kind: str, names: Names, held: Mapping[BufferId, torch.Tensor]) -> ReadyDigest:
        """Return the digest of one kind over the named buffers of `held`."""
        forms = Form.all_of(held, names)
        found = self._ready.get((kind, names))
        if found is None or found.forms != forms:
            pieces = only(self._pieces(kind), names)
            found = next((each for cut, each in self._cut if each.forms == forms and _equal(cut, pieces)), None)
            if found is None:
                found = ReadyDigest.of(pieces, forms, self.vps.bases)
                self._cut.append((pieces, found))
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
        """Cut now what `buffers` will be asked for, up to `room` bytes of tables.

        has_share: the buffers that stay are read on the other side, so only the others are cut here.
        """
        there = tuple(kind for kind in kinds if all((kind, name) in buffers for name in self._names_of(kind)))
        parts = self.parts(buffers, there, kept)
        wanted = ((part.kind, names) for part in parts for names in (part.stay, part.others)[has_share:])
        for kind, names in wanted:
            self.of(kind, names, of_kind(buffers, kind))
            if self.nbytes > room:
                del self._ready[kind, names]
                break
        self._cut, self._last = [], None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tables take."""
        return sum({id(each): each.nbytes for each in self._ready.values()}.values())

    def _names_of(self, kind: str) -> Names:
        """Return the buffers in which the rank has elements of a kind."""
        if kind not in self._names:
            pieces = self._pieces(kind)
            used = np.flatnonzero(np.bincount(pieces.buffer, minlength=len(pieces.buffers)))
            self._names[kind] = tuple(pieces.buffers[index] for index in used.tolist())
        return self._names[kind]

    def _pieces(self, kind: str) -> Pieces:
        if self._last is None or self._last[0] != kind:
            self._last = kind, self.vps.holding(self.layout, self.rank, kind)
        return self._last[1]


def side_digests(
    vps: VirtualParameterSpace,
    layout: Layout,
    rank: int,
    buffers: Buffers,
    kinds: tuple[str, ...],
    kept: Collection[tuple[str, BufferId]] = (),
    known: Mapping[str, Digests] | None = None,
    ready: Side | None = None,
) -> tuple[SideDigests, SideDigests]:
    """Return (digests of a side, their share that lies in `kept` buffers).

    known: the share of the kept buffers, if it was computed before the moves; it is not computed again then. ready:
    tables made ahead; they are ignored if they are another rank's or another space's. Kinds that are one memory are
    read once.
    """
    found, share = SideDigests(), SideDigests()
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
    return found, share


def state_digest(whole: Mapping[str, Digests]) -> str:
    """Return one digest over the whole state: the tensors of every kind, in the order of the kinds' names."""
    summary = hashlib.blake2b(digest_size=16)
    for kind in sorted(whole):
        summary.update(kind.encode())
        summary.update(whole[kind].tobytes())
    return summary.hexdigest()


def hint(kind: str) -> str:
    """Return a likely cause of differing digests of a kind, in words; "" if there is none.

    A weight is cast from its master where that is cheaper than to send it, so both must have been changed alike.
    """
    if kind not in (WEIGHT, MASTER):
        return ""
    return (
        "; was it changed in place, a weight without its fp32 master? Change both alike, or switch after the next step"
    )


def of_kind(buffers: Buffers, kind: str) -> dict[BufferId, Any]:
    """Return the buffers of one kind, by their names."""
    return {name: held for (held_kind, name), held in buffers.items() if held_kind == kind}


def only(pieces: Pieces, names: Names) -> Pieces:
    """Return the pieces in the named buffers, with a table of just these."""
    if names == pieces.buffers:
        return pieces
    number = {name: index for index, name in enumerate(names)}
    code = np.array([number.get(name, -1) for name in pieces.buffers] or [-1], dtype=np.int64)[pieces.buffer]
    rows = code >= 0
    if rows.all():
        return Pieces(pieces.start, pieces.stop, code, pieces.offset, names)
    return Pieces(pieces.start[rows], pieces.stop[rows], code[rows], pieces.offset[rows], names)


def _same_memory(buffers: Buffers, names: Names) -> bool:
    paired = [(buffers[WEIGHT, name], buffers[MASTER, name]) for name in names if (MASTER, name) in buffers]
    return bool(paired) and all(weight.data_ptr() == master.data_ptr() for weight, master in paired)


def _equal(one: Pieces, other: Pieces) -> bool:
    columns = ("start", "stop", "buffer", "offset")
    same = (np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
    return one.buffers == other.buffers and all(same)
