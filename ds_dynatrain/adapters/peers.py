"""Ranks of a layout that form a group with a rank, for every kind of group that DeepSpeed asks for.

Ranks are numbered with the slowest axis first: pipe, data, sequence, tensor (`Layout.rank`). ZeRO's line of a rank is
the data x sequence ranks with its pipe and tensor index. Experts divide a whole pipeline stage, tensor ranks included:
neighbours share one set of experts, and ranks with equal index (`Layout.expert_place`) hold the same ones. With one
index and several tensor ranks DeepSpeed trains no experts; the expert-data group, which is unused then, is ZeRO's line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ds_dynatrain.space import Layout
from ds_dynatrain.space.layout import RANK_ORDER

VARYING: Mapping[str, tuple[str, ...]] = {
    "data": ("data", "sequence"),
    "data_only": ("data",),
    "sequence": ("sequence",),
    "tensor": ("tensor",),
    "pipe": ("pipe",),
    "model": ("pipe", "tensor"),
}
"""Kind of group -> the axes on which its ranks differ. `data` is the group that ZeRO cuts and reduces over, `model`
the one that holds one whole model."""

KINDS = (*VARYING, "expert", "expert_data")
"""Every kind of group besides that of all ranks, in the order in which a world makes them."""

SAME_AS: Mapping[str, tuple[str, ...]] = {
    "data_only": ("data",),
    "model": ("tensor", "pipe"),
    "expert_data": ("data",),
}
"""Kind -> kinds made before it that serve for it if the ranks are the same: messages of the two are never under way at
the same time."""


def peers(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group that `rank` is in, ascending, by kind; LayoutError for a rank outside
    the world.
    """
    found = {kind: _varying(layout, rank, axes) for kind, axes in VARYING.items()}
    index, _ = layout.expert_place(rank)
    start = rank - rank % layout.ranks_per_stage
    same = range(start + index, start + layout.ranks_per_stage, layout.expert)
    found["expert"] = tuple(range(rank - index, rank - index + layout.expert))
    found["expert_data"] = tuple(same) if layout.expert > 1 else found["data"]
    return found


def tie(stages: tuple[int, ...]) -> str:
    """Return the kind of the group of pipeline stages that share tied weights."""
    return "tie_" + "_".join(map(str, stages))


def tied_peers(layout: Layout, rank: int, ties: Iterable[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each tie that `rank` is in, by kind; ties of all stages have the group of the pipe axis."""
    place = layout.coordinate(rank)
    return {
        tie(stages): tuple(layout.rank(**{**place, "pipe": stage}) for stage in stages)
        for stages in sorted(ties)
        if place["pipe"] in stages and 1 < len(stages) < layout.pipe
    }


def _varying(layout: Layout, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    places = [layout.coordinate(rank)]
    for axis in RANK_ORDER:
        if axis in axes:
            places = [{**place, axis: index} for place in places for index in range(getattr(layout, axis))]
    return tuple(layout.rank(**place) for place in places)
