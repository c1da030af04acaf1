"""Which buffers ZeRO gives a rank, and how large they are; `zero` says where in them an element lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.pieces import BufferId
from ds_dynatrain.space.tensor import Line
from ds_dynatrain.space.zero import ZeroRules, group_sizes, has_flat_groups, partition_size, subgroups


class Buffer(NamedTuple):
    """A buffer of a rank, and the optimizer group of what is in it (FROZEN: weights alone).

    numel: elements that it has, padding included; whole: where every rank has all parts of it.
    """

    name: BufferId
    group: int
    numel: int
    whole: int


def buffers_of(line: Line, rules: ZeroRules, layout: Layout) -> list[Buffer]:
    """The buffers that a rank has under a layout: of tensors that lie alone, and of those that lie together."""
    trainable, together = line.trainable_count, list[Buffer]()
    parts = -(-line.numels // group_sizes(line, layout))
    if layout.zero_stage == 3:
        numbers = subgroups(line, rules, layout)
        group_of = dict(zip(numbers.tolist(), line.groups.tolist(), strict=False))
        for number, numel in enumerate(np.bincount(numbers, weights=parts[:trainable]).astype(np.int64).tolist()):
            together.append(Buffer(BufferId("subgroup", number), group_of[number], numel, numel))
    elif has_flat_groups(rules, layout):
        for group in np.unique(line.groups[:trainable]).tolist():
            numel = partition_size(line, rules, layout, group)
            ranks = int(group_sizes(line, layout)[np.argmax(line.groups == group)]) if layout.zero_stage else 1
            together.append(Buffer(BufferId("group", group), group, numel, numel * ranks))
    place, numels = ("partition", parts) if layout.zero_stage == 3 else ("tensor", line.numels)
    rows = zip(line.groups.tolist(), numels.tolist(), strict=True)
    alone = [Buffer(BufferId(place, number), group, numel, numel) for number, (group, numel) in enumerate(rows)]
    return [*alone[trainable if together else 0 :], *together]
