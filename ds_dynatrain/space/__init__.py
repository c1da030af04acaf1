"""Geometry: where every element of a training's state lies, under any layout, on any rank.

A model is a list of logical tensors (`tensor`), laid one after another on a line of integer coordinates. A `Layout`
says how many ranks there are on which axis, and how much ZeRO cuts; `zero` turns it into a `Sharding`: arithmetic
that gives, for any coordinate and any state kind, the owner and the place in the owner's buffers. What a rank holds
are `Pieces`, sorted runs of the line, and all questions about them (what do two ranks share, what does one lack) are
set operations on runs (`interval`). Where ZeRO keeps whole tensors on several ranks, a sharding is `overlapping`.
`VirtualParameterSpace` holds it all together for one model.

Cuts along several dims at once (tensor parallelism, experts) are the second half: a `Box` is a block of a tensor
(`box`), and `cut` composes the cuts of several axes. `AxisCuts` says how these axes deal one tensor out (`axes`); a
`Mesh` puts ranks that are dealt the same into shard groups, each with a line of its own that ZeRO cuts, and an index
map back to the logical line; `grouped` answers a sharding's questions there.

Numpy is all that is needed here: no torch, no DeepSpeed, no process.
"""

from ds_dynatrain.space.axes import WHOLE, AxisCuts, Partition, Partitioner, is_partitioned, shared_stages
from ds_dynatrain.space.box import Box, row_major, runs_of_box
from ds_dynatrain.space.columns import Columns
from ds_dynatrain.space.cut import (
    Cut,
    DimCut,
    Pick,
    Placed,
    Shard,
    compose,
    uneven,
)
from ds_dynatrain.space.kind import (
    EXP_AVG,
    EXP_AVG_SQ,
    HOST_GRAD,
    MASTER,
    STALE_GRAD,
    WEIGHT,
    Kind,
    standard_kinds,
)
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.local import LocalSpace
from ds_dynatrain.space.mesh import Mesh
from ds_dynatrain.space.pieces import BufferId, Piece, Pieces
from ds_dynatrain.space.sharding import ABSENT, Sharding
from ds_dynatrain.space.tensor import FROZEN, IN_EMPTY_GROUP, Line, LogicalTensor
from ds_dynatrain.space.vps import VirtualParameterSpace
from ds_dynatrain.space.zero import ZeroRules

__all__ = [
    "ABSENT",
    "EXP_AVG",
    "EXP_AVG_SQ",
    "FROZEN",
    "HOST_GRAD",
    "IN_EMPTY_GROUP",
    "MASTER",
    "STALE_GRAD",
    "WEIGHT",
    "WHOLE",
    "AxisCuts",
    "Box",
    "BufferId",
    "Columns",
    "Cut",
    "DimCut",
    "Kind",
    "Layout",
    "Line",
    "LocalSpace",
    "LogicalTensor",
    "Mesh",
    "Partition",
    "Partitioner",
    "Pick",
    "Piece",
    "Pieces",
    "Placed",
    "Shard",
    "Sharding",
    "VirtualParameterSpace",
    "ZeroRules",
    "compose",
    "is_partitioned",
    "row_major",
    "runs_of_box",
    "shared_stages",
    "standard_kinds",
    "uneven",
]
