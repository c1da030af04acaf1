"""Who writes what: every element of a state once, replicas sharing the work, by the arithmetic of the space.

A partitioned kind is written by whoever holds the part, a replicated one is split evenly over its holders. Weights that
are no more than their masters in another type are not stored; whether they are is looked at, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ds_dynatrain.checkpoint.stretches import Placed, chunks, placed
from ds_dynatrain.checkpoint.writing import CHUNK_BYTES, Share
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, BufferId, Layout, Pieces, VirtualParameterSpace
from ds_dynatrain.space.deckwise import DeckSharding
from ds_dynatrain.space.local import cut_kind
from ds_dynatrain.space.zero import as_cut

Buffers = Mapping[tuple[str, BufferId], torch.Tensor]
"""(state kind, buffer) -> the flat local tensor that holds it."""


def shares_of(
    vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers, kinds: tuple[str, ...]
) -> Iterator[Share]:
    """What a rank of the layout writes of the kinds that are there."""
    for kind in kinds:
        if kind != WEIGHT:
            yield from _stored(vps, kind, vps.owned(layout, rank, kind), buffers)
            continue
        yield from _stored(vps, WEIGHT, _frozen(vps, layout, rank), buffers)
        yield from _trained(vps, layout, rank, buffers)


def _stored(vps: VirtualParameterSpace, kind: str, pieces: Pieces, buffers: Buffers) -> Iterator[Share]:
    for (each,) in placed(vps.line, (pieces,), (of_kind(buffers, kind),)):
        yield _share(vps, kind, each, is_cast=False)


def _trained(vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers) -> Iterator[Share]:
    """Weights beside the masters that the rank writes: a row each, and values only where a cast would not give them."""
    masters = vps.owned(layout, rank, MASTER)
    weights, masters = vps.holding(layout, rank, WEIGHT).intersect(masters)
    memory = of_kind(buffers, WEIGHT), of_kind(buffers, MASTER)
    for weight, master in placed(vps.line, (weights, masters), memory):
        yield _share(vps, WEIGHT, weight, is_cast=_is_cast(weight.matrix, master.matrix))


def _is_cast(weight: torch.Tensor, master: torch.Tensor) -> bool:
    if weight.data_ptr() == master.data_ptr():
        return True
    most = max(1, CHUNK_BYTES // master.element_size())
    pairs = zip(chunks(weight, most), chunks(master, most), strict=True)
    return all(torch.equal(_bits(held), _bits(of.to(held.dtype))) for (_, held), (_, of) in pairs)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _frozen(vps: VirtualParameterSpace, layout: Layout, rank: int) -> Pieces:
    """The rank's share of the weights that have no master."""
    kind, cut, mesh = replace(vps.kind(WEIGHT), groups=frozenset({FROZEN})), as_cut(vps.rules, layout), vps.mesh(layout)
    if mesh is None:
        return cut_kind(vps.line, vps.rules, cut, kind).owned(rank)
    return DeckSharding.of(mesh, lambda deck: cut_kind(deck.line, vps.rules, cut, kind, experts=deck.experts)).owned(
        rank
    )


def _share(vps: VirtualParameterSpace, kind: str, each: Placed, is_cast: bool) -> Share:
    tensor = vps.tensors[each.tensor]
    return Share(tensor.name, kind, tensor.shape, each.stretch, each.matrix, is_cast)


def of_kind(buffers: Buffers, kind: str) -> dict[BufferId, torch.Tensor]:
    """The buffers of one kind."""
    return {name: held for (held_kind, name), held in buffers.items() if held_kind == kind}
