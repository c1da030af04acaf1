"""A checkpoint as what a state is restored from: each member reads its own byte ranges of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_dynatrain.adapters.placement import Memory
from ds_dynatrain.adapters.regroup import Regrouping
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.checkpoint import Reader
from ds_dynatrain.checkpoint.extents import name_of
from ds_dynatrain.checkpoint.files import naming
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.checkpoints.opening import opened
from ds_dynatrain.engine.checkpoints.restoration import ALWAYS, Goal, Opener, StateSource
from ds_dynatrain.engine.checkpoints.sources import Source, damaged_rows
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.digests import side_digests, state_digest
from ds_dynatrain.engine.transaction.shares import agreed
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.report import logger
from ds_dynatrain.space import WEIGHT, Pieces, VirtualParameterSpace


class Part(NamedTuple):
    """What of a checkpoint DeepSpeed's `load_checkpoint` is asked for, in its order; all of the state by default."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None

    @property
    def is_read_here(self) -> bool:
        """Whether it can be read here: masters and states, with or without the schedule and the frozen weights."""
        return self._replace(load_module_strict=True, load_lr_scheduler_states=True) == Part()


ALL = Part()
"""What `engine.load` asks for."""


def from_checkpoint(path: Path, trust_pickle: bool = False, part: Part = ALL) -> Opener:
    """What opens the checkpoint in a folder; see `opening.opened`.

    part: of what `is_read_here`. What it leaves out stays as it is: frozen weights that it was saved without, which are
    else refused, and the schedule.
    """

    @contextmanager
    def opener(engine: EngineCore, goal: Goal, present: dict[str, Any] | None) -> Iterator[StateSource]:
        with naming(path):
            source = opened(path, engine, present, trust_pickle)
            with Reader(path, source.manifest, engine.settings.memory_budget_bytes) as reader:
                yield FromCheckpoint(engine, goal, source, reader, present, part)

    return opener


