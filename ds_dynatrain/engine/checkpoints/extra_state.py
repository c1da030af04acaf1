"""Extra state in a checkpoint: what is saved and loaded besides the state of the model's tensors.

Part of the extra state is shared by all ranks. The other part belongs to single ranks: random streams, and the *rest*
(per-rank extra state), which may contain tensors such as buffers of modules. A rank continues with the state of its
position in the saved layout. A new position gets the random streams that it would get in a switch, and the rest of rank
0; buffers of layers that are new to the position come from the pipeline stages that had them. The types of all values
read are checked before the values are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_dynatrain.adapters.model.module_state import merged
from ds_dynatrain.adapters.zero.regroup import Regrouping
from ds_dynatrain.checkpoint.extents import Extent, name_of
from ds_dynatrain.checkpoint.files import Progress, silent
from ds_dynatrain.checkpoint.others.foreign import Foreign, take
from ds_dynatrain.checkpoint.others.torch_files import value_of
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import RECORD, Saved, what_is_wrong
from ds_dynatrain.checkpoint.writing import Share
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, ConfigError, TransferError
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.encoding import announced, decode, encode
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import digest

REST = "rest"
"""State kind under which the tensors of per-rank extra state are stored. Each tensor is named "rank/number"."""
Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,18})$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Shared(BaseModel):
    """Known parts of the extra state that is equal on all ranks. Each part may be absent, depending on how the saved
    job was configured."""

    model_config = ConfigDict(strict=True, extra="allow")
    groups: list[dict[str, Any]] = []
    scalars: dict[str, dict[Number, float]] = {}
    counters: dict[str, Count] = {}
    windows: Count = 0


class _Attributes(BaseModel):
    """Attributes of a module that are part of its state; see `adapters.model.module_state`."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str = Field(alias="class")
    values: dict[str, Any]
    left: list[str]
    shared: list[str]


class _Rest(BaseModel):
    """Known parts of the extra state that belongs to one rank."""

    model_config = ConfigDict(strict=True, extra="allow", arbitrary_types_allowed=True)
    buffers: dict[str, torch.Tensor]
    objects: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    modes: dict[str, bool] = {}
    transient: list[str] = []
    attributes: dict[str, _Attributes] = {}


# ---- shared by all ranks ---------------------------------------------------------------------------------------------


def shared_of(saved: Saved) -> dict[str, Any]:
    """Return a checkpoint's extra state that is equal on all ranks. Raises CheckpointDamaged if its values cannot come
    from a real training run."""
    tensors = saved.record.logical_tensors()
    try:
        found: dict[str, Any] = decode(saved.record.carry, [])
        said = _Shared.model_validate(found)
        registration = None if found.get("registration") is None else Regrouping.from_json(found["registration"])
    except TransferError as error:
        raise CheckpointDamaged(f"{RECORD}: carry: {error}") from None
    except ValidationError as error:
        raise CheckpointDamaged(f"{RECORD}: carry.{what_is_wrong(error)}") from None
    numbers = [int(number) for table in said.scalars.values() for number in table]
    if max(numbers, default=-1) >= len(tensors):
        raise CheckpointDamaged(f"{RECORD}: carry.scalars: of tensor {max(numbers)}, and there are {len(tensors)}")
    listed = [name for group in registration.groups for name in group.names] if registration is not None else []
    if len(set(listed)) != len(listed) or not {each.name for each in tensors}.issuperset(listed):
        raise CheckpointDamaged(f"{RECORD}: carry.registration: a tensor is in two groups, or in none of the model's")
    groups = 1 + max((each.group for each in tensors), default=-1)
    if "groups" in found and len(said.groups) < groups:
        raise CheckpointDamaged(f"{RECORD}: carry.groups: {len(said.groups)} groups, and tensors are of {groups}")
    return found


# ---- per rank --------------------------------------------------------------------------------------------------------


def packed(rank: int, rest: Mapping[str, Any]) -> tuple[Any, list[Share]]:
    """Convert the extra state of one rank: return it as plain JSON, and its tensors as values to write.

    rest: the extra state.

    Raises ConfigError if the state cannot be saved.
    """
    tensors: list[torch.Tensor] = []
    encoded = encode(dict(rest), tensors)
    return encoded, [_share(rank, number, each) for number, each in enumerate(tensors) if each.numel()]


