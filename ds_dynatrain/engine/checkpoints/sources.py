"""Checkpoints as sources from which to restore a state: the common base class, and checkpoints in our format.

A checkpoint consists of a manifest, whose rows say where each element is stored, and extra state outside the tensors.
Checkpoints of other tools are in `other_tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_dynatrain.adapters.zero.regroup import Regrouping
from ds_dynatrain.adapters.zero.state import Buffers, Memory
from ds_dynatrain.checkpoint.extents import name_of
from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.engine.checkpoints.extra_state import rest_for, shared_of, streams_for
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.report import logger
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.certificate import agreed, side_digests, state_digest
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.registration import regrouping_to
from ds_dynatrain.reshard.restoration import Goal, StateSource
from ds_dynatrain.space import WEIGHT, LogicalTensor, Pieces, VirtualParameterSpace, row_of

Key = tuple[str, str]
"""A tensor's name and state kind."""
Gather = Callable[[str, Any], Mapping[int, Any]]
"""Function that posts a record under a name and returns the records of all members."""


class CheckpointPart(NamedTuple):
    """The part of a checkpoint to load, as given by the arguments of DeepSpeed's `load_checkpoint`; by default the
    whole checkpoint.

    trust_pickle: whether to unpickle DeepSpeed's files even if they contain more than tensors and plain values.
    """

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None
    trust_pickle: bool = False

    @property
    def is_read_here(self) -> bool:
        """Whether our code, instead of DeepSpeed's, can read this part: it must be the whole state, except that the
        schedule and missing frozen weights may be left out."""
        return self.load_optimizer_states and not (self.load_module_only or self.custom_load_fn)


ALL = CheckpointPart()
"""The whole checkpoint, which is the part that `engine.load` requests."""


