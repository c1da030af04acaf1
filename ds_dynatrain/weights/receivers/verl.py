"""`shards`: each rank's shard of every parameter, in the form that verl's delta engine takes.

The engine gets shards from `get_per_tensor_param_shard`. It compares them with those of the previous step, and gathers
the changed elements over `gather_group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.errors import UnsupportedError


@dataclass
class ShardSpec:
    """The fields of verl's `ShardSpec` that are used here.

    full_shape: the shape of the whole tensor.
    place: the flat (row-major) index of the shard's first element in the whole tensor.
    gather_group: the group of all ranks of the world.
    contributes: whether this rank has a shard.
    """

    full_shape: tuple[int, ...]
    place: int | None = None
    gather_group: Any = None
    contributes: bool = True


def shards(source: Any, spec: Callable[..., Any] = ShardSpec) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Yield (name, flat local shard, spec) for each parameter in the order of the metadata, the same on every rank.

    Each element is in the shard of one rank only.

    source: a source made by `weights.source(engine)`. After a switch, make a new source and new snapshots in verl.
    spec: verl's `ShardSpec`.

    Raises UnsupportedError if a rank has several runs of a tensor, which a single offset cannot describe. Send whole
    tensors by `source.iter_full` in this case.
    """
    group = td.group.WORLD
    owned = {name: list(runs) for name, runs in groupby(source.runs(), key=lambda run: run[0])}
    for meta in source.metadata:
        found = owned.get(meta.name, [])
        place, values = 0, torch.empty(0, dtype=meta.dtype)
        for _, extent, matrix in found:
            if len(found) > 1 or extent.count > 1:
                raise UnsupportedError(
                    f"{meta.name}: this rank has {len(found)} parts of it, the first {extent}; verl's `place` is one "
                    "offset: use iter_full, or a layout without tensor parallelism"
                )
            place, values = extent.start, matrix.detach().reshape(-1)
        yield meta.name, values, spec(meta.shape, place=place, gather_group=group, contributes=bool(found))
