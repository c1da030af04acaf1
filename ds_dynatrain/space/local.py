"""One rank's view of a layout: its local tensors, and where ZeRO puts their elements in its buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_dynatrain.space import zero
from ds_dynatrain.space.buffers import buffers_of
from ds_dynatrain.space.kind import WEIGHT, Kind, kind_of
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.overlapping import OverlappingSharding, is_overlapping
from ds_dynatrain.space.pieces import BufferId, Pieces, split_by_tensor
from ds_dynatrain.space.sharding import Sharding
from ds_dynatrain.space.tensor import FROZEN, Ints, Line, LogicalTensor


def cut_kind(line: Line, rules: zero.ZeroRules, layout: Layout, kind: Kind, experts: bool = False) -> Sharding:
    """How ZeRO cuts a kind of local tensors, of all groups that have it; `experts` as in `zero.sharding`."""
    cut = zero.sharding(line, rules, layout, kind.name, experts)
    if kind.groups is not None:
        cut = cut.only(np.isin(line.groups_at(cut.start), sorted(kind.groups)))
    return OverlappingSharding.of(line, cut) if is_overlapping(kind, layout) else cut


@dataclass(frozen=True, eq=False)
class LocalSpace:
    """What one rank holds. Coordinates are those of its own line, on which a tensor has its local shape.

    layout: the whole one. zero_rank: place among the data x sequence ranks of ZeRO's group. expert_rank: among those
    that hold the same experts.
    """

    line: Line
    rules: zero.ZeroRules
    kinds: tuple[Kind, ...]
    layout: Layout
    zero_rank: int
    expert_rank: int = 0

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """The local tensors, under the numbers of the logical ones."""
        return self.line.tensors

    def holding(self, kind: str) -> list[Pieces]:
        """The pieces of a kind on this rank, disjoint: of most tensors, and of those of experts."""
        held = kind_of(self.kinds, kind)
        found = [cut_kind(self.line, self.rules, self.layout, held).holding(self.zero_rank)]
        if self.line.experts.any():
            found.append(cut_kind(self.line, self.rules, self.layout, held, experts=True).holding(self.expert_rank))
        return found

    def sizes(self) -> dict[tuple[str, BufferId], int]:
        """Elements of every buffer of this rank, by (kind, buffer), padding included."""
        found: dict[tuple[str, BufferId], int] = {}
        buffers = buffers_of(self.line, self.rules, self.layout)
        for kind in self.kinds:
            if not zero.is_held(self.layout, kind.name):
                continue
            if is_overlapping(kind, self.layout):
                found.update(self._overlapping_sizes(kind.name))
                continue
            is_whole = zero.is_replicated(self.layout, kind.name)
            for name, group, numel, whole in buffers:
                if kind.name == WEIGHT or (group != FROZEN and kind.is_of(group)):
                    found[kind.name, name] = whole if is_whole else numel
        return found

    def _overlapping_sizes(self, kind: str) -> dict[tuple[str, BufferId], int]:
        """Of the buffers that hold whole tensors: those alone, and no buffer where there is none."""
        found: dict[tuple[str, BufferId], int] = {}
        for pieces in self.holding(kind):
            for piece in pieces:
                key = kind, piece.buffer
                found[key] = found.get(key, 0) + piece.stop - piece.start
        return found

    def rows(self, kind: str) -> tuple[Ints, Pieces]:
        """(tensor number, piece) of all that `holding` gives, cut where tensors end."""
        parts = [split_by_tensor(self.line, pieces) for pieces in self.holding(kind)]
        held = [part for _, part in parts]
        joined = Pieces(
            np.concatenate([part.start for part in held]),
            np.concatenate([part.stop for part in held]),
            np.concatenate([part.buffer for part in held]),
            np.concatenate([part.offset for part in held]),
            held[0].buffers,
        )
        return np.concatenate([number for number, _ in parts]), joined
