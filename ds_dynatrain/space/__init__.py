"""The geometry of training state: on which rank, and where in its buffers, each element lies under a given layout.

A model is a list of logical tensors (`tensor`), laid one after another on a line of integer coordinates. A `Layout`
gives the number of ranks on each axis and the ZeRO stage; `zero` turns it into a `Sharding`: arithmetic that gives, for
any coordinate and any state kind (`kind`), the owner and the position in the owner's buffers. The elements on a rank
are `Pieces`: sorted runs, that is, contiguous ranges of coordinates. All questions about them (what do two ranks share,
what does one lack) are set operations on runs (`interval`). `VirtualParameterSpace` combines all of this for one model.

Tensor parallelism, pipelines and experts partition tensors before ZeRO does (`cut`). A `Mesh` groups the ranks that
hold the same tensors into shard groups. Each group has a line of its own, which ZeRO partitions, and an index map to
the logical line. For a switch between two layouts, a `tiling` orders the elements of each tensor such that each rank's
part is a few runs in both layouts; a run may then lie in a buffer as rows at equal distances (`strips`).

Only numpy is needed here: no torch, no DeepSpeed, no process groups.

This package may import only `records`. Begin reading at `vps`.
"""

from ds_dynatrain.space.columns import Columns
from ds_dynatrain.space.cut import (
    WHOLE,
    AxisCuts,
    Box,
    Cut,
    Dealt,
    DimCut,
    Partition,
    Partitioner,
    Pick,
    Placed,
    Shard,
    is_partitioned,
    row_major,
    shared_stages,
    uneven,
)
from ds_dynatrain.space.kind import (
    EXP_AVG,
    HOST_GRAD,
    MASTER,
    STALE_GRAD,
    STATE,
    WEIGHT,
    Kind,
    row_of,
    standard_kinds,
)
from ds_dynatrain.space.layout import ExpertMap, Layout
from ds_dynatrain.space.sharding import ABSENT, Sharding
from ds_dynatrain.space.tensor import (
    FROZEN,
    IN_EMPTY_GROUP,
    BufferId,
    CoordinateLine,
    LogicalTensor,
    Piece,
    Pieces,
    of_kind,
)
from ds_dynatrain.space.vps import VirtualParameterSpace
from ds_dynatrain.space.zero import LocalSpace, ZeroRules

__all__ = [
    "ABSENT",
    "EXP_AVG",
    "FROZEN",
    "HOST_GRAD",
    "IN_EMPTY_GROUP",
    "MASTER",
    "STALE_GRAD",
    "STATE",
    "WEIGHT",
    "WHOLE",
    "AxisCuts",
    "Box",
    "BufferId",
    "Columns",
    "CoordinateLine",
    "Cut",
    "Dealt",
    "DimCut",
    "ExpertMap",
    "Kind",
    "Layout",
    "LocalSpace",
    "LogicalTensor",
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
    "is_partitioned",
    "of_kind",
    "row_major",
    "row_of",
    "shared_stages",
    "standard_kinds",
    "uneven",
]
