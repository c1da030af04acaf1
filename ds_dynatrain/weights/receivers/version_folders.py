"""`Folder`: writes each version of the weights as a folder of safetensors, which appears once it is complete.

`PATH/v00000007` has the files that `transformers` loads, and `update.json` with the digests. `newest` finds the newest
folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_dynatrain.checkpoint.extents import WORD
from ds_dynatrain.checkpoint.folder import sync, write
from ds_dynatrain.errors import CheckpointDamaged, ConfigError
from ds_dynatrain.transfer import digest
from ds_dynatrain.weights.naming import persistent_buffers
from ds_dynatrain.weights.outputs import ParamMeta, batches
from ds_dynatrain.weights.pretrained import SHARD_BYTES, put_in_place, write_parts
from ds_dynatrain.weights.update import Outgoing, Receiver

RECORD = "update.json"
_NAME = re.compile(r"v(\d{8})")


class Folder(Receiver):
    """A folder from which rollouts read versions. Make one object on each rank of the trainer; rank 0 writes.

    path: the folder, on a file system that rank 0 and the readers share.
    model: a transformers model whose configuration and persistent buffers are also written, for engines that load a
        folder.
    keep: the number of newest versions to keep.
    max_shard_bytes: the maximum size of a file in bytes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        keep: int = 2,
        max_shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"Folder: keep={keep}; give 1 or more, since the newest version stays")
        self.path, self.keep, self.max_shard_bytes = Path(path).absolute(), keep, max_shard_bytes
        self._model = nn.Module() if model is None else model

    def claim(self, source: Any, is_delta: bool) -> tuple[int, int, int]:
        """Return (next version, 0, 0). On rank 0 the version is above all those in the folder."""
        versions = _versions(self.path) if source.rank == 0 else []
        return max([self.version, *versions]) + 1, 0, 0

    def send(self, out: Outgoing) -> None:
        """Write a new version, and remove the oldest ones."""
        super().send(out)
        if out.source.rank == 0:
            for version in _versions(self.path)[: -self.keep]:
                shutil.rmtree(self.path / f"v{version:08d}", ignore_errors=True)

    def deliver(self, out: Outgoing) -> None:
        """Write a version under a hidden name, and rename it once all tensors are in it."""
        hidden = self.path / f".v{out.version:08d}"
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            self._write(out, hidden)
        except Exception:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        hidden.rename(self.path / f"v{out.version:08d}")
        sync(self.path)

    def _write(self, out: Outgoing, hidden: Path) -> None:
        metadata, buffers = list(out.source.metadata), persistent_buffers(self._model)
        dtype = metadata[0].dtype
        metadata += [ParamMeta(name, held.dtype, tuple(held.shape)) for name, held in buffers.items()]
        shards = list(batches(metadata, lambda meta: meta.nbytes, self.max_shard_bytes))
        write_parts(hidden, shards, chain((tensor for _, tensor in out.full()), buffers.values()))
        out.nbytes = sum(meta.nbytes for meta in out.source.metadata)
        out.check_whole()
        digests = {**out.digests, **{name: digest(held.reshape(-1)) & WORD for name, held in buffers.items()}}
        put_in_place(hidden, shards, self._model, dtype)
        record = {"version": out.version, "label": out.label, "step": out.source.step, "digests": digests}
        write(hidden / RECORD, json.dumps(record).encode())
        sync(hidden)


def newest(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the newest version; None if there is none yet."""
    versions = _versions(Path(path))
    return Path(path) / f"v{versions[-1]:08d}" if versions else None


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the folder of a version. Raises CheckpointDamaged unless they are as they were sent."""
    from safetensors.torch import load_file

    digests = json.loads((folder / RECORD).read_text(encoding="utf-8"))["digests"]
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    if found.keys() != digests.keys():
        raise CheckpointDamaged(f"{folder}: {len(found)} tensors, and {len(digests)} were sent")
    for name, tensor in found.items():
        if (held := digest(tensor.reshape(-1)) & WORD) != digests[name]:
            raise CheckpointDamaged(f"{folder}: {name} has digest {held:#x}, and {digests[name]:#x} was sent")
    return found


def _versions(path: Path) -> list[int]:
    names = (_NAME.fullmatch(each.name) for each in path.iterdir()) if path.is_dir() else iter(())
    return sorted(int(name[1]) for name in names if name is not None)
