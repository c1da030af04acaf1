"""`engine.save_pretrained`: a folder that Hugging Face's `from_pretrained` reads, out of any layout.

Rank 0 writes each tensor as the source gives it, so it needs memory for one bucket and one tensor. Files get their
names when all of them are whole. The index of an earlier call is removed before that, and the new one comes last.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from ds_dynatrain.checkpoint.others.safetensors import INDEX, SINGLE, WRITTEN, header
from ds_dynatrain.errors import CheckpointError, WeightsError
from ds_dynatrain.membership.session import Session
from ds_dynatrain.weights.lora import base_of, persistent_buffers
from ds_dynatrain.weights.outputs import ParamMeta

SHARD_BYTES = 5_000_000_000
"""Most bytes of tensors in one file by default, as in transformers."""
PART = ".part"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files that an earlier call may have written."""


def save_pretrained(engine: Any, path: str | os.PathLike[str], max_shard_bytes: int, dtype: torch.dtype | None) -> Path:
    """Write weights and configuration; see `DynatrainEngine.save_pretrained`."""
    from ds_dynatrain.weights.weight_source import source  # readers of folders import this file without DeepSpeed

    given, parts = source(engine), engine._parts
    folder, kept = Path(path).absolute(), dtype or given.dtype
    if kept not in WRITTEN:
        raise WeightsError(f"save_pretrained: {kept} is not written to safetensors; give dtype=torch.bfloat16")
    buffers = {} if parts.job.has_stages else persistent_buffers(parts.host.module)
    metas = [replace(meta, dtype=kept) for meta in given.metadata]
    metas += [ParamMeta(name, held.dtype, tuple(held.shape)) for name, held in buffers.items()]
    writer = Writer(folder, cut(metas, max_shard_bytes), kept)
    key = f"pretrained/{parts.switcher.place_in_training()}"
    session = Session(parts.control, key, parts.members, "save_pretrained", is_patient=True)
    try:
        for _, tensor in given.iter_full():
            if given.rank == 0:
                writer.put(tensor)
        for held in buffers.values() if given.rank == 0 else ():
            writer.put(held)
        session.first("saved", lambda: writer.finish(base_of(parts.host.module)), "writing weights")
    except CheckpointError as error:
        raise WeightsError(f"save_pretrained: {error}") from error
    finally:
        if given.rank == 0:
            writer.clean_up()
    return folder


def cut(metas: Sequence[ParamMeta], most: int) -> list[list[ParamMeta]]:
    """Cut tensors, in order, into files of at most `most` bytes; a larger tensor has a file of its own."""
    shards: list[list[ParamMeta]] = [[]]
    filled = 0
    for meta in metas:
        nbytes = meta.numel * meta.dtype.itemsize
        if shards[-1] and filled + nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(meta)
        filled += nbytes
    return shards


class Writer:
    """A folder of safetensors files that is being written, tensor by tensor in the order of its metadata.

    The first error is kept for `finish`, because all ranks have to come to the end of the source.
    """

    def __init__(self, folder: Path, shards: Sequence[Sequence[ParamMeta]], dtype: torch.dtype) -> None:
        self._folder, self._shards, self._dtype = folder, shards, dtype
        self._names = [shard_name(number, len(shards)) for number in range(len(shards))]
        self._file: BinaryIO | None = None
        self._left: list[int] = [len(shard) for shard in shards]
        self._error: Exception | None = None

    def put(self, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        if self._error is not None:
            return
        try:
            number = next(number for number, left in enumerate(self._left) if left)
            if self._file is None:
                self._file = self._begin(number)
            meta = self._shards[number][-self._left[number]]
            values = tensor.detach().to("cpu", meta.dtype).contiguous().view(-1)
            self._file.write(values.view(torch.uint8).numpy().data)
            self._left[number] -= 1
            if not self._left[number]:
                self._end()
        except Exception as error:  # also no memory for a copy on the host
            self._error = error

    def finish(self, model: nn.Module) -> int:
        """Give all files their names, write index and configuration, and return the number of files.

        Raise CheckpointError with the first error of a write, before anything is replaced, or of a replacement.
        """
        if self._error is not None:
            raise CheckpointError(f"{self._error}; nothing of {self._folder} was replaced") from self._error
        try:
            self._replace()
            configure(self._folder, model, self._dtype)
        except Exception as error:
            raise CheckpointError(
                f"{type(error).__name__}: {error}; {self._folder} was replaced in part: save again"
            ) from error
        return len(self._names)

    def _replace(self) -> None:
        """Put the new files in the place of those of an earlier call."""
        (self._folder / INDEX).unlink(missing_ok=True)
        for name in self._names:
            (self._folder / (name + PART)).replace(self._folder / name)
        for old in self._folder.glob("model*.safetensors"):
            if OURS.fullmatch(old.name) and old.name not in self._names:
                old.unlink()
        if len(self._names) > 1:
            (self._folder / (INDEX + PART)).write_text(self._index(), encoding="utf-8")
            (self._folder / (INDEX + PART)).replace(self._folder / INDEX)

    def clean_up(self) -> None:
        """Close and remove what is left of files that are not whole."""
        with suppress(OSError):
            self._end()
        for name in (*self._names, INDEX):
            with suppress(OSError):
                (self._folder / (name + PART)).unlink()

    def _begin(self, number: int) -> BinaryIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / (self._names[number] + PART)).open("wb")
        file.write(header((meta.name, meta.dtype, meta.shape) for meta in self._shards[number]))
        return file

    def _end(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())

    def _index(self) -> str:
        files = {meta.name: name for name, shard in zip(self._names, self._shards, strict=True) for meta in shard}
        total = sum(meta.numel * meta.dtype.itemsize for shard in self._shards for meta in shard)
        return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)


def shard_name(number: int, count: int) -> str:
    """Return transformers' name for file `number`, from 0, of `count` files."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def configure(folder: Path, model: Any, dtype: torch.dtype) -> None:
    """Write the configuration of a model of transformers beside its weights; nothing for another model."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures, config.dtype = [type(model).__name__], dtype
        config.save_pretrained(folder)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