class FromCheckpoint:
    """See `StateSource`."""

    def __init__(
        self, engine: EngineCore, goal: Goal, source: Source, reader: Reader, present: dict[str, Any] | None, part: Part
    ) -> None:
        self._engine, self._goal, self._source, self._reader = engine, goal, source, reader
        self._present, self._part = present, part
        self._memory: dict[str, Memory] = {}
        self._numbers: dict[int, int] = {}

    @property
    def kinds(self) -> Sequence[str]:
        return self._source.kinds

    @property
    def client_state(self) -> dict[str, Any]:
        return self._source.client_state

    @property
    def registration(self) -> Regrouping | None:
        return self._source.registration

    @cached_property
    def _vps(self) -> VirtualParameterSpace:
        """The space to fill, once what is trained is what was saved."""
        return self._engine.vps.with_layout(self._goal.layout, self._goal.members)

    def memory(self, memory: Mapping[str, Memory]) -> dict[str, Memory]:
        self._numbers = self._checked_tensors()
        self._check_kept()
        there = [kind for kind in self._source.kinds if kind not in ALWAYS]
        here = [kind for kind in memory if kind not in ALWAYS]
        if there and set(there) != set(here):
            raise CheckpointError(
                f"its optimizer keeps {', '.join(sorted(there))}, and this one "
                f"{', '.join(sorted(here)) or 'nothing'}; use the optimizer of the job that saved it"
            )
        self._memory = {kind: made_of for kind, made_of in memory.items() if kind in ALWAYS or kind in there}
        for row in self._source.manifest:
            made_of = self._memory.get(row.kind)
            if made_of is not None and row.kind != WEIGHT and row.dtype != name_of(made_of.dtype):
                raise CheckpointError(
                    f"{row.kind} of {row.tensor!r} is {row.dtype} there and {name_of(made_of.dtype)} here; give the "
                    "types of the job that saved it (bf16, fp16, data_types)"
                )
        return self._memory

    def _checked_tensors(self) -> dict[int, int]:
        """Number of a tensor there -> its number here; CheckpointError, naming it, for another model."""
        here = {tensor.name: (number, tensor) for number, tensor in enumerate(self._vps.tensors)}
        found = {}
        for number, tensor in enumerate(self._source.tensors):
            mine = here.pop(tensor.name, None)
            if mine is None:
                raise CheckpointError(
                    f"it has {tensor.name!r} {tensor.shape}, and this model has no such parameter; build the model of "
                    "the job that saved it"
                )
            if mine[1] != tensor:
                raise CheckpointError(
                    f"{tensor.name!r} is {tensor.words} in it, and {mine[1].words} in this training; build the model "
                    "of the job that saved it, and give initialize the same trainable parameters in the same optimizer "
                    "groups (requires_grad, model_parameters)"
                )
            found[number] = mine[0]
        if here:
            raise CheckpointError(
                f"this model has {next(iter(here))!r}, which is not in it; build the model of the job that saved it"
            )
        return found

    def _check_kept(self) -> None:
        kept = self._source.kept
        if kept and self._part.load_module_strict:
            raise CheckpointError(
                f"it was saved without {len(kept)} frozen parameters that this model has, such as "
                f"{self._vps.tensors[kept[0]].name!r}; load_checkpoint(..., load_module_strict=False) leaves them as "
                "they are in this model"
            )

    def fill(self, rank: int, buffers: Buffers) -> None:
        self._reader.fill(self._vps, self._goal.layout, rank, buffers, self._keep(rank, buffers))

    def _keep(self, rank: int, buffers: Buffers) -> Pieces | None:
        """Copy what stays as it is from the engine, which is in this layout; the pieces of it."""
        vps, kept = self._vps, np.array(self._source.kept, dtype=np.int64)
        if not len(kept):
            return None
        pieces = vps.holding(self._goal.layout, rank, WEIGHT).restrict(vps.bases[kept], vps.bases[kept + 1])
        present, _ = self._engine.host.state_buffers()
        for number in np.unique(pieces.buffer).tolist():
            key = WEIGHT, pieces.buffers[number]
            buffers[key].copy_(present[key])
        if rank == 0:
            logger.warning(
                "%s was saved without %d frozen parameters, which stay as they are in this model",
                self._source.path,
                len(kept),
            )
        return pieces

    def shared(self) -> dict[str, Any]:
        shared = self._source.shared(self._numbers)
        if self._part.load_lr_scheduler_states or self._present is None:
            return shared
        return {**shared, "scheduler": self._present["scheduler"]}

    def rest(self, rank: int) -> dict[str, Any]:
        return self._source.rest(self._reader, self._goal.layout, rank)

    def streams(self, rank: int) -> streams.Streams:
        return self._source.streams(self._goal.layout, rank)

    def prove(self, rank: int, buffers: Buffers, kinds: Sequence[str]) -> str:
        source, vps, session = self._source, self._vps, self._goal.session(self._engine.control)
        places = len(self._goal.members)
        mine, _ = side_digests(vps, self._goal.layout, rank, buffers, tuple(kinds), set())
        whole = agreed(session, "digests", vps, self._goal.layout, rank, mine, "loaded")
        there = source.digests(self._reader, rank, places, session.all)
        wrong = []
        for kind in whole:
            for number, tensor in enumerate(vps.tensors):
                rows = source.manifest.rows.get((tensor.name, kind))
                if rows is None or rows[0].dtype != name_of(self._memory[kind].dtype):
                    continue
                if not tensor.trainable and kind != WEIGHT:
                    continue  # it has a master there, of which its weight was cast
                if int(whole[kind][number]) != there[tensor.name, kind]:
                    wrong.append((tensor.name, kind))
        if not wrong:
            return state_digest(whole)
        damaged = damaged_rows(source, self._reader, wrong, rank, places)
        found = [each for member in session.all("damaged", damaged).values() for each in member]
        if found:
            raise CheckpointDamaged(f"{found[0]}: not what was saved ({len(found)} such places)")
        name, kind = wrong[0]
        raise CheckpointDamaged(f"{kind} of {name!r} is not what was saved, though each part of it is")
