"""What safetensors files tell: weights by name. One file, or a folder as Hugging Face writes it.

The format: 8 bytes with the length of a JSON header, the header, the values. A folder has `model.safetensors`, or an
index that says which of several files has which tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_dynatrain.checkpoint.files import WHERE_DAMAGED, open_regular, parsed, read_small
from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.names import is_component
from ds_dynatrain.checkpoint.others.foreign import Foreign, whole_row
from ds_dynatrain.checkpoint.others.torch_files import Stored
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import WEIGHT, LogicalTensor

FORMAT = "safetensors"
SUFFIX, SINGLE, INDEX = ".safetensors", "model.safetensors", "model.safetensors.index.json"
TYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names."""
MOST_BYTES = 100_000_000
"""Of a header, as safetensors itself has it."""
Size = Annotated[int, Field(ge=0, lt=1 << 63)]


class Entry(BaseModel):
    """What a header says of a tensor."""

    model_config = ConfigDict(strict=True, frozen=True)
    dtype: str
    shape: list[Size]
    data_offsets: Annotated[list[Size], Field(min_length=2, max_length=2)]


def is_safetensors(path: Path) -> bool:
    """Whether a path looks like such a file, or like a folder of them."""
    if path.is_dir():
        return (path / INDEX).is_file() or any(path.glob(f"*{SUFFIX}"))
    return path.is_file() and path.suffix == SUFFIX


def read_safetensors(path: Path, trust_pickle: bool = False) -> Foreign:
    """Describe them; nothing in them is a pickle. CheckpointError for a folder that does not say which files count or a
    type that is not known here, CheckpointDamaged for what is no such file or is cut off.
    """
    tensors, rows = [], []
    for name, stored in _tensors(path):
        tensor = LogicalTensor(name, stored.shape)
        tensors.append(tensor)
        if tensor.numel:
            rows.append(whole_row(tensor, WEIGHT, stored))
    return Foreign(path, FORMAT, Manifest.of(rows), tuple(tensors))


def _tensors(path: Path) -> Iterator[tuple[str, Stored]]:
    if path.is_file():
        yield from header_of(path).items()
        return
    single = (path / SINGLE).is_file()
    if (path / INDEX).is_file() and single:
        raise CheckpointError(
            f"{path} has both {SINGLE} and {INDEX}; give {path / SINGLE}, or remove the one that does not count"
        )
    if not (path / INDEX).is_file():
        files = [path / SINGLE] if single else sorted(path.glob(f"*{SUFFIX}"))
        if len(files) != 1:
            raise CheckpointError(
                f"{path} has {len(files)} safetensors files and no {INDEX}; give the path of one file"
            )
        yield from header_of(files[0]).items()
        return
    headers: dict[str, dict[str, Stored]] = {}
    for name, file in _index(path).items():
        if file not in headers:
            headers[file] = header_of(path / file)
        if name not in headers[file]:
            raise CheckpointDamaged(f"{INDEX} says that {file} has {name!r}, and it has not")
        yield name, headers[file][name]


def _index(path: Path) -> dict[str, str]:
    """Tensor -> name of its file in the folder."""
    found = parsed(read_small(path / INDEX, MOST_BYTES, links=True), str(path / INDEX)).get("weight_map")
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{path / INDEX} is no index: it has no table weight_map")
    wrong = [file for file in found.values() if not is_component(file) or not (path / file).is_file()]
    if wrong:
        raise CheckpointDamaged(f"{path / INDEX}: there is no {wrong[0]!r} beside it")
    return found


def header_of(path: Path) -> dict[str, Stored]:
    """Where each tensor of a file lies; CheckpointDamaged, naming it, for one that does not lie there.

    As the library has it: each byte behind the header is of one tensor, and nothing is said twice.
    """
    with open(open_regular(path, links=True), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MOST_BYTES, size - 8):
            raise CheckpointDamaged(f"{path} is no safetensors file, or cut off: a header of {length} bytes in {size}")
        said = parsed(file.read(length), f"the header of {path}", _once)
    try:
        json.dumps(said, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:  # half a character, or NaN: Python reads them, JSON has none
        raise CheckpointDamaged(f"the header of {path} is no JSON: {error}") from None
    notes = said.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(each, str) for each in notes.values())):
        raise CheckpointDamaged(f"the header of {path}: __metadata__ is no table of texts")
    found = {name: _stored(path, name, each, 8 + length, size) for name, each in said.items()}
    end = 8 + length
    for name, stored in sorted(found.items(), key=lambda each: (each[1].offset, each[1].nbytes)):
        if stored.offset != end:
            raise CheckpointDamaged(
                f"{path}: {name!r} begins at byte {stored.offset}, and the one before ends at {end}; {WHERE_DAMAGED}"
            )
        end += stored.nbytes
    if end != size:
        raise CheckpointDamaged(f"{path} has {size} bytes, and what is in it ends at {end}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dictionary of a JSON object, whose keys must differ."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key twice among {sorted(found)[:3]}")
    return found


def _stored(path: Path, name: str, said: Any, first: int, size: int) -> Stored:
    try:
        entry = Entry.model_validate(said)
    except ValidationError as error:
        what = error.errors(include_url=False)[0]
        raise CheckpointDamaged(f"{path} says of {name!r}: {what['loc']}: {what['msg']}") from None
    dtype, shape, (begin, end) = TYPES.get(entry.dtype), tuple(entry.shape), entry.data_offsets
    if dtype is None:
        raise CheckpointError(
            f"{name!r} in {path} is {entry.dtype}, which is not read; save it as one of {', '.join(TYPES)}"
        )
    if not begin <= end <= size - first or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointDamaged(f"{path} says that {name!r} {shape} is at bytes {begin} to {end} of {size - first}")
    return Stored(str(path.resolve()), first + begin, dtype, shape)
