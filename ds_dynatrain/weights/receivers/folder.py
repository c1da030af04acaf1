"""`Folder`: each version as a folder of safetensors with an index, which appears once it is complete.

`PATH/v00000007` has the files that `transformers` loads, and `update.json` with the digests. `newest` finds it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint.extents import WORD, chunks
from ds_dynatrain.errors import CheckpointDamaged
from ds_dynatrain.transfer import digest
from ds_dynatrain.weights.receivers.blocks import DIGEST_ELEMENTS
from ds_dynatrain.weights.receivers.http import grouped
from ds_dynatrain.weights.update import Outgoing, Receiver

RECORD = "update.json"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
_NAME = re.compile(r"v(\d{8})")
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that safetensors has for element types."""


class Folder(Receiver):
    """A folder that rollouts read; make one object on each rank of the trainer. Rank 0 writes.

    path: the folder, on a file system that rank 0 and the readers see. keep: how many of the newest versions stay.
    shard_bytes: most bytes of a file.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 2, shard_bytes: int = SHARD_BYTES) -> None:
        self.path, self.keep, self.shard_bytes = Path(path).absolute(), keep, shard_bytes

    def claim(self, source: Any, is_delta: bool) -> tuple[int, int, int]:
        """Return the version after the newest in the folder (rank 0)."""
        versions = [0, *_versions(self.path)] if source.rank == 0 else [0]
        return max(max(versions), self.version) + 1, 0, 0

    def send(self, out: Outgoing) -> None:
        """Write a version beside the others, and give it its name once all tensors are in it."""
        tensors, error, hidden = out.full(), None, self.path / f".v{out.version:08d}"
        try:
            if out.source.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir(parents=True)
                buckets = grouped(out.source.metadata, self.shard_bytes)
                out.nbytes = write_shards(hidden, buckets, tensors)
                out.check_whole()
                record = {"version": out.version, "label": out.label, "step": out.source.step, "digests": out.digests}
                _write(hidden / RECORD, json.dumps(record).encode())
                _flush(hidden)
                hidden.rename(self.path / f"v{out.version:08d}")
                _flush(self.path)
        except Exception as failed:  # reported to all ranks by `prove`
            error = failed
            shutil.rmtree(hidden, ignore_errors=True)
        finally:
            for _ in tensors:
                pass
        out.prove(error)
        if out.source.rank == 0:
            for version in _versions(self.path)[: -self.keep]:
                shutil.rmtree(self.path / f"v{version:08d}", ignore_errors=True)


def write_shards(folder: Path, buckets: Sequence[Sequence[Any]], tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
    """Write one file of safetensors for each bucket of metadata, and an index; return the bytes of all tensors.

    tensors: in the order of the buckets; each is written before the next one is asked for.
    """
    total, places = 0, dict[str, str]()
    for number, bucket in enumerate(buckets, start=1):
        name = f"model-{number:05d}-of-{len(buckets):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for meta in bucket:
            end = at + torch.Size(meta.shape).numel() * meta.dtype.itemsize
            header[meta.name] = {"dtype": _TYPES[meta.dtype], "shape": list(meta.shape), "data_offsets": [at, end]}
            places[meta.name], at = name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in bucket:
                flat = next(tensors)[1].detach().reshape(1, -1)
                for _, part in chunks(flat, DIGEST_ELEMENTS) if flat.numel() else ():
                    file.write(part.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        total += at
    _write(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1).encode())
    return total


def newest(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the newest version; None if there is none yet."""
    versions = _versions(Path(path))
    return Path(path) / f"v{versions[-1]:08d}" if versions else None


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a version. Raise CheckpointDamaged if they are not those that were sent."""
    from safetensors.torch import load_file

    digests = json.loads((folder / RECORD).read_text(encoding="utf-8"))["digests"]
    places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for name in sorted({*places.values()}):
        found |= load_file(folder / Path(name).name)
    if found.keys() != digests.keys():
        raise CheckpointDamaged(f"{folder}: {len(found)} tensors, and {len(digests)} were sent")
    for name, tensor in found.items():
        if (held := digest(tensor.reshape(-1)) & WORD) != digests[name]:
            raise CheckpointDamaged(f"{folder}: {name} has digest {held:#x}, and {digests[name]:#x} was sent")
    return found


def _versions(path: Path) -> list[int]:
    names = (_NAME.fullmatch(each.name) for each in path.iterdir()) if path.is_dir() else iter(())
    return sorted(int(name[1]) for name in names if name is not None)


def _write(file: Path, data: bytes) -> None:
    with file.open("xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
