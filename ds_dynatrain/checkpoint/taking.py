"""A checkpoint of another tool, written as one of ours: tensor by tensor, atomically, as a save is.

Memory: the largest tensor in one state kind. Where there are weights only, masters are made of them, and the optimizer
of whoever loads it begins as new.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint import folder as folders
from ds_dynatrain.checkpoint import record
from ds_dynatrain.checkpoint.convert import Progress, silent, whole
from ds_dynatrain.checkpoint.elements import named
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.files import dumped
from ds_dynatrain.checkpoint.manifest import Manifest, Row
from ds_dynatrain.checkpoint.names import check_names
from ds_dynatrain.checkpoint.others.archives import check_crcs
from ds_dynatrain.checkpoint.others.foreign import Foreign
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Record
from ds_dynatrain.checkpoint.writing import Share, cast_row, data_file
from ds_dynatrain.space import MASTER, WEIGHT, Layout, LogicalTensor

LOW = (torch.float32, torch.bfloat16, torch.float16)
"""Types of weights that a float32 master can stand for."""


def take(
    foreign: Foreign, folder: Path, carry: Any, rest: Any, tensors: Sequence[Share], progress: Progress = silent
) -> Path:
    """Write what is told into a folder of checkpoints, as its latest; the new checkpoint.

    carry, rest: encoded. tensors: what the rest announces. CheckpointDamaged, naming tensor and kind, for what is told
    and cannot be true, and, naming file and member, for values of another CRC32 than they were written with;
    CheckpointError if there is a checkpoint of that step already. Nothing is left of a failure.
    """
    check_names([each.name for each in foreign.tensors], foreign.kinds)
    record.check_tensors(foreign.tensors)
    foreign.manifest.check(None)
    record.check_agreement(foreign.tensors, foreign.kinds, foreign.manifest)
    for tensor, kind in foreign.manifest.rows:
        foreign.manifest.runs(tensor, kind)
    tag = f"step{foreign.step}"
    with folders.locked(folder):
        hidden = folders.begin(folder, tag)
        try:
            rows = list(_written(foreign, hidden, tensors, progress))
            sums = {
                record.MANIFEST: _small(hidden, record.MANIFEST, _checked(rows, hidden)),
                record.rank_file(0): _small(hidden, record.rank_file(0), dumped({"streams": None, "rest": rest})),
            }
            said = Record(
                step=foreign.step,
                layout=Layout(data=1, zero_stage=0).to_dict(),
                generation=0,
                seed=0,
                kinds=sorted({row.kind for row in rows} - {share.kind for share in tensors}, key=_place),
                tensors=[(each.name, list(each.shape), each.group, each.expert) for each in foreign.tensors],
                carry=carry,
                rests=[0],
                sums=sums,
                sizes=record.sizes_of(hidden),
                written_by=record.writer(),
                converted_from=foreign.format,
            )
            folders.write(hidden / record.RECORD, record.to_bytes(said))
            return folders.finish(hidden, tag)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def bytes_of(foreign: Foreign) -> int:
    """How many bytes `take` reports to `progress`."""
    return sum(tensor.numel * dtype.itemsize for tensor in foreign.tensors for _, dtype in _stored(foreign, tensor))


def _written(foreign: Foreign, hidden: Path, tensors: Sequence[Share], progress: Progress) -> Iterator[Row]:
    """Write the data files; the rows of the manifest."""
    with ExitStack() as stack:
        files: dict[torch.dtype, Callable[[Share], Row]] = {}

        def write(share: Share) -> Row:
            dtype = share.matrix.dtype
            if dtype not in files:
                files[dtype] = stack.enter_context(data_file(hidden, 0, dtype))
            return files[dtype](share)

        check_crcs(foreign.path, foreign.archives)
        reader = stack.enter_context(Reader(foreign.path, foreign.manifest, links=True))
        for tensor in foreign.tensors:
            for kind, dtype in _stored(foreign, tensor):
                yield from _rows_of(reader, tensor, kind, dtype, write)
                progress(tensor.numel * dtype.itemsize)
        yield from map(write, tensors)


def _rows_of(
    reader: Reader, tensor: LogicalTensor, kind: str, dtype: torch.dtype, write: Callable[[Share], Row]
) -> list[Row]:
    """Write one kind of a tensor, and say what weights are cast of it; its values are gone afterwards."""
    there = reader.manifest.rows
    values = whole(reader, tensor, kind if (tensor.name, kind) in there else WEIGHT, dtype).view(1, -1)
    share = Share(tensor.name, kind, tensor.shape, Extent(0, tensor.numel, 0, 1), values)
    rows = [write(share)]
    if kind == MASTER and (tensor.name, WEIGHT) in there:
        rows.append(cast_row(share, named(there[tensor.name, WEIGHT][0].dtype)))
    return rows


def _stored(foreign: Foreign, tensor: LogicalTensor) -> Iterator[tuple[str, torch.dtype]]:
    """(kind, element type) of what is stored of a tensor: all that is there, but weights that have masters.

    Masters are made of weights that are trained, or may be, and have none.
    """
    held = {kind: named(foreign.manifest.rows[tensor.name, kind][0].dtype) for kind in _held(foreign, tensor)}
    weight = held.get(WEIGHT)
    if weight is not None and MASTER not in held and tensor.trainable and weight in LOW:
        held[MASTER] = torch.float32
    for kind in sorted(held, key=_place):
        if kind != WEIGHT or MASTER not in held:
            yield kind, held[kind]


def _held(foreign: Foreign, tensor: LogicalTensor) -> list[str]:
    return [kind for kind in foreign.kinds if (tensor.name, kind) in foreign.manifest.rows]


def _place(kind: str) -> tuple[int, str]:
    """Weights, masters, then moments by name."""
    return ({WEIGHT: 0, MASTER: 1}.get(kind, 2), kind)


def _checked(rows: list[Row], hidden: Path) -> bytes:
    manifest = Manifest.of(rows)
    manifest.check(hidden)
    return manifest.to_bytes()


def _small(hidden: Path, name: str, data: bytes) -> str:
    """Write a small file; its sum."""
    folders.write(hidden / name, data)
    return record.sum_of(data)
