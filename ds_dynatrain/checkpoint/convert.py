"""A checkpoint's weights in the formats of others, tensor by tensor: memory for the largest one is enough.

No value is handed on unless it has the digest that it was saved with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ds_dynatrain.checkpoint.elements import named
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.hidden import appearing
from ds_dynatrain.checkpoint.names import check_names
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import (
    MASTER,
    WEIGHT,
    BufferId,
    Kind,
    Layout,
    LogicalTensor,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
)
from ds_dynatrain.transfer import digest

Progress = Callable[[int], object]
"""Called with the bytes of each tensor that is written."""


def silent(nbytes: int) -> None:
    """A `Progress` that nobody sees."""


SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""What safetensors calls the types that weights have."""
_ALONE = Layout(data=1, zero_stage=0)
_BUFFER = BufferId("tensor", 0)


def whole(reader: Reader, tensor: LogicalTensor, kind: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of one state kind of a tensor, in their own type or another one; they must be there.

    A weight is cast from its master where nothing is stored. CheckpointDamaged if not all of it is there.
    """
    rows = reader.manifest.rows.get((tensor.name, kind), ())
    wanted = dtype or (named(rows[0].dtype) if rows else torch.float32)
    alone = LogicalTensor(tensor.name, tensor.shape, tensor.group)
    others = () if kind in (WEIGHT, MASTER) else (Kind(kind, wanted.itemsize),)
    kinds = standard_kinds(wanted.itemsize, moments=others)
    vps = VirtualParameterSpace.of([alone], ZeroRules(), kinds, _ALONE, (0,))
    values = torch.empty(tensor.numel, dtype=wanted)
    if tensor.numel:
        reader.fill(vps, _ALONE, 0, {(kind, _BUFFER): values})
    return values.view(tensor.shape)


def proven(reader: Reader, tensor: LogicalTensor, kind: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As `whole`, of one of ours; CheckpointDamaged, naming tensor and kind, if it is not what was saved.

    Digests are of values in the type that they were saved in, so it is read in that one. A weight of which nothing is
    stored has the digest of its master's cast; in another type than its own it comes from the master's proven values.
    """
    rows = reader.manifest.rows.get((tensor.name, kind), ())
    cast = [row.extent for row in rows if not row.file]
    if dtype is not None and rows and len(cast) == len(rows) and dtype != named(rows[0].dtype):
        return proven(reader, tensor, MASTER).to(dtype)
    values = whole(reader, tensor, kind)
    if rows and digest(values.view(-1)) != reader.manifest.digest(tensor.name, kind):
        read = f"{kind} of {tensor.name!r}" + (f", cast from {MASTER}," if cast else "")
        raise CheckpointDamaged(
            f"{reader.folder}: {read} is not what was saved; `ds-dynatrain checkpoint verify {reader.folder}` says "
            "where"
        )
    if dtype is None or dtype == values.dtype:
        return values
    found = values.to(dtype)
    masters = proven(reader, tensor, MASTER) if cast else values
    for each in cast:
        _runs(found, each).copy_(_runs(masters, each))
    return found


def _runs(values: torch.Tensor, extent: Extent) -> torch.Tensor:
    """An extent of a whole tensor, a row for each run."""
    return values.view(-1).as_strided((extent.count, extent.length), (extent.step, 1), extent.start)


def to_safetensors(saved: Saved, path: Path, dtype: torch.dtype | None = None, progress: Progress = silent) -> int:
    """Write all weights into one safetensors file that must not be there yet; its bytes.

    dtype: of all weights, their own if None. The file has its name only
    when it is whole. CheckpointError for a type that safetensors does not have here, or a file that is there;
    CheckpointDamaged for values that are not what was saved.
    """
    tensors, types = saved.record.logical_tensors(), dict[str, torch.dtype]()
    check_names([each.name for each in tensors], saved.record.kinds)
    for tensor in tensors:
        rows = saved.manifest.rows.get((tensor.name, WEIGHT), ())
        types[tensor.name] = dtype or (named(rows[0].dtype) if rows else torch.float32)
        if types[tensor.name] not in SAFETENSORS_TYPES:
            raise CheckpointError(
                f"{saved.path}: {tensor.name!r} is {types[tensor.name]}, which is not written to safetensors; give "
                "dtype= (--dtype) float32, bfloat16 or float16"
            )
    header, at = _header(tensors, types)
    with appearing(path) as part, part.open("xb") as file, Reader(saved.path, saved.manifest) as reader:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            file.write(proven(reader, tensor, WEIGHT, types[tensor.name]).view(-1).view(torch.uint8).numpy().data)
            progress(tensor.numel * types[tensor.name].itemsize)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(header) + at


def _header(tensors: tuple[LogicalTensor, ...], types: dict[str, torch.dtype]) -> tuple[bytes, int]:
    """(the JSON at the front, padded to a multiple of 8 bytes; bytes of all values)."""
    said: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.numel * types[tensor.name].itemsize
        name = SAFETENSORS_TYPES[types[tensor.name]]
        said[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(said).encode()
    return text + b" " * (-len(text) % 8), at
