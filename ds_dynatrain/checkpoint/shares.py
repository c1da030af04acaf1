"""Who writes what: every element of a state once, replicas sharing the work, by the arithmetic of the space.

A partitioned kind is written by whoever holds the part, a replicated one is split evenly over its holders. Weights that
are no more than their masters in another type are not stored; whether they are is looked at when they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ds_dynatrain.checkpoint.extents import Placed, placed
from ds_dynatrain.checkpoint.writing import Share
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, BufferId, Layout, Pieces, VirtualParameterSpace
from ds_dynatrain.space.sharding import GroupedSharding
from ds_dynatrain.space.zero import as_cut, cut_kind

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
        yield _share(vps, kind, each, None)


def _trained(vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers) -> Iterator[Share]:
    """Weights beside the masters that the rank writes: their values count where a cast would not give them."""
    masters = vps.owned(layout, rank, MASTER)
    weights, masters = vps.holding(layout, rank, WEIGHT).intersect(masters)
    memory = of_kind(buffers, WEIGHT), of_kind(buffers, MASTER)
    for weight, master in placed(vps.line, (weights, masters), memory):
        yield _share(vps, WEIGHT, weight, master.matrix)


def _frozen(vps: VirtualParameterSpace, layout: Layout, rank: int) -> Pieces:
    """The rank's share of the weights that have no master."""
    kind, cut, mesh = replace(vps.kind(WEIGHT), groups=frozenset({FROZEN})), as_cut(vps.rules, layout), vps.mesh(layout)
    if mesh is None:
        return cut_kind(vps.line, vps.rules, cut, kind).owned(rank)
    return GroupedSharding.of(
        mesh, lambda group: cut_kind(group.line, vps.rules, cut, kind, experts=group.experts)
    ).owned(rank)


def _share(vps: VirtualParameterSpace, kind: str, each: Placed, master: torch.Tensor | None) -> Share:
    tensor = vps.tensors[each.tensor]
    return Share(tensor.name, kind, tensor.shape, each.extent, each.matrix, master)


def of_kind(buffers: Buffers, kind: str) -> dict[BufferId, torch.Tensor]:
    """The buffers of one kind."""
    return {name: held for (held_kind, name), held in buffers.items() if held_kind == kind}
