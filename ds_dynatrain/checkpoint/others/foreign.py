"""What a checkpoint of another tool tells of a training: where each value lies, and as much of the carry as it has.

| key of `carry` | value |
|---|---|
| `groups` | hyper-parameters of each optimizer group, by name |
| `scalars` | the optimizer's scalars: name -> number of the tensor, as text -> number |
| `counters` `windows` | as in the carry of a training |
| `scaler` | fields of the loss scale, by DeepSpeed's names |
| `scheduler` `random-LTD` | their states |

What is not there stays as it is in the training that loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.manifest import Manifest, Row
from ds_dynatrain.checkpoint.others.archives import Archive
from ds_dynatrain.checkpoint.others.torch_files import Stored, value_of
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import LogicalTensor


@dataclass(frozen=True, eq=False)
class Foreign:
    """A checkpoint of another tool, described. format: its name, for people.

    manifest: its rows have files below `path` and no digests. tensors: those of groups first, in order. step: optimizer
    steps done. left_out: in words, what is in it and is not taken over. archives: zips with CRC32s of all values.
    """

    path: Path
    format: str
    manifest: Manifest
    tensors: tuple[LogicalTensor, ...]
    step: int = 0
    carry: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Stored] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    archives: tuple[Archive, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """State kinds that are there."""
        return list(dict.fromkeys(kind for _, kind in self.manifest.rows))


def whole_row(tensor: LogicalTensor, kind: str, stored: Stored) -> Row:
    """The row of a tensor that lies in one piece; CheckpointError for one that is of another size, or turned."""
    if stored.numel != tensor.numel or not stored.is_dense:
        raise CheckpointError(
            f"{stored.file} has {stored.shape} where {kind} of {tensor.name!r} {tensor.shape} is expected, row by "
            "row; save the checkpoint again, with contiguous tensors"
        )
    extent = Extent(0, tensor.numel, 0, 1)
    return Row(tensor.name, kind, name_of(stored.dtype), tensor.shape, extent, stored.file, stored.offset, 0)


def in_order(tensors: Iterable[LogicalTensor]) -> tuple[LogicalTensor, ...]:
    """By group, frozen ones last, otherwise as given."""
    return tuple(sorted(tensors, key=lambda tensor: (not tensor.trainable, tensor.group)))


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of an optimizer's state, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def number_of(folder: Path, value: Any) -> float:
    """A scalar of an optimizer, wherever it is stored; CheckpointDamaged for what is none."""
    if isinstance(value, Stored) and value.numel != 1:
        raise CheckpointDamaged(f"{folder / value.file} has a tensor of shape {value.shape} where a number is expected")
    return float(value_of(folder, value).item() if isinstance(value, Stored) else value)


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers or booleans."""
    return {name: value for name, value in fields.items() if isinstance(value, bool | int | float)}
