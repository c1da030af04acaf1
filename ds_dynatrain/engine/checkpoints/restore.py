"""Restoration from a checkpoint into living processes: `engine.load`, and `restore` for members whose state is gone.

Both are one transaction (`restoration`), like a switch whose source is the checkpoint. Each member fills new buffers
with its own byte ranges; digests over all members must be those of the checkpoint before anything of the engine is
touched; then the optimizer is put over the new buffers, the carry taken over, and the outcome written once.
`engine.load` keeps the old state until then and goes back to it on failure; `restore` has none to go back to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_dynatrain.adapters.placement import Memory
from ds_dynatrain.adapters.regroup import Regrouping
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.adapters.world import World
from ds_dynatrain.checkpoint import Reader, Saved, folder
from ds_dynatrain.checkpoint.extents import name_of
from ds_dynatrain.checkpoint.files import naming
from ds_dynatrain.checkpoint.others import is_zero_folder
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.checkpoints.asking import ask
from ds_dynatrain.engine.checkpoints.sources import Source, damaged_rows, opened
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Decision, Session
from ds_dynatrain.records import to_record
from ds_dynatrain.report import logger
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.certificate import agreed
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.digests import side_digests, state_digest
from ds_dynatrain.reshard.registration import regrouping_to
from ds_dynatrain.reshard.restoration import Goal, Restoration, Restored, StateSource, let_go
from ds_dynatrain.reshard.swap import Before
from ds_dynatrain.space import WEIGHT, Layout, Pieces, VirtualParameterSpace, row_of


class Part(NamedTuple):
    """Part of a checkpoint that DeepSpeed's `load_checkpoint` is asked for, in its order; by default all of it."""

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
"""All of the state, which `engine.load` asks for."""


@contextmanager
def from_checkpoint(
    engine: EngineCore, goal: Goal, path: Path, present: dict[str, Any] | None, trust_pickle: bool, part: Part
) -> Iterator[StateSource]:
    """Open the checkpoint in a folder; see `sources.opened`. present: the present shared carry, if there is one.

    part: for which `is_read_here` is true. State that it leaves out stays as it is: the schedule, and frozen weights
    that the checkpoint lacks, which are refused otherwise.
    """
    with naming(path):
        source = opened(path, engine, present, trust_pickle)
        with Reader(path, source.manifest, engine.settings.memory_budget_bytes) as reader:
            yield FromCheckpoint(engine, goal, source, reader, present, part)


class FromCheckpoint(StateSource):
    """A checkpoint as a `StateSource`."""

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
    def regrouping(self) -> Regrouping | None:
        saved = self._source.registration
        return None if saved is None else regrouping_to(self._engine, saved)

    @cached_property
    def _vps(self) -> VirtualParameterSpace:
        """Space to fill, once the parameters are registered as in the checkpoint."""
        return self._engine.vps.with_layout(self._goal.layout, self._goal.members)

    def memory(self, memory: Mapping[str, Memory]) -> dict[str, Memory]:
        self._numbers = self._checked_tensors()
        self._check_kept()
        there = [kind for kind in self._source.kinds if row_of(kind).is_moment]
        here = [kind for kind in memory if row_of(kind).is_moment]
        if there and set(there) != set(here):
            raise CheckpointError(
                f"its optimizer keeps {', '.join(sorted(there))}, and this one "
                f"{', '.join(sorted(here)) or 'nothing'}; use the optimizer of the job that saved it"
            )
        self._memory = {
            kind: made_of for kind, made_of in memory.items() if kind in there or not row_of(kind).is_moment
        }
        for row in self._source.manifest:
            made_of = self._memory.get(row.kind)
            if made_of is not None and row.kind != WEIGHT and row.dtype != name_of(made_of.dtype):
                raise CheckpointError(
                    f"{row.kind} of {row.tensor!r} is {row.dtype} there and {name_of(made_of.dtype)} here; give the "
                    "types of the job that saved it (bf16, fp16, data_types)"
                )
        return self._memory

    def _checked_tensors(self) -> dict[int, int]:
        """Map tensor numbers in the checkpoint to numbers here; CheckpointError, naming a tensor, for another model."""
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
        """Copy weights that stay as they are from the engine, which is in this layout; return their pieces."""
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
        try:
            shared = self._source.shared(self._numbers)
            groups, here = len(shared["groups"]), len(self._engine.host.basic_optimizer.param_groups)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointDamaged(
                f"the carry cannot be read ({type(error).__name__}: {error}); load another checkpoint"
            ) from None
        if groups != here:
            raise CheckpointError(
                f"the checkpoint has {groups} optimizer groups, and this job has {here}: build the optimizer with the "
                "groups of the job that saved it"
            )
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
        mine, _ = side_digests(vps, self._goal.layout, rank, buffers, tuple(kinds))
        whole = agreed(session, "digests", vps, self._goal.layout, rank, mine, "loaded")
        there = source.digests(self._reader, rank, places, session.all)
        wrong = []
        for kind in whole:
            for number, tensor in enumerate(vps.tensors):
                rows = source.manifest.rows.get((tensor.name, kind))
                if rows is None or rows[0].dtype != name_of(self._memory[kind].dtype):
                    continue
                if not tensor.trainable and kind != WEIGHT:
                    continue  # it has a master there, from which its weight was cast
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


