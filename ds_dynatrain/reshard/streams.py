"""Random streams: the states of random generators. They belong to a position in the layout and move with it.

A position that exists before and after a switch keeps its streams, whichever member holds it; the streams of a position
that disappears are dropped. A new data index or pipeline stage gets streams seeded from (job seed, name, index, stage,
generation). Any other new position of a data index that continues gets a copy of the streams of its position 0: tensor
ranks that compute the same values must draw the same numbers, or their replicas diverge. Only streams that are meant to
differ between tensor ranks (those of DeepSpeed's tracker) are newly seeded there, also from the tensor index.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from ds_dynatrain.adapters.zero.process_wide import Streams as Streams
from ds_dynatrain.adapters.zero.process_wide import capture as capture
from ds_dynatrain.adapters.zero.process_wide import (
    further_streams,
    is_of_tensor_index,
    restore_further_streams,
    seeded_stream,
)
from ds_dynatrain.adapters.zero.process_wide import restore as restore
from ds_dynatrain.space import Layout
from ds_dynatrain.space.leaves import leaf_seed, seed_of


def origin(source: Layout, target: Layout, rank: int) -> int | None:
    """Return the rank of the layout `source` from which a rank of the layout `target` takes its random streams; None if
    its data index or stage is new.

    The result is the rank at the same position; an index that is new on any other axis counts as 0.
    """
    place = target.coordinate(rank)
    if place["data"] >= source.data or place["pipe"] >= source.pipe:
        return None
    return source.rank(**{axis: index if index < getattr(source, axis) else 0 for axis, index in place.items()})


def continued(
    source: Layout, target: Layout, rank: int, job_seed: int, generation: int, of_rank: Callable[[int], Streams]
) -> Streams:
    """Return the random streams for a rank of the new layout `target`.

    A new tensor index gets the streams of index 0, except for streams that must differ between tensor ranks, which are
    newly seeded.

    generation: the number of the new world.
    of_rank: returns the streams of a rank of the old layout `source`.
    """
    place, known = target.coordinate(rank), origin(source, target, rank)
    if known is None:
        return seeded(job_seed, place, generation)
    found = of_rank(known)
    if place["tensor"] < source.tensor:
        return found
    further = {
        name: seeded_stream(_place_seed(job_seed, name, place, generation)) if is_of_tensor_index(name) else state
        for name, state in found["further"].items()
    }
    return {**found, "further": further}


def seeded(job_seed: int, place: dict[str, int], generation: int) -> Streams:
    """Return newly seeded random streams for a position whose data index or pipeline stage is new. The process's own
    generators are left unchanged.

    place: the index of the position on each axis; only data, pipe and tensor are used.
    """
    before = capture()
    try:
        _seed_all(lambda name: _place_seed(job_seed, name, place, generation))
        return capture()
    finally:
        restore(before)


def begin_leaf(job_seed: int, step: int, leaf: int, layer: int | None = None) -> None:
    """Seed all random generators for the start of a leaf (a micro-batch of fixed size) in the same way on every rank.

    leaf: the number of the leaf in its global batch.
    layer: the layer of a pipeline before which the generators are seeded again; None at the start of the leaf.
    """
    place = 0 if layer is None else layer + 1
    _seed_all(lambda name: leaf_seed(job_seed, name, step, leaf, place))


def _seed_all(seed: Callable[[str], int]) -> None:
    """Seed every random generator of the process.

    seed: returns the seed for the name of a generator.
    """
    torch.manual_seed(seed("torch"))
    np.random.seed(seed("numpy") % 2**32)
    random.seed(seed("python"))
    restore_further_streams({name: seeded_stream(seed(name)) for name in further_streams()})


def _place_seed(job_seed: int, name: str, place: dict[str, int], generation: int) -> int:
    apart = (place["tensor"],) if is_of_tensor_index(name) and place["tensor"] else ()
    stage = place.get("pipe", 0)
    return seed_of(job_seed, name, (place["data"], stage) if stage else place["data"], generation, *apart)
