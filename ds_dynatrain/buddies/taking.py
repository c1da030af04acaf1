"""Taking a copy, at a boundary: what a step waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.buddies.message import nbytes_of, rows_of, shapes_of, spread
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.carry import rest_carry, shared_carry
from ds_dynatrain.engine.checkpoints.extra_state import plain
from ds_dynatrain.engine.copies.copy import Copy, Mark, copied, digest_of_said, digests_of, frozen_elsewhere
from ds_dynatrain.engine.copies.kept import Room
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.encoding import encode
from ds_dynatrain.space import VirtualParameterSpace


@dataclass(frozen=True, eq=False)
class Taken:
    """A copy without its digests, which a thread computes.

    frozen: see `Kept`. memory: all its tensors, flat uint8.
    """

    vps: VirtualParameterSpace
    mark: Mark
    rank: int
    frozen: Buffers
    buffers: Buffers
    said: dict[str, Any]
    tensors: list[torch.Tensor]
    memory: torch.Tensor

    def copy(self) -> Copy:
        """Return the copy with its digests."""
        digests = digests_of(self.vps, self.mark.layout, self.rank, self.buffers)
        said_digest = digest_of_said(self.said, self.tensors)
        return Copy(self.mark, self.rank, self.buffers, self.said, self.tensors, digests, said_digest)


def mark_of(engine: EngineCore, first: Mark | None = None) -> Mark:
    """Return the present moment, between two global batches. first: that of the process's first engine, if another."""
    when = engine.generation, engine.segment, len(engine.registered), engine.global_steps
    return Mark(*when, engine.layout, () if first is None else first.moment)


def take(engine: EngineCore, room: Room, mark: Mark | None = None, everything: bool = False) -> Taken:
    """Copy what this rank holds alone into a room. Parameters that stage 3 has gathered stay so: parts are the state.

    mark: the present moment, if not that of this engine alone. everything: see `is_copied`.

    ConfigError, CheckpointError for carried objects or hyper-parameters that cannot be copied.
    """
    state, scalars = engine.host.state_buffers()
    held, tensors = copied(engine.vps, engine.layout, state, everything), list[torch.Tensor]()
    said = {
        "shared": plain(shared_carry(engine, scalars)),
        "kinds": sorted({kind for kind, _ in state}),
        "seed": engine.job.job_seed,
        "rest": encode(rest_carry(engine), tensors),
        "streams": streams.capture(),
    }
    rows, shapes = rows_of(held), shapes_of(said)
    memory = room.fit(nbytes_of(rows, shapes))
    buffers, others = spread(memory, rows, shapes)
    for there, here in zip([*buffers.values(), *others], [*held.values(), *tensors], strict=True):
        there.copy_(here.detach())
    frozen = frozen_elsewhere(engine.vps, engine.layout, state)
    return Taken(engine.vps, mark or mark_of(engine), engine.rank, frozen, buffers, said, others, memory)
