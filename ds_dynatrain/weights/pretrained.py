"""`engine.save_pretrained`: writes a folder that Hugging Face's `from_pretrained` reads, from any layout.

Rank 0 writes each tensor as soon as it is gathered, so it needs memory for one bucket and one tensor. Files are written
under temporary names and renamed when all of them are complete. Before that, the index of an earlier call is removed;
the new index is written last.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_dynatrain.checkpoint.others.safetensors import INDEX, SINGLE, WRITTEN, header
from ds_dynatrain.errors import CheckpointError, WeightsError
from ds_dynatrain.membership.session import Session
from ds_dynatrain.weights.naming import base_of, persistent_buffers
from ds_dynatrain.weights.outputs import ParamMeta, batches

SHARD_BYTES = 5_000_000_000
"""Most bytes of tensors in one file by default, as in transformers."""
PART = ".part"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files that an earlier call may have written."""


def save_pretrained(engine: Any, path: str | os.PathLike[str], max_shard_bytes: int, dtype: torch.dtype | None) -> Path:
    """Write the weights and the configuration of a model. Implements `DynatrainEngine.save_pretrained`."""
    # imported here, because readers of folders import this file without DeepSpeed
    from ds_dynatrain.weights.weight_source import source

    given, parts = source(engine), engine._parts
    folder, kept = Path(path).absolute(), dtype or given.dtype
    if kept not in WRITTEN:
        raise WeightsError(f"save_pretrained: {kept} is not written to safetensors; give dtype=torch.bfloat16")
    buffers = {} if parts.job.has_stages else persistent_buffers(parts.host.module)
    metas = [replace(meta, dtype=kept) for meta in given.metadata]
    metas += [ParamMeta(name, held.dtype, tuple(held.shape)) for name, held in buffers.items()]
    shards, error = list(batches(metas, lambda meta: meta.nbytes, max_shard_bytes)), None
    key = f"pretrained/{parts.place_in_training()}"
    session = Session(parts.control, key, parts.members, "save_pretrained", is_patient=True)

    def finish() -> int:
        if error is not None:
            raise error
        return put_in_place(folder, shards, base_of(parts.host.module), kept)

    stream = given.iter_full()
    try:
        if given.rank == 0:
            try:
                write_parts(folder, shards, chain((tensor for _, tensor in stream), buffers.values()))
            except CheckpointError as failed:  # all ranks must read the stream to its end
                error = failed
        for _ in stream:
            pass
        session.first("saved", finish, "writing weights")
    except CheckpointError as failed:
        raise WeightsError(f"save_pretrained: {failed}") from failed
    finally:
        if given.rank == 0:
            remove_parts(folder, shards)
    return folder


def write_parts(folder: Path, shards: Sequence[Sequence[ParamMeta]], tensors: Iterator[torch.Tensor]) -> None:
    """Write tensors, in the order of their metadata, to files with temporary names, which `put_in_place` later renames.

    Raises CheckpointError if a write fails. Errors of the iterator `tensors` pass through.
    """

    @contextmanager
    def saying() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # includes a lack of host memory for a copy
            raise CheckpointError(f"{error}; nothing of {folder} was replaced") from error

    for name, shard in zip(names_of(shards), shards, strict=True):
        with saying():
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / (name + PART)).open("wb")
        try:
            with saying():
                file.write(header((meta.name, meta.dtype, meta.shape) for meta in shard))
            for meta in shard:
                tensor = next(tensors)
                with saying():
                    values = tensor.detach().to("cpu", meta.dtype).contiguous().view(-1)
                    file.write(values.view(torch.uint8).numpy().data)
            with saying():
                file.flush()
                os.fsync(file.fileno())
        finally:
            with suppress(OSError):  # close() tries once more to write the data that could not be written
                file.close()


def put_in_place(folder: Path, shards: Sequence[Sequence[ParamMeta]], model: nn.Module, dtype: torch.dtype) -> int:
    """Replace the files of an earlier call, and write index and configuration. Return the number of files.

    Raises CheckpointError if a replacement fails.
    """
    names = names_of(shards)
    files = {meta.name: name for name, shard in zip(names, shards, strict=True) for meta in shard}
    total = sum(meta.nbytes for shard in shards for meta in shard)
    try:
        (folder / INDEX).unlink(missing_ok=True)
        for name in names:
            (folder / (name + PART)).replace(folder / name)
        for old in folder.glob("model*.safetensors"):
            if OURS.fullmatch(old.name) and old.name not in names:
                old.unlink()
        if len(names) > 1:
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)
            (folder / (INDEX + PART)).write_text(index, encoding="utf-8")
            (folder / (INDEX + PART)).replace(folder / INDEX)
        configure(folder, model, dtype)
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}; {folder} was replaced in part: save again") from error
    return len(names)


def remove_parts(folder: Path, shards: Sequence[Sequence[ParamMeta]]) -> None:
    """Remove the temporary files that a failed or interrupted save has left."""
    for name in (*names_of(shards), INDEX):
        with suppress(OSError):
            (folder / (name + PART)).unlink()


def names_of(shards: Sequence[object]) -> list[str]:
    """Return the file names that transformers uses for this many files of weights."""
    count = len(shards)
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def configure(folder: Path, model: Any, dtype: torch.dtype) -> None:
    """Write the configuration of a transformers model to the folder. Does nothing for other models."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures, config.dtype = [type(model).__name__], dtype
        config.save_pretrained(folder)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
