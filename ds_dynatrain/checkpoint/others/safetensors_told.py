"""What safetensors files tell: weights by name. One file, or a folder as Hugging Face writes it.

The format: 8 bytes with the length of a JSON header, the header, the values. A folder has `model.safetensors`, or an
index that says which of several files has which tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.others.told import Told, whole_row
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


def is_safetensors(path: Path) -> bool:
    """Whether a path looks like such a file, or like a folder of them."""
    if path.is_dir():
        return (path / INDEX).is_file() or any(path.glob(f"*{SUFFIX}"))
    return path.is_file() and path.suffix == SUFFIX


def told_by_safetensors(path: Path, trust_pickle: bool = False) -> Told:
    """Describe them; nothing in them is a pickle. CheckpointError for a folder that does not say which files count or a
    type that is not known here, CheckpointDamaged for what is no such file or is cut off.
    """
    tensors, rows = [], []
    for name, stored in _tensors(path):
        tensor = LogicalTensor(name, stored.shape)
        tensors.append(tensor)
        if tensor.numel:
            rows.append(whole_row(tensor, WEIGHT, stored))
    return Told(path, FORMAT, Manifest.of(rows), tuple(tensors))


def _tensors(path: Path) -> Iterator[tuple[str, Stored]]:
    if path.is_file():
        yield from header_of(path).items()
        return
    single = (path / SINGLE).is_file()
    if (path / INDEX).is_file() and single:
        raise CheckpointError(
            f"{path} has both {SINGLE} and {INDEX}: give the file, or remove the one that does not count"
        )
    if not (path / INDEX).is_file():
        files = [path / SINGLE] if single else sorted(path.glob(f"*{SUFFIX}"))
        if len(files) != 1:
            raise CheckpointError(f"{path} has {len(files)} safetensors files and no {INDEX}: give one of them")
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
    try:
        found = json.loads((path / INDEX).read_bytes())["weight_map"]
        wrong = [file for file in found.values() if Path(file).name != file or not (path / file).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path / INDEX} is no index ({type(error).__name__}: {error})") from None
    if wrong:
        raise CheckpointDamaged(f"{path / INDEX}: there is no {wrong[0]!r} beside it")
    return {str(name): file for name, file in found.items()}


def header_of(path: Path) -> dict[str, Stored]:
    """Where each tensor of a file lies; CheckpointDamaged, naming it, for one that does not lie there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MOST_BYTES, size - 8):
            raise CheckpointDamaged(f"{path} is no safetensors file, or cut off: a header of {length} bytes in {size}")
        text = file.read(length)
    try:
        said = json.loads(text)
        said.pop("__metadata__", None)
        return {str(name): _stored(path, name, each, 8 + length, size) for name, each in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is no safetensors file ({type(error).__name__}: {error})") from None


def _stored(path: Path, name: str, said: Mapping[str, Any], first: int, size: int) -> Stored:
    dtype, shape = TYPES.get(said["dtype"]), tuple(int(dim) for dim in said["shape"])
    begin, end = (int(place) for place in said["data_offsets"])
    if dtype is None:
        raise CheckpointError(f"{name!r} in {path} is {said['dtype']}, which is not read here")
    wanted = math.prod(shape) * dtype.itemsize
    if min((0, *shape)) < 0 or not 0 <= begin <= end <= size - first or end - begin != wanted:
        raise CheckpointDamaged(f"{path} says that {name!r} {shape} is at bytes {begin} to {end} of {size - first}")
    return Stored(str(path.resolve()), first + begin, dtype, shape)
