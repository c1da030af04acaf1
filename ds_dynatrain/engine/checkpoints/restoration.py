"""A restoration from a checkpoint on one member: new buffers, their proofs, the engine over them, one outcome."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.memory import provide, release, zeros
from ds_dynatrain.adapters.placement import Memory
from ds_dynatrain.adapters.state import Buffers, Scalars
from ds_dynatrain.adapters.worlds import World, install
from ds_dynatrain.checkpoint import Reader
from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.engine import feasible, streams
from ds_dynatrain.engine.carry import rest_carry, scalars_of, shared_carry, take_over
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.checkpoints.opening import opened
from ds_dynatrain.engine.checkpoints.sources import Source, damaged_rows
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.digests import side_digests, state_digest
from ds_dynatrain.engine.encoding import fingerprint
from ds_dynatrain.engine.targets import needs
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.engine.transaction.shares import agreed
from ds_dynatrain.engine.transaction.swap import Swap
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, OutcomeUnknown
from ds_dynatrain.space import HOST_GRAD, MASTER, STALE_GRAD, WEIGHT, Layout, VirtualParameterSpace

ALWAYS = (WEIGHT, MASTER, STALE_GRAD, HOST_GRAD)
"""State kinds that a layout has or has not; the others, moments, begin with the first step."""
SAME = ("counters", "windows", "epoch", "groups", "scalars", "scaling", "scheduler")
"""Parts of the carry that must be as they were saved once they are taken over."""


@dataclass(frozen=True)
class Restored:
    """What training goes on from. path: of the checkpoint. step: optimizer steps done there.

    client_state: what was given to DeepSpeed's `save_checkpoint`, and what that adds; empty for a checkpoint of ours.
    kinds: that were saved. digest: of the whole state, as in a switch's certificate.
    """

    path: Path
    step: int
    client_state: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class Goal:
    """Where to restore to, and where on the board that is spoken of.

    record: the key of the outcome. enter: how an engine without state becomes part of the world, if not as after a
    failure.
    """

    layout: Layout
    members: tuple[int, ...]
    world: World
    key: str
    record: str
    enter: Callable[[], None] | None = None

    def session(self, board: Control) -> Session:
        """What its members do together."""
        return Session(board, self.key, self.members, "loading a checkpoint", record=self.record, is_patient=True)


@dataclass
class Old:
    """What a load goes back to if it fails."""

    buffers: Buffers
    scalars: Scalars
    shared: dict[str, Any]
    rest: dict[str, Any]
    streams: streams.Streams
    config: tuple[dict[str, Any], Any]

    @staticmethod
    def of(engine: EngineCore) -> Old:
        engine.host.settle_parameters()
        buffers, scalars = engine.host.state_buffers()
        shared, rest = shared_carry(engine, scalars), copy.deepcopy(rest_carry(engine))
        return Old(buffers, scalars, shared, rest, streams.capture(), engine.host.present_config)


class Restoration:
    """The transaction on one member."""

    def __init__(self, engine: EngineCore, goal: Goal, path: Path, old: Old | None, trust_pickle: bool = False) -> None:
        self.engine, self.goal, self.path, self.old = engine, goal, path, old
        self.trust_pickle = trust_pickle
        self.control = engine.control
        self.session = goal.session(engine.control)
        self.client_state: dict[str, Any] = {}
        self.rank = goal.members.index(engine.control.member)
        self.vps: VirtualParameterSpace = engine.vps.with_layout(goal.layout, goal.members)
        self.buffers: Buffers = {}
        self.shared: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.streams: streams.Streams = {}
        self.memory: dict[str, Memory] = {}
        self.kinds: tuple[str, ...] = ()
        self.digest = ""
        self.swap = Swap(engine)

    def run(self) -> Restored:
        """Everything or nothing, on all members alike."""
        try:
            decision = self.session.vote(self._carry_out)
        except OutcomeUnknown:
            self._undo()
            if self.old is None:  # it holds nothing that could be wrong: a next generation can restore
                self.control.lost = None
            raise
        if decision.commit:
            self._commit()
            return Restored(self.path, self.engine.global_steps, self.client_state, self.kinds, self.digest)
        self._undo()
        decision.raise_interrupt()
        what = "" if self.old is None else "engine.load: "
        end = "" if self.old is None else "; training goes on as before it"
        raise decision.checkpoint_error(f"{what}{self.path}: {decision.reason}{end}")

    def _carry_out(self) -> None:
        present = None if self.old is None else self.old.shared
        source = opened(self.path, self.engine, present, self.trust_pickle)
        with Reader(self.path, source.manifest, self.engine.settings.memory_budget_bytes) as reader:
            self._read(source, reader)
            self._verify_tensors(source, reader)
        self.client_state = source.client_state
        self._swap()
        self._verify_carry()

    # ---- new buffers -------------------------------------------------------------------------------------------------

    def _read(self, source: Source, reader: Reader) -> None:
        """Fill new buffers, and get ready what else there is; nothing of the engine is touched."""
        engine, layout, vps = self.engine, self.goal.layout, self.vps
        numbers = self._numbers(source)
        self.memory = self._memory(source)
        local = vps.local(layout, self.rank)
        if self.old is not None:
            room = needs(engine, layout, self.goal.members)
            feasible.check_memory(self.control.member, room, engine.candidates.nodes)
        self.buffers = provide(local, self.memory, set(), {}, zeros)
        reader.fill(vps, layout, self.rank, self.buffers)
        try:
            self.shared = source.shared(numbers)
            if len(self.shared["groups"]) != len(engine.host.basic_optimizer.param_groups):
                raise CheckpointError(
                    f"it has {len(self.shared['groups'])} optimizer groups, and there are "
                    f"{len(engine.host.basic_optimizer.param_groups)} here"
                )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointDamaged(f"the carry cannot be read ({type(error).__name__}: {error})") from None
        self.rest = source.rest(reader, layout, self.rank)
        self.streams = source.streams(layout, self.rank)

    def _numbers(self, source: Source) -> dict[int, int]:
        """Number of a tensor there -> its number here; CheckpointError, naming it, for another model."""
        here = {tensor.name: (number, tensor) for number, tensor in enumerate(self.vps.tensors)}
        found = {}
        for number, tensor in enumerate(source.tensors):
            mine = here.pop(tensor.name, None)
            if mine is None:
                raise CheckpointError(f"it has {tensor.name!r} {tensor.shape}, and this model has no such parameter")
            if mine[1] != tensor:
                raise CheckpointError(
                    f"it has {tensor}, and this training has {mine[1]}: build the same model and groups"
                )
            found[number] = mine[0]
        if here:
            raise CheckpointError(f"this model has {next(iter(here))!r}, which is not in it")
        return found

    def _memory(self, source: Source) -> dict[str, Memory]:
        """What the kinds that there will be are made of; CheckpointError for those of another optimizer."""
        memory = self.engine.memory_in(self.goal.layout)
        there = [kind for kind in source.kinds if kind not in ALWAYS]
        here = [kind for kind in memory if kind not in ALWAYS]
        if there and set(there) != set(here):
            raise CheckpointError(
                f"its optimizer keeps {', '.join(sorted(there))}, and this one {', '.join(sorted(here)) or 'nothing'}: "
                "use the same optimizer"
            )
        memory = {kind: made_of for kind, made_of in memory.items() if kind in ALWAYS or kind in there}
        for row in source.manifest:
            if row.kind in memory and row.kind != WEIGHT and row.dtype != name_of(memory[row.kind].dtype):
                raise CheckpointError(f"{row.kind} is {row.dtype} there and {name_of(memory[row.kind].dtype)} here")
        return memory

    # ---- proofs ------------------------------------------------------------------------------------------------------

    def _verify_tensors(self, source: Source, reader: Reader) -> None:
        """CheckpointDamaged, naming tensor, kind and place, unless all members together have what was saved."""
        layout, members = self.goal.layout, self.goal.members
        kinds = tuple(kind for kind in self.memory if kind in source.kinds)
        mine, _ = side_digests(self.vps, layout, self.rank, self.buffers, kinds, set())
        whole = agreed(self.session, "digests", self.vps, layout, self.rank, mine, "loaded")
        there, place = source.digests(reader, self.rank, len(members), self.session.all), self.rank
        wrong = []
        for kind in whole:
            for number, tensor in enumerate(self.vps.tensors):
                rows = source.manifest.rows.get((tensor.name, kind))
                if rows is None or rows[0].dtype != name_of(self.memory[kind].dtype):
                    continue
                if not tensor.trainable and kind != WEIGHT:
                    continue  # it has a master there, of which its weight was cast
                if int(whole[kind][number]) != there[tensor.name, kind]:
                    wrong.append((tensor.name, kind))
        if not wrong:
            self.kinds, self.digest = tuple(source.kinds), state_digest(whole)
            return
        damaged = damaged_rows(source, reader, wrong, place, len(members))
        found = [each for member in self.session.all("damaged", damaged).values() for each in member]
        if found:
            raise CheckpointDamaged(f"{found[0]}: not what was saved ({len(found)} such places)")
        name, kind = wrong[0]
        raise CheckpointDamaged(f"{kind} of {name!r} is not what was saved, though each part of it is")

    def _verify_carry(self) -> None:
        """CensusError or CheckpointError unless the rebuilt engine has what was put in, alike on all members."""
        engine = self.engine
        held, scalars = engine.host.state_buffers()
        check_census(engine.host, self.vps, self.rank, held, "after loading")
        shared = shared_carry(engine, scalars)
        lost = [part for part in SAME if fingerprint(shared[part]) != fingerprint(self.shared[part])]
        if lost:
            raise CheckpointError(f"{', '.join(lost)}: not as saved once taken over")
        if streams.capture() != self.streams:
            raise CheckpointError("the random streams are not those that were put in")
        prints = self.session.reduce("taken", [[self.control.member, fingerprint(shared)]], _two_that_differ)
        if len(prints) > 1:
            raise CheckpointError(f"the carry of member {prints[1][0]} is not that of member {prints[0][0]}")

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _swap(self) -> None:
        engine, goal = self.engine, self.goal
        if self.old is None:
            self.swap.on_undo(engine.host.leave_world)
            install(goal.world)
        else:
            self.swap.off(partial(self._back, self.old))
        self.swap.over(self.vps, goal.layout, goal.world, self.rank, self.buffers, scalars_of(self.shared))
        self._take(self.shared, self.rest, self.streams)

    def _take(self, shared: dict[str, Any], rest: dict[str, Any], own: streams.Streams) -> None:
        """The carry; what is for a loader or an object that is not there yet waits for it."""
        engine = self.engine
        engine.keep_arrived({**shared["loaders"]}, {**rest["objects"]})
        objects = {name: state for name, state in rest["objects"].items() if name in engine.carried}
        take_over(engine, shared, {**rest, "objects": objects})
        streams.restore(own)

    def _commit(self) -> None:
        engine = self.engine
        self.swap.keep()
        if self.goal.enter is not None:
            self.goal.enter()
        elif self.old is None:
            goal = self.goal
            engine.world, engine.layout, engine.members = goal.world, goal.layout, goal.members
            engine.begin_anew(goal.world.generation)
        else:
            self.control.track_teardown(release(self.old.buffers))
        engine.host.forget_steps()
        if engine.host.compilations.count:
            engine.host.compilations.forget()

    def _back(self, old: Old) -> None:
        """The old optimizer over the old memory."""
        self.engine.host.attach(self.goal.layout, self.goal.world, old.config, old.buffers, old.scalars)
        self._take(old.shared, old.rest, old.streams)

    def _undo(self) -> None:
        """As if nobody had asked, or, without an old state, as an idle member."""
        self.swap.undo()
        self.buffers = {}


def _two_that_differ(one: list[list[Any]], other: list[list[Any]]) -> list[list[Any]]:
    """Of members and what they have, the first one and one that has something else."""
    first, *rest = one
    return [first, *[each for each in (*rest, *other) if each[1] != first[1]][:1]]
