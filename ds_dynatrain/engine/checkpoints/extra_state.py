"""What of a checkpoint belongs to single ranks: random streams, and the rest of the carry with its tensors.

A rank goes on with what its place in the layout had. A new place gets the streams that a switch would give it, and the
rest of rank 0; buffers of layers that it did not have before come from the pipeline stages that had them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_dynatrain.adapters.module_state import merged
from ds_dynatrain.checkpoint import Extent, Reader, Saved, Share
from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.encoding import announced, decode, encode
from ds_dynatrain.errors import CheckpointDamaged, TransferError
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import digest

REST = "rest"
"""In place of a state kind: a tensor of a rank's rest, by the rank and its number."""


def packed(rank: int, rest: Mapping[str, Any]) -> tuple[Any, list[Share]]:
    """(the rest of a rank as plain JSON, its tensors as what the rank writes); ConfigError for what cannot be saved."""
    tensors: list[torch.Tensor] = []
    encoded = encode(dict(rest), tensors)
    return encoded, [_share(rank, number, each) for number, each in enumerate(tensors) if each.numel()]


def _share(rank: int, number: int, tensor: torch.Tensor) -> Share:
    flat = tensor.detach().reshape(1, -1)
    shape = tuple(tensor.shape) or (1,)
    return Share(f"{rank}/{number}", REST, shape, Extent(0, flat.shape[1], 0, 1), flat)


def streams_for(saved: Saved, layout: Layout, rank: int) -> streams.Streams:
    """The random streams of a rank of any layout, as after a switch there from the layout that was saved."""

    def found(origin: int) -> streams.Streams:
        held = saved.of_rank(origin).get("streams")
        if not isinstance(held, dict):
            raise CheckpointDamaged(f"the random streams of rank {origin} are not there")
        return held

    record = saved.record
    return streams.continued(record.world, layout, rank, record.seed, record.generation + 1, found)


def rest_for(saved: Saved, reader: Reader, layout: Layout, rank: int) -> dict[str, Any]:
    """The rest of a rank of any layout."""
    rests, world = saved.record.rests, saved.record.world
    return merged_rest(
        [_unpacked(saved, reader, rests[each]) for each in rest_ranks(world, layout, rank)], world, layout
    )


def rest_ranks(source: Layout, layout: Layout, rank: int) -> list[int]:
    """Whose rests a rank of a layout goes on with: its own place's or rank 0's, and those of all pipeline stages."""
    stages = [source.rank(pipe=stage) for stage in range(source.pipe if source.pipe > 1 else 0)]
    return [streams.origin(source, layout, rank) or 0, *stages]


def merged_rest(rests: Sequence[dict[str, Any]], source: Layout, layout: Layout) -> dict[str, Any]:
    """The first one, with what modules that it does not have keep in the others. source: the layout of all of them."""
    resized = (source.expert, source.tensor) != (layout.expert, layout.tensor)
    return {**rests[0], **merged(rests), "resized": resized}


def _unpacked(saved: Saved, reader: Reader, rank: int) -> dict[str, Any]:
    try:
        encoded = saved.of_rank(rank)["rest"]
        wanted = announced(encoded)
        tensors = {number: _tensor(reader, rank, number, *each) for number, each in wanted.items()}
        rest = decode(encoded, [tensors[number] for number in range(len(tensors))])
        if not isinstance(rest, dict):
            raise TypeError("it is no table")
        if not all(
            isinstance(rest.get(part, {}), dict) for part in ("buffers", "objects", "extra", "modes", "attributes")
        ):
            raise TypeError("buffers, objects, extra states, modes or attributes are no tables")
        if not all(isinstance(name, str) for name in rest.get("transient", [])):
            raise TypeError("the name of a buffer is none")
        if not all(isinstance(name, str) and isinstance(held, torch.Tensor) for name, held in rest["buffers"].items()):
            raise TypeError("a buffer is no tensor")
        if not all(isinstance(mode, bool) for mode in rest.get("modes", {}).values()):
            raise TypeError("a module's mode is neither true nor false")
        for held in rest.get("attributes", {}).values():
            names = [held["class"], *held["values"].keys(), *held["left"], *held["shared"]]
            if not all(isinstance(name, str) for name in names):
                raise TypeError("the name of an attribute is none")
    except (
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
        RecursionError,
        TransferError,
    ) as error:
        raise CheckpointDamaged(
            f"what belongs to rank {rank} cannot be read ({type(error).__name__}: {error})"
        ) from None
    found: dict[str, Any] = rest
    return found


def _tensor(reader: Reader, rank: int, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """One tensor of a rest: no larger than what is stored of it."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    rows = reader.manifest.rows[f"{rank}/{number}", REST]
    if len(rows) != 1 or rows[0].dtype != name_of(dtype) or rows[0].extent.numel != math.prod(shape):
        raise CheckpointDamaged(f"{rows[0]} is not the {name_of(dtype)} {shape} that is announced")
    values = reader.values(rows[0])
    if digest(values) != rows[0].digest:
        raise CheckpointDamaged(f"{rows[0]} is not what was saved: its digest is another")
    return values.view(shape)
