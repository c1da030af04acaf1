"""This rank's own shard of an output tensor, as torch's `DTensor` describes shards, and without a message.

The mesh has the axis that ZeRO divides (data x sequence), and the tensor axis if that has more than one rank. ZeRO 0
to 2 replicate weights. ZeRO-3 cuts dimension 0 where a rank's part is whole rows. Pipelines and experts have no such
form, nor have tensors that AutoTP cuts in several blocks or unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from ds_dynatrain.space import CoordinateLine, DimCut, Layout, Pieces, VirtualParameterSpace
from ds_dynatrain.weights.buckets import Memory, pieces_of
from ds_dynatrain.weights.outputs import Output


@dataclass(frozen=True)
class LocalForm:
    """How the ranks cut an output tensor: a placement for each axis of the mesh, and the shape of this rank's shard."""

    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]


def form_of(vps: VirtualParameterSpace, layout: Layout, output: Output) -> LocalForm | None:
    """Return how an output tensor is cut; None if its shards have no form that `DTensor` knows."""
    ranks = layout.data * layout.sequence
    if len(output.runs) != 1 or output.deltas or layout.pipe > 1:
        return None
    tensor = vps.tensors[output.runs[0].tensor]
    if tensor.shape != output.shape or (tensor.expert and layout.expert > 1):
        return None
    shape, mesh = list(output.shape), vps.mesh(layout)
    cut = None if mesh is None or layout.tensor == 1 else mesh.partition[output.runs[0].tensor].tensor
    if cut is not None:
        sizes = {*cut.blocks[0]} if isinstance(cut, DimCut) and len(cut.blocks) == 1 else set()
        if not isinstance(cut, DimCut) or sizes != {shape[cut.dim] / layout.tensor}:
            return None
        shape[cut.dim] //= layout.tensor
    data: Any = Replicate()
    if layout.zero_stage == 3:
        if not shape or (cut is not None and cut.dim == 0) or shape[0] % ranks:
            return None
        data, shape[0] = Shard(0), shape[0] // ranks
    if layout.tensor == 1:
        return LocalForm((ranks,), (data,), tuple(shape))
    return LocalForm((ranks, layout.tensor), (data, Replicate() if cut is None else Shard(cut.dim)), tuple(shape))


def shard_of(line: CoordinateLine, held: Pieces, output: Output, shape: tuple[int, ...], live: Memory) -> torch.Tensor:
    """Return this rank's shard of an output tensor that has a `LocalForm`, as a view of its weights.

    held: what this rank holds of all tensors. shape: that of the shard. live: this rank's weights, by buffer.
    """
    pieces = pieces_of(line, output.runs[0], held)
    first = next(iter(pieces))
    return live[first.buffer].detach().narrow(0, first.offset, pieces.numel).view(shape)
