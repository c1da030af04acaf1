"""Taking a copy at a boundary while the step waits, and the form of a copy in memory and on its way to a buddy.

All tensors lie end to end, and a JSON header describes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.engine.copies.copy import Copy, copied, digest_of_said, digests_of, frozen_elsewhere
from ds_dynatrain.engine.copies.kept import Room
from ds_dynatrain.errors import DynatrainError, TransferError
from ds_dynatrain.membership.whole import Mark
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.carry import rest_carry, shared_carry
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.encoding import announced, decode, encode
from ds_dynatrain.space import BufferId

ALIGN = 64
"""Alignment in bytes: each tensor starts at a multiple of this number."""
Shape = tuple[torch.dtype, tuple[int, ...]]


def nbytes_of(shapes: Iterable[Shape]) -> int:
    """Return the size in bytes of the memory that `spread` divides into tensors of these types and shapes."""
    return sum(map(_padded, shapes))


def spread(memory: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Return tensors as views of `memory`, a flat uint8 tensor.

    Raises TransferError if the size of the memory is not their total size.
    """
    if nbytes_of(shapes) != memory.numel():
        raise TransferError(f"a copy of {nbytes_of(shapes)} bytes was announced, and {memory.numel()} came")
    views, at = [], 0
    for dtype, shape in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(memory[at : at + nbytes].view(dtype).view(shape))
        at += _padded((dtype, shape))
    return views


def header_of(copy: Copy) -> bytes:
    """Return the header of a copy: JSON with everything except the bytes of its tensors."""
    buffers = [[kind, *name, held] for (kind, name), held in copy.buffers.items()]
    held = encode([buffers, {kind: digests.tobytes() for kind, digests in copy.digests.items()}], [])
    return json.dumps([to_record(copy.mark), copy.rank, held, copy.said, copy.said_digest]).encode()


def copy_of(header: bytes, memory: torch.Tensor) -> Copy:
    """Return the copy that a header describes, with its data in `memory`. Raises TransferError for an unreadable
    header."""
    try:
        mark, rank, held, said, said_digest = json.loads(header)
        views = spread(memory, [*_shapes(held), *_shapes(said["rest"])])
        rows, digests = decode(held, views)
        buffers = {(kind, BufferId(place, index)): view for kind, place, index, view in rows}
        arrays = {kind: np.frombuffer(body, np.uint64) for kind, body in digests.items()}
        tensors = views[len(buffers) :]
        return Copy(from_record(Mark, mark), int(rank), buffers, said, tensors, arrays, str(said_digest))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError, DynatrainError) as error:
        raise TransferError(f"the header of a copy cannot be read ({type(error).__name__}: {error})") from error


def _shapes(encoded: Any) -> list[Shape]:
    """Return the types and shapes of the tensors to which an encoded value refers, in order."""
    return [shape for _, shape in sorted(announced(encoded).items())]


def _padded(shape: Shape) -> int:
    return -(-math.prod(shape[1]) * shape[0].itemsize // ALIGN) * ALIGN


@dataclass(frozen=True, eq=False)
class UndigestedCopy:
    """A copy whose digests are not yet computed, because the thread that sends the copy computes them.

    frozen: the frozen weights of this rank that other ranks also hold.
    memory: the bytes of all its tensors, a flat uint8 tensor.
    copy: a function that computes the digests and returns the complete copy.
    """

    frozen: Buffers
    memory: torch.Tensor
    copy: Callable[[], Copy]


def mark_of(engine: EngineCore, first: Mark | None = None) -> Mark:
    """Return the mark of the current boundary: the point in training of a copy that is taken now.

    first: the mark of the process's first engine, if this is another engine.
    """
    when = engine.generation, engine.segment, len(engine.registered), engine.global_steps
    return Mark(*when, engine.layout, () if first is None else first.moment)


def take(engine: EngineCore, room: Room, mark: Mark | None = None, everything: bool = False) -> UndigestedCopy:
    """Copy the state that only this rank holds into a room (the memory for one copy).

    Parameters that ZeRO stage 3 has gathered stay gathered, because only this rank's partitions are copied.

    mark: the mark of the current boundary; None to compute it from this engine alone.
    everything: whether to copy moments and masters even if other ranks hold them; see `is_copied`.

    Raises ConfigError for extra state or hyper-parameters that cannot be copied.
    """
    state, scalars = engine.host.state_buffers()
    held, tensors = copied(engine.vps, engine.layout, state, everything), list[torch.Tensor]()
    said = {
        "shared": encode(shared_carry(engine, scalars), None),
        "kinds": sorted({kind for kind, _ in state}),
        "seed": engine.job.job_seed,
        "rest": encode(rest_carry(engine), tensors),
        "streams": streams.capture(),
    }
    sources = [*held.values(), *tensors]
    shapes = [(source.dtype, tuple(source.shape)) for source in sources]
    memory = room.fit(nbytes_of(shapes))
    views = spread(memory, shapes)
    for there, here in zip(views, sources, strict=True):
        there.copy_(here.detach())
    buffers, others = dict(zip(held, views, strict=False)), views[len(held) :]
    frozen = frozen_elsewhere(engine.vps, engine.layout, state)
    vps, rank, when = engine.vps, engine.rank, mark or mark_of(engine)

    def copy() -> Copy:
        digests = digests_of(vps, when.layout, rank, buffers)
        return Copy(when, rank, buffers, said, others, digests, digest_of_said(said, others))

    return UndigestedCopy(frozen, memory, copy)
