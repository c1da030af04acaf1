"""Digests of the state that one rank holds on one side of a change, and the tables that cut its buffers into pieces.

For each state kind, a member has one 64-bit digest per logical tensor, over the pieces that it holds. For a partitioned
kind, the digests of all members add up to that of the whole tensor. For a replicated kind, or one that keeps tensors
whole, each holder's digest is already that of the whole tensor. `certificate` combines both into sums.

A switch makes the tables of both sides while training runs (`preparation`), so that its pause only has to read memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache, partial
from itertools import compress, count
from operator import is_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, Pieces, VirtualParameterSpace, of_kind
from ds_dynatrain.transfer import Form, ReadyDigest
from ds_dynatrain.transfer.weighing import odd

Digests = npt.NDArray[np.uint64]
SideDigests = dict[str, Digests]
"""State kind -> one number per logical tensor: one member's digests of one side."""
Names = tuple[BufferId, ...]


class DigestedBuffers(NamedTuple):
    """The buffers of one kind that are to be read.

    kind: the state kind.
    twin: whether these weights share the masters' memory, which is read only once.
    stay: names of the buffers that the next layout reuses.
    others: names of the remaining buffers.
    """

    kind: str
    twin: bool
    stay: Names
    others: Names


class DigestSide:
    """One rank's side of a change, and the tables by which its buffers are cut into pieces.

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
        """Return whether this side belongs to this rank and layout, with the tensors, rules and kinds of `vps`."""
        mine, other = (self.vps.line, self.vps.rules, self.vps.kinds), (vps.line, vps.rules, vps.kinds)
        return (self.layout, self.rank) == (layout, rank) and all(map(is_, mine, other))

    def parts(
        self, buffers: Buffers, kinds: tuple[str, ...], kept: Collection[tuple[str, BufferId]]
    ) -> Iterator[DigestedBuffers]:
        """Yield the buffers to read by kind. Weights come last, because they may share the masters' memory."""
        for kind in sorted(kinds, key=WEIGHT.__eq__):
            if kind not in self._names:
                pieces = self._pieces(kind)
                used = np.bincount(pieces.buffer, minlength=len(pieces.buffers))
                self._names[kind] = tuple(compress(pieces.buffers, used))
            names = self._names[kind]
            twin = kind == WEIGHT and MASTER in kinds and _are_masters(buffers, names)
            stay, others = list[BufferId](), list[BufferId]()
            for name in names:
                if not twin or (MASTER, name) not in buffers:
                    (stay if (kind, name) in kept else others).append(name)
            yield DigestedBuffers(kind, twin, tuple(stay), tuple(others))

    def of(self, kind: str, names: Names, held: Mapping[BufferId, torch.Tensor]) -> ReadyDigest:
        """Return the digest computation of one kind over the named buffers of `held`."""
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
        """Make the tables for `buffers` in advance, until all tables together fill `room` bytes.

        Kinds without buffers are left out.

        has_share: whether the tables of the other side cover the reused buffers, so that only the others need tables
        here.
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
    """Return (digests of a side, the share of them that lies in `kept` buffers).

    Kinds that share memory are read once.

    known: the share of the kept buffers if it was computed before the moves, so that it is not computed twice.
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
    """Return the sum of all tensors' digests, each times an odd weight of its own, as a vector of length 1.

    The fold of a sum is the sum of folds. If one tensor's digests differ, so do the folds; if several differ, equal
    folds are as unlikely as two different values with equal digests. Folding twice changes nothing.
    """
    weights = odd(np.arange(len(digests), dtype=np.uint64))
    weights[:1] = 1
    total: Digests = (weights * digests).sum(keepdims=True, dtype=np.uint64)
    return total


def state_digest(whole: Mapping[str, Digests]) -> str:
    """Return one digest of the whole state, over the folds of every kind in the order of the kinds' names."""
    summary = hashlib.blake2b(digest_size=16)
    for kind in sorted(whole):
        summary.update(kind.encode())
        summary.update(fold(whole[kind]).tobytes())
    return summary.hexdigest()


def hint(kind: str) -> str:
    """Return a likely reason why the digests of a kind differ, as the end of an error message; "" if none is known.

    A weight is cast from its master where that is cheaper than sending it, so a user must change both together.
    """
    if kind not in (WEIGHT, MASTER):
        return ""
    return (
        "; was it changed in place, a weight without its fp32 master? Change both alike, or switch after the next step"
    )


def only(pieces: Pieces, names: Names) -> Pieces:
    """Return the pieces that lie in the named buffers; the buffer numbers of the result are indices into `names`."""
    if names == pieces.buffers:
        return pieces
    number = dict(zip(names, count()))
    code = np.array([number.get(name, -1) for name in pieces.buffers] or [-1], dtype=np.int64)[pieces.buffer]
    rows = np.flatnonzero(code >= 0)
    return Pieces(pieces.start[rows], pieces.stop[rows], code[rows], pieces.offset[rows], names)


def _are_masters(buffers: Buffers, names: Names) -> bool:
    """Return whether the weights in the named buffers share the memory of all masters there, if there are any."""
    has_masters = False
    for name in names:
        master = buffers.get((MASTER, name))
        if master is not None:
            has_masters = True
            if master.data_ptr() != buffers[WEIGHT, name].data_ptr():
                return False
    return has_masters
