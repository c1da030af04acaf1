"""Reading weights from safetensors files, and writing the weights of one of our checkpoints to one.

The reader takes a single file, or a folder in Hugging Face's form: with `model.safetensors`, or with an index that maps
tensors to files. The writer makes a single file, tensor by tensor, and needs memory only for the largest tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ds_dynatrain.checkpoint.files import (
    WHERE_DAMAGED,
    Progress,
    appearing,
    check_names,
    is_component,
    open_regular,
    parsed,
    read_small,
    silent,
)
from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.others.foreign import Foreign, whole_row
from ds_dynatrain.checkpoint.others.torch_files import Stored
from ds_dynatrain.checkpoint.reading import Reader, proven
from ds_dynatrain.checkpoint.record import Saved
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
"""Element types, keyed by their names in safetensors."""
WRITTEN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Element types in which weights can be written. Module buffers keep theirs."""
MOST_BYTES = 100_000_000
"""Maximum accepted size of an index, in bytes."""


def is_safetensors(path: Path) -> bool:
    """Return whether a path looks like a safetensors file, or like a folder of such files."""
    if path.is_dir():
        return (path / INDEX).is_file() or any(path.glob(f"*{SUFFIX}"))
    return path.is_file() and path.suffix == SUFFIX


def read_safetensors(path: Path, trust_pickle: bool = False) -> Foreign:
    """Return a description of a safetensors file, or of a folder of them. Tensor values are not read.

    trust_pickle: has no effect, because the format contains no pickles.

    Raises CheckpointError if it is not clear which file of a folder to read, or for an unknown element type. Raises
    CheckpointDamaged if a file is truncated or not a safetensors file.
    """
    tensors, rows = [], []
    for name, stored in _tensors(path):
        tensor = LogicalTensor(name, stored.shape)
        tensors.append(tensor)
        if tensor.numel:
            rows.append(whole_row(tensor, WEIGHT, stored))
    return Foreign(path, FORMAT, Manifest.of(rows), tuple(tensors))


def _tensors(path: Path) -> Iterator[tuple[str, Stored]]:
    single, has_index = (path / SINGLE).is_file(), (path / INDEX).is_file()
    if single and has_index:
        raise CheckpointError(
            f"{path} has both {SINGLE} and {INDEX}; give {path / SINGLE}, or remove the one that does not count"
        )
    if not has_index:
        files = [path] if path.is_file() else [path / SINGLE] if single else sorted(path.glob(f"*{SUFFIX}"))
        if len(files) != 1:
            raise CheckpointError(
                f"{path} has {len(files)} safetensors files and no {INDEX}; give the path of one file"
            )
        yield from header_of(files[0]).items()
        return
    index = _index(path)
    headers = {file: header_of(path / file) for file in dict.fromkeys(index.values())}
    for name, file in index.items():
        if name not in headers[file]:
            raise CheckpointDamaged(f"{INDEX} says that {file} has {name!r}, and it has not")
        yield name, headers[file][name]


def _index(path: Path) -> dict[str, str]:
    """Read the index of a folder, and return a map from each tensor's name to its file.

    Raises CheckpointDamaged if the index is invalid or a file is missing.
    """
    found = parsed(read_small(path / INDEX, MOST_BYTES, links=True), str(path / INDEX)).get("weight_map")
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{path / INDEX} is no index: it has no table weight_map")
    wrong = [file for file in found.values() if not is_component(file) or not (path / file).is_file()]
    if wrong:
        raise CheckpointDamaged(f"{path / INDEX}: there is no {wrong[0]!r} beside it")
    return found


def header_of(path: Path) -> dict[str, Stored]:
    """Return a map from each tensor's name in a safetensors file to its position, type and shape.

    The library checks that values lie in the order of `offset_keys`, after the header and without gaps. Raises
    CheckpointDamaged, naming the file, if the file is invalid, and CheckpointError for an unknown element type.
    """
    with open(open_regular(path, links=True), "rb") as file:
        at, found = 8 + int.from_bytes(file.read(8), "little"), dict[str, Stored]()
    try:
        with safe_open(path, "pt") as held:
            for name in held.offset_keys():
                said = held.get_slice(name)
                dtype, shape = TYPES.get(said.get_dtype()), tuple(said.get_shape())
                if dtype is None:
                    raise CheckpointError(
                        f"{name!r} in {path} is {said.get_dtype()}, which is not read; save it as one of "
                        f"{', '.join(TYPES)}"
                    )
                found[name] = Stored(str(path.resolve()), at, dtype, shape)
                at += found[name].nbytes
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(f"{path} is no safetensors file, or cut off: {error}; {WHERE_DAMAGED}") from None
    return found


def to_safetensors(saved: Saved, path: Path, dtype: torch.dtype | None = None, progress: Progress = silent) -> int:
    """Write all weights of a checkpoint into one safetensors file, and return its size in bytes.

    The file gets its name when it is complete.

    dtype: the type to which weights are converted; None to keep their types.
    progress: called with the number of bytes of each tensor.

    Raises CheckpointError if the file exists or a type cannot be written, and CheckpointDamaged if values are not what
    was saved.
    """
    tensors, types = saved.record.logical_tensors(), dict[str, torch.dtype]()
    check_names([each.name for each in tensors], saved.record.kinds)
    for tensor in tensors:
        types[tensor.name] = dtype or saved.manifest.dtype(tensor.name, WEIGHT) or torch.float32
        if types[tensor.name] not in WRITTEN:
            raise CheckpointError(
                f"{saved.path}: {tensor.name!r} is {types[tensor.name]}, which is not written to safetensors; give "
                "dtype= (--dtype) float32, bfloat16 or float16"
            )
    begin = header((tensor.name, types[tensor.name], tensor.shape) for tensor in tensors)
    with appearing(path) as part, part.open("xb") as file, Reader(saved.path, saved.manifest) as reader:
        file.write(begin)
        for tensor in tensors:
            file.write(proven(reader, tensor, WEIGHT, types[tensor.name]).view(-1).view(torch.uint8).numpy().data)
            progress(tensor.numel * types[tensor.name].itemsize)
        file.flush()
        os.fsync(file.fileno())
    return len(begin) + sum(tensor.numel * types[tensor.name].itemsize for tensor in tensors)


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the first bytes of a safetensors file with these tensors (name, type, shape), in the order of their
    values.
    """
    said: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, types = 0, {dtype: name for name, dtype in TYPES.items()}
    for name, dtype, shape in tensors:
        begin, at = at, at + math.prod(shape) * dtype.itemsize
        said[name] = {"dtype": types[dtype], "shape": list(shape), "data_offsets": [begin, at]}
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
