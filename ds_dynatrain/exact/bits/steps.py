"""The bitwise record of each step of an exact job: losses, the gradient norm, and digests of weights and moments.

Each rank has the losses of its own leaves (micro-batches of fixed size) and parts of the state. It puts them into one
vector of integers, whose sum over all ranks does not depend on which rank holds what. A loss enters as the bits of its
fp64 number, which no other rank contributes. A tensor's digest enters as the digest of the rank's parts. If several
ranks or stages hold a whole weight, only one of them counts. To reveal a copy that differs, a second sum over all
copies is added, which is 0 if they are equal (`reshard.certificate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as td

from ds_dynatrain.exact.bits.bit_records import ExactJob, ExactStep
from ds_dynatrain.report import EventWriter
from ds_dynatrain.reshard.certificate import PARTS, Digests, shares, side_digests
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import row_of

Int64s = npt.NDArray[np.int64]


class ExactSteps:
    """The recorded steps of one engine.

    step: the latest optimizer step with a digest of its state; None before the first.
    digest: the digest of that whole step, in hexadecimal digits, equal in every layout; None before the first.
    """

    def __init__(self, engine: EngineCore, every_steps: int) -> None:
        self._engine, self._every = engine, every_steps
        self.step: int | None = None
        self.digest: str | None = None
        self._losses: dict[int, torch.Tensor] = {}
        self._trained: tuple[tuple[str, int], int, dict[int, torch.Tensor]] | None = None
        """The last global batch trained: its segment and step, its number of leaves, and the losses of this rank's
        leaves."""
        self._said: tuple[ExactJob, int] | None = None
        """The job and the step of the last line that this process wrote to the report file."""

    def note_loss(self, loss: Any) -> None:
        """Record the loss of the micro-batch that this rank trains.

        A later loss of the same micro-batch replaces it.
        """
        host = self._engine.host
        is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
        if host.micro_step is None or host.slot_is_borrowed or not is_loss:
            return
        leaf = host.micro_step.own()[self._engine.place("data")]
        self._losses[leaf] = _kept(loss)

    def note_losses(self, losses: Sequence[torch.Tensor]) -> None:
        """Record the losses of all micro-batches of a pipeline, in order. Called on the pipeline's last stage."""
        step = self._engine.host.micro_step
        if step is not None:
            mine = range(self._engine.place("data"), step.leaves, step.data)
            self._losses = {leaf: _kept(loss) for leaf, loss in zip(mine, losses, strict=False)}  # others are borrowed

    def forget_batch(self) -> None:
        """Discard the losses of a global batch whose optimizer step has not been taken."""
        self._losses = {}

    def close_batch(self) -> None:
        """Keep the losses of the global batch that the optimizer has just used."""
        step = self._engine.host.micro_step
        if step is not None:
            self._trained = self._place, step.leaves, self._losses

    def finish_step(self) -> None:
        """Reduce the record of the step over all ranks, and write the record.

        All ranks call this after each step that ended a global batch.
        """
        batch, self._trained = self._trained, None
        if batch is None or batch[0] != self._place:  # the world ended before the step was recorded
            return
        engine, (_, leaves, losses) = self._engine, batch
        bits = np.zeros((leaves, 2), np.uint64)  # whether this rank has a leaf's loss, and the bits of that loss
        for leaf, loss in losses.items():
            bits[leaf] = 1, loss.cpu().numpy().reshape(1).view(np.uint64)[0]
        own = self._own_digests() if engine.global_steps % self._every == 0 else {}
        mine = np.concatenate([bits.reshape(-1), *own.values()])
        if engine.world is not None and engine.layout.world_size > 1:
            td.all_reduce(torch.from_numpy(mine.view(np.int64)), group=engine.world.default)  # in place, modulo 2^64
        known, values = mine[: 2 * leaves : 2].tolist(), mine[1 : 2 * leaves : 2].copy().view(np.float64).tolist()
        state = np.split(mine[2 * leaves :], len(own)) if own else []
        norm = engine.deepspeed.get_global_grad_norm()
        self._tell(
            ExactStep(
                engine.global_steps,
                None if norm is None else float(norm),
                tuple(value if is_there else None for is_there, value in zip(known, values, strict=True)),
                {kind: digests.tobytes() for kind, digests in zip(own, state, strict=True)},
            )
        )

    @property
    def _place(self) -> tuple[str, int]:
        return self._engine.segment, self._engine.global_steps

    def _own_digests(self) -> dict[str, Digests]:
        """Return this rank's part of the digests of each state kind, with tensors ordered by name."""
        engine = self._engine
        vps, layout, rank = engine.vps, engine.layout, engine.rank
        buffers = engine.host.state_buffers()[0]
        held = tuple(sorted({kind for kind, _ in buffers if not row_of(kind).is_gradient}))
        side, _ = side_digests(vps, layout, rank, buffers, held)
        mine = shares(vps, layout, engine.members, rank, side)
        found = {kind: np.zeros(len(vps.tensors), np.uint64) for kind in _kinds(engine)}
        for part in PARTS:
            for kind, digests in mine[part].items():
                found[kind] += digests
        order = _by_name(engine)
        return {kind: digests[order] for kind, digests in found.items()}

    def _tell(self, made: ExactStep) -> None:
        if made.state:
            self.step, self.digest = made.step, made.digest
        path = self._engine.settings.report.jsonl
        if path is None or self._engine.rank != 0:
            return
        writer, job = EventWriter(Path(path)), self._job()
        if self._said != (job, made.step - 1):
            writer.write_line(job.to_json())
        writer.write_line(made.to_json())
        self._said = job, made.step

    def _job(self) -> ExactJob:
        engine, sizes = self._engine, self._engine.job.batch_sizes
        tensors = [engine.vps.tensors[number] for number in _by_name(engine).tolist()]
        return ExactJob(
            engine.stream_seed,
            sizes.train_batch_size,
            sizes.micro_batch_size,
            _kinds(engine),
            tuple((tensor.name, tuple(tensor.shape)) for tensor in tensors),
        )


def _kept(loss: torch.Tensor) -> torch.Tensor:
    return loss.detach().to(torch.float64, copy=True)


def _kinds(engine: EngineCore) -> tuple[str, ...]:
    return tuple(sorted(kind for kind in engine.vps.present_kinds() if not row_of(kind).is_gradient))


def _by_name(engine: EngineCore) -> Int64s:
    """Return the numbers of the tensors ordered by name, an order that does not depend on optimizer groups."""
    names = [tensor.name for tensor in engine.vps.tensors]
    return np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