# ---- the calls -------------------------------------------------------------------------------------------------------


def load(
    engine: EngineCore,
    path: str | os.PathLike[str],
    tag: str | None,
    place: str,
    generation: int,
    is_open: str,
    trust_pickle: bool = False,
    part: Part = ALL,
) -> Restored:
    """Load a checkpoint; see `DynatrainEngine.load`. generation: the number that the load uses up, as a switch does.

    place, is_open: as for `regrouping.register`. part: as for `from_checkpoint`.
    """
    control, members, where = engine.control, engine.members, Path(path).absolute()
    in_the_way = is_open and f"{is_open}: load after engine.step(), with no switch pending"
    ask(Session(control, f"load/{place}", members, "engine.load"), engine, where, tag, in_the_way)
    same = (engine.layout, members, engine.layout, members, None)
    control.decide(f"proposal/{generation}", to_record(Proposal(generation, *same)))  # idle members follow the count
    if engine.world is None:
        raise RuntimeError("an idle member has nothing to load")
    goal = Goal(engine.layout, members, engine.world, f"load/{place}", f"record/{generation}")
    found = _chosen(engine, goal, lambda: _named(where, tag))
    return restored(engine, goal, found, Before.of(engine, has_rest=True), trust_pickle, part)


def restore(
    engine: EngineCore,
    layout: Layout,
    members: tuple[int, ...],
    world: World,
    path: str | os.PathLike[str],
    is_wanted: Callable[[str], bool] = lambda tag: True,
    left_out: list[str] | None = None,
) -> Restored:
    """Restore everything from the newest whole checkpoint in a folder, in a world that was built just now.

    For a failure path. Call it on the main thread of every member in `members`, which has the member at each rank of
    `layout`; open accumulation windows are void, and loaders may be at any position. `world` is this member's, from
    `adapters.worlds.build_world` for (layout, members) and a generation that was never used, connected; it is installed
    here. No state of the members is used: an optimizer that is on comes off, without a message to anybody, and members
    that were idle or have just joined make the same call. Groups of an old world are neither used nor taken down: abort
    them before, drop them after. All members must share `engine.control`.

    Afterwards the engine is in `world` with all state, counters, hyper-parameters, random streams and loaders'
    positions of the checkpoint; `engine.global_steps` has its step. A checkpoint that turns out to be damaged is passed
    over for the next older one, by all members alike. is_wanted: whether a tag is acceptable, asked on rank 0.
    left_out: tags that are known to be damaged; if given, a further damaged checkpoint is added and raises
    CheckpointDamaged on all members alike.

    Raise CheckpointError, on all members alike, if none is whole, none fits the model, or a member does not take part:
    the engine then holds no state and no world (`engine.idle`). Raise MemberMissing if rank 0 does not take part.
    """
    where, known = Path(path).absolute(), list(left_out or ())
    let_go(engine)
    while True:
        key = f"restore/{world.generation}/{len(known)}"
        goal = Goal(layout, members, world, key, f"{key}/record")
        found = _chosen(engine, goal, lambda: _newest(where, known, is_wanted).path)
        try:
            return restored(engine, goal, found)
        except CheckpointDamaged:
            if left_out is not None:
                left_out.append(found.name)
                raise
            known.append(found.name)


def restored(
    engine: EngineCore,
    goal: Goal,
    path: Path,
    old: Before | None = None,
    trust_pickle: bool = False,
    part: Part = ALL,
) -> Restored:
    """Restore everything from one given checkpoint; a damaged one raises CheckpointDamaged.

    old: the state to go back to; without it members have let go of theirs. Raise CheckpointError, on all members alike,
    if it fails: the engine is then as before.
    """
    present = None if old is None else old.shared
    opener = partial(from_checkpoint, engine, goal, path, present, trust_pickle, part)
    restoration = Restoration(engine, goal, opener, str(path), old)
    restoration.run()
    return Restored(path, engine.global_steps, restoration.client_state, restoration.kinds, restoration.digest)


def _named(where: Path, tag: str | None) -> Path:
    """Return the checkpoint of a tag, or the latest; CheckpointError if there is none, of ours or of DeepSpeed's."""
    path = where / (folder.latest(where) if tag is None else tag)
    return path if is_zero_folder(path) and not (path / RECORD).is_file() else Saved.open(path).path


def _newest(where: Path, left_out: list[str], is_wanted: Callable[[str], bool]) -> Saved:
    for saved in folder.newest(where):
        is_whole = not saved.record.converted_from  # a converted one lacks parts of a training
        if saved.path.name not in left_out and is_whole and is_wanted(saved.path.name):
            return saved
    passed = f"; damaged: {', '.join(left_out)}" if left_out else ""
    raise CheckpointError(f"there is no whole checkpoint in {where}{passed}; give a folder that engine.save wrote into")


def _chosen(engine: EngineCore, goal: Goal, find: Callable[[], Path]) -> Path:
    """Return the checkpoint that rank 0 finds; CheckpointError, on all members, if it finds none."""
    session = goal.session(engine.control)
    try:
        return Path(session.first("chosen", lambda: str(find()), "choosing a checkpoint"))
    except CheckpointError as error:
        session.decide(Decision(False, str(error)))
        raise