class FromCheckpoint(StateSource):
    """A checkpoint in a folder, as a source from which to restore a state.

    present: the current extra state that is equal on all ranks; empty if there is none.
    part: the part of the checkpoint to load, which our code can read (`is_read_here`).
    tensors: the tensors that the checkpoint has.
    kept: the numbers of the frozen tensors that the checkpoint does not contain. Their weights in the engine are kept;
        unless `part` permits it, this is an error.
    registration: the trained parameters and optimizer groups of the checkpoint; None if it does not record them.
    """

    kinds: Sequence[str] = ()
    tensors: tuple[LogicalTensor, ...] = ()
    kept: tuple[int, ...] = ()
    registration: Regrouping | None = None

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        engine: EngineCore,
        goal: Goal,
        present: dict[str, Any] | None,
        part: CheckpointPart,
    ) -> None:
        self.path, self.manifest, self.engine, self.goal = path, manifest, engine, goal
        self.present, self._part = present or {}, part
        self.reader = Reader(path, manifest, engine.settings.memory_budget_bytes)
        self._memory: dict[str, Memory] = {}
        self._numbers: dict[int, int] = {}

    def __exit__(self, *_: object) -> None:
        """Close the open files of the checkpoint."""
        self.reader.__exit__()

    @property
    def regrouping(self) -> Regrouping | None:
        return None if self.registration is None else regrouping_to(self.engine, self.registration)

    @cached_property
    def _vps(self) -> VirtualParameterSpace:
        """Parameter space (all logical tensors) to fill. Used once the engine has the trained parameters and groups of
        the checkpoint."""
        return self.engine.vps.with_layout(self.goal.layout, self.goal.members)

    def memory(self, memory: Mapping[str, Memory]) -> dict[str, Memory]:
        self._numbers = self._checked_tensors()
        if self.kept and self._part.load_module_strict:
            raise CheckpointError(
                f"it was saved without {len(self.kept)} frozen parameters that this model has, such as "
                f"{self._vps.tensors[self.kept[0]].name!r}; load_checkpoint(..., load_module_strict=False) leaves them "
                "as they are in this model"
            )
        there = [kind for kind in self.kinds if row_of(kind).is_moment]
        here = [kind for kind in memory if row_of(kind).is_moment]
        if there and set(there) != set(here):
            raise CheckpointError(
                f"its optimizer keeps {', '.join(sorted(there))}, and this one "
                f"{', '.join(sorted(here)) or 'nothing'}; use the optimizer of the job that saved it"
            )
        self._memory = {
            kind: made_of for kind, made_of in memory.items() if kind in there or not row_of(kind).is_moment
        }
        for row in self.manifest:
            made_of = self._memory.get(row.kind)
            if made_of is not None and row.kind != WEIGHT and row.dtype != name_of(made_of.dtype):
                raise CheckpointError(
                    f"{row.kind} of {row.tensor!r} is {row.dtype} there and {name_of(made_of.dtype)} here; give the "
                    "types of the job that saved it (bf16, fp16, data_types)"
                )
        return self._memory

    def _checked_tensors(self) -> dict[int, int]:
        """Check that the checkpoint has the tensors of this model; return a map from each tensor's number in the
        checkpoint to its number in this model.

        Raises CheckpointError if the models differ. The error names a tensor.
        """
        here = {tensor.name: (number, tensor) for number, tensor in enumerate(self._vps.tensors)}
        found = {}
        for number, tensor in enumerate(self.tensors):
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

    def fill(self, rank: int, buffers: Buffers) -> None:
        self.reader.fill(self._vps, self.goal.layout, rank, buffers, self._keep(rank, buffers))

    def _keep(self, rank: int, buffers: Buffers) -> Pieces | None:
        """Copy those frozen weights from the engine that the checkpoint lacks; return the ranges of elements that they
        fill, None if it lacks none.

        The engine is already in the layout into which the checkpoint is loaded.
        """
        vps, kept = self._vps, np.array(self.kept, dtype=np.int64)
        if not len(kept):
            return None
        pieces = vps.holding(self.goal.layout, rank, WEIGHT).restrict(vps.bases[kept], vps.bases[kept + 1])
        present, _ = self.engine.host.state_buffers()
        for number in np.unique(pieces.buffer).tolist():
            key = WEIGHT, pieces.buffers[number]
            buffers[key].copy_(present[key])
        if rank == 0:
            logger.warning(
                "%s was saved without %d frozen parameters, which stay as they are in this model",
                self.path,
                len(kept),
            )
        return pieces

    def shared(self) -> dict[str, Any]:
        try:
            shared = self._shared()
            groups, here = len(shared["groups"]), len(self.engine.host.basic_optimizer.param_groups)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointDamaged(
                f"the carry cannot be read ({type(error).__name__}: {error}); load another checkpoint"
            ) from None
        if groups != here:
            raise CheckpointError(
                f"the checkpoint has {groups} optimizer groups, and this job has {here}: build the optimizer with the "
                "groups of the job that saved it"
            )
        if self._part.load_lr_scheduler_states or not self.present:
            return shared
        return {**shared, "scheduler": self.present["scheduler"]}

    def _shared(self) -> dict[str, Any]:
        """Return the extra state that is equal on all ranks, with tensors numbered as in this model."""
        raise NotImplementedError

    def _digests(self, rank: int, gather: Gather) -> dict[Key, int]:
        """Return the digests of the whole tensors in the checkpoint, in the dtypes in which they are stored.

        rank: this member's rank among the members that load the checkpoint, which divide the reading among themselves.
        gather: combines the results of all these members.
        """
        raise NotImplementedError

    def _damaged(self, keys: list[Key], rank: int) -> list[str]:
        """Return descriptions of damaged parts of tensors in the checkpoint's files. Each member checks some of the
        parts.

        keys: the tensors to check.
        """
        return []

    def prove(self, rank: int, buffers: Buffers, kinds: Sequence[str]) -> str:
        vps, session = self._vps, self.goal.session(self.engine.control)
        mine, _ = side_digests(vps, self.goal.layout, rank, buffers, tuple(kinds))
        whole = agreed(session, "digests", vps, self.goal.layout, rank, mine, "loaded")
        there = self._digests(rank, session.all)
        wrong = []
        for kind in whole:
            for number, tensor in enumerate(vps.tensors):
                rows = self.manifest.rows.get((tensor.name, kind))
                if rows is None or rows[0].dtype != name_of(self._memory[kind].dtype):
                    continue
                if not tensor.trainable and kind != WEIGHT:
                    continue  # trained in the checkpoint, and frozen here
                if int(whole[kind][number]) != there[tensor.name, kind]:
                    wrong.append((tensor.name, kind))
        if not wrong:
            return state_digest(whole)
        damaged = session.all("damaged", self._damaged(wrong, rank))
        found = [each for member in damaged.values() for each in member]
        if found:
            raise CheckpointDamaged(f"{found[0]}: not what was saved ({len(found)} such places)")
        name, kind = wrong[0]
        raise CheckpointDamaged(f"{kind} of {name!r} is not what was saved, though each part of it is")


class Universal(FromCheckpoint):
    """A checkpoint in our format, as a source from which to restore a state.

    carry: the saved extra state that is equal on all ranks.
    """

    def __init__(
        self, saved: Saved, engine: EngineCore, goal: Goal, present: dict[str, Any] | None, part: CheckpointPart
    ) -> None:
        super().__init__(saved.path, saved.manifest, engine, goal, present, part)
        self.saved, self.kinds, self.tensors = saved, saved.record.kinds, saved.record.logical_tensors()
        self.carry = shared_of(saved)
        said = self.carry.get("registration")  # None in a checkpoint of an old version
        self.registration = None if said is None else Regrouping.from_json(said)

    def _shared(self) -> dict[str, Any]:
        scalars = {
            name: {str(self._numbers[int(number)]): value for number, value in table.items()}
            for name, table in self.carry["scalars"].items()
        }
        return {**self.carry, "scalars": scalars}

    def rest(self, rank: int) -> dict[str, Any]:
        return rest_for(self.saved, self.reader, self.goal.layout, rank)

    def streams(self, rank: int) -> streams.Streams:
        return streams_for(self.saved, self.goal.layout, rank)

    def _digests(self, rank: int, gather: Gather) -> dict[Key, int]:
        return {key: self.manifest.digest(*key) for key in self.manifest.rows if key[1] in self.kinds}

    def _damaged(self, keys: list[Key], rank: int) -> list[str]:
        stored = [row for key in keys for row in self.manifest.rows[key] if row.file]
        return [str(row) for row in stored[rank :: len(self.goal.members)] if not self.reader.is_sound(row)]
