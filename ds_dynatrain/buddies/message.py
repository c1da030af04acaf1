"""A copy as it lies in memory and travels: all tensors end to end, and a header in JSON that says what they are."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.engine.copies.copy import Copy, Mark
from ds_dynatrain.engine.encoding import announced
from ds_dynatrain.errors import DynatrainError, TransferError
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space import BufferId

ALIGN = 64
"""Each tensor begins at a multiple of so many bytes."""
Shape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """A buffer, and of what it is."""

    kind: str
    name: BufferId
    dtype: torch.dtype
    numel: int


def rows_of(buffers: Buffers) -> list[Row]:
    """The rows of buffers, in their order."""
    return [Row(kind, name, held.dtype, held.numel()) for (kind, name), held in buffers.items()]


def nbytes_of(rows: Iterable[Row], tensors: Iterable[Shape]) -> int:
    """Bytes of buffers and further tensors as `spread` lays them out."""
    return sum(_padded(shape) for shape in _shapes(rows, tensors))


def spread(memory: torch.Tensor, rows: Sequence[Row], tensors: Sequence[Shape]) -> tuple[Buffers, list[torch.Tensor]]:
    """(buffers, further tensors) as views of `memory`, flat uint8; TransferError if they are not as long as that."""
    if nbytes_of(rows, tensors) != memory.numel():
        raise TransferError(f"a copy of {nbytes_of(rows, tensors)} bytes was announced, and {memory.numel()} came")
    views, at = [], 0
    for dtype, shape in _shapes(rows, tensors):
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(memory[at : at + nbytes].view(dtype).view(shape))
        at += _padded((dtype, shape))
    buffers = {(row.kind, row.name): view for row, view in zip(rows, views, strict=False)}
    return buffers, views[len(rows) :]


def header_of(copy: Copy) -> bytes:
    """What has to be known of a copy besides its bytes."""
    rows = [[row.kind, row.name.place, row.name.index, _name(row.dtype), row.numel] for row in rows_of(copy.buffers)]
    digests = {kind: base64.b64encode(held.tobytes()).decode() for kind, held in copy.digests.items()}
    said = {"said": copy.said, "digests": digests, "said_digest": copy.said_digest}
    return json.dumps({"mark": to_record(copy.mark), "rank": copy.rank, "rows": rows, **said}).encode()


def copy_of(header: bytes, memory: torch.Tensor) -> Copy:
    """The copy that was announced so, over `memory`; TransferError for what no header can say."""
    try:
        found = json.loads(header)
        rows = [_row(*each) for each in found["rows"]]
        buffers, tensors = spread(memory, rows, shapes_of(found["said"]))
        digests = {kind: np.frombuffer(base64.b64decode(held), np.uint64) for kind, held in found["digests"].items()}
        mark, rank = from_record(Mark, found["mark"]), int(found["rank"])
        return Copy(mark, rank, buffers, found["said"], tensors, digests, str(found["said_digest"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError, DynatrainError) as error:
        raise TransferError(f"the header of a copy cannot be read ({type(error).__name__}: {error})") from error


def shapes_of(said: dict[str, Any]) -> list[Shape]:
    """Of the tensors that the encoded rest in `Copy.said` asks for, by their numbers."""
    return [shape for _, shape in sorted(announced(said["rest"]).items())]


def _row(kind: str, place: str, index: int, dtype: str, numel: int) -> Row:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype) or numel < 0:
        raise TransferError(f"a buffer of {numel} elements of {dtype!r} was announced")
    return Row(str(kind), BufferId(str(place), int(index)), found, int(numel))


def _shapes(rows: Iterable[Row], tensors: Iterable[Shape]) -> list[Shape]:
    return [*((row.dtype, (row.numel,)) for row in rows), *tensors]


def _padded(shape: Shape) -> int:
    return -(-math.prod(shape[1]) * shape[0].itemsize // ALIGN) * ALIGN


def _name(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]