def _share(rank: int, number: int, tensor: torch.Tensor) -> Share:
    flat = tensor.detach().reshape(1, -1)
    shape = tuple(tensor.shape) or (1,)
    return Share(f"{rank}/{number}", REST, shape, Extent(0, flat.shape[1]), flat)


def streams_for(saved: Saved, layout: Layout, rank: int) -> streams.Streams:
    """Return the random streams for a rank of a layout, taken from a checkpoint. They are the same as after a switch
    from the saved layout."""

    def found(origin: int) -> streams.Streams:
        held = saved.of_rank(origin).get("streams")
        if not isinstance(held, dict):
            raise CheckpointDamaged(f"the random streams of rank {origin} are not there")
        return held

    record = saved.record
    return streams.continued(record.world, layout, rank, record.seed, record.generation + 1, found)


def rest_for(saved: Saved, reader: Reader, layout: Layout, rank: int) -> dict[str, Any]:
    """Return the extra state for a rank of a layout, taken from a checkpoint.

    reader: reads the tensors of the extra state.
    """
    rests, world = saved.record.rests, saved.record.world
    return merged_rest(
        [_unpacked(saved, reader, rests[each]) for each in rest_ranks(world, layout, rank)], world, layout
    )


def rest_ranks(source: Layout, layout: Layout, rank: int) -> list[int]:
    """Return the ranks of a saved layout from whose extra state a rank of another layout takes its own.

    These are the rank at the same position (or rank 0), followed by one rank of each pipeline stage.
    """
    stages = [source.rank(pipe=stage) for stage in range(source.pipe if source.pipe > 1 else 0)]
    return [streams.origin(source, layout, rank) or 0, *stages]


def merged_rest(rests: Sequence[dict[str, Any]], source: Layout, layout: Layout) -> dict[str, Any]:
    """Merge the extra states of several ranks: take the first one, and add the state of modules that only the other
    ranks have.

    source: the layout from which all of these states come.
    layout: the layout of the rank that gets the result.
    """
    resized = (source.expert, source.tensor) != (layout.expert, layout.tensor)
    return {**rests[0], **merged(rests), "resized": resized}


def _unpacked(saved: Saved, reader: Reader, rank: int) -> dict[str, Any]:
    try:
        encoded = saved.of_rank(rank)["rest"]
        wanted = announced(encoded)
        tensors = {number: _tensor(reader, rank, number, *each) for number, each in wanted.items()}
        rest = decode(encoded, [tensors[number] for number in range(len(tensors))])
        _Rest.model_validate(rest)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError, TransferError) as error:
        raise CheckpointDamaged(
            f"what belongs to rank {rank} cannot be read ({type(error).__name__}: {error})"
        ) from None
    found: dict[str, Any] = rest
    return found


def _tensor(reader: Reader, rank: int, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Read one tensor of a rank's extra state from a checkpoint. Raise an error if its dtype or size differs from the
    expected one, or if its digest differs from the stored one.

    number: the index of the tensor in the rank's extra state.
    """
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    rows = reader.manifest.rows[f"{rank}/{number}", REST]
    if len(rows) != 1 or rows[0].dtype != name_of(dtype) or rows[0].extent.numel != math.prod(shape):
        raise CheckpointDamaged(f"{rows[0]} is not the {name_of(dtype)} {shape} that is announced")
    values = reader.values(rows[0])
    if digest(values) != rows[0].digest:
        raise CheckpointDamaged(f"{rows[0]} is not what was saved: its digest differs")
    return values.view(shape)


# ---- from another tool -----------------------------------------------------------------------------------------------


def convert_foreign(foreign: Foreign, folder: Path, progress: Progress = silent) -> Path:
    """Convert another tool's checkpoint into one in our format, written into a folder of checkpoints; return its path.

    Raises the errors of `take`, and CheckpointError for extra state that our format cannot represent.
    """
    buffers = {name: value_of(foreign.path, stored) for name, stored in foreign.buffers.items()}
    try:
        carry = encode(dict(foreign.carry), None)
        rest, shares = packed(0, {"grad_norm": None, "buffers": buffers, "objects": {}})
    except ConfigError as error:
        raise CheckpointError(f"{foreign.path}: {error}") from None
    return take(foreign, folder, carry, rest, shares, progress)
