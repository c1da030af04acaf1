"""A restoration on one member: new buffers, their proofs, the engine over them, one outcome.

Where the state comes from is a `StateSource`: a checkpoint (`from_checkpoint`), or copies that members keep of each
other (`copies.from_copies`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ds_dynatrain.adapters.memory import provide, release, zeros
from ds_dynatrain.adapters.placement import Memory
from ds_dynatrain.adapters.regroup import Regrouping
from ds_dynatrain.adapters.state import Buffers, Scalars
from ds_dynatrain.adapters.world import World
from ds_dynatrain.adapters.worlds import install
from ds_dynatrain.elastic.main_thread import OWN_WAITS
from ds_dynatrain.engine import feasible, streams
from ds_dynatrain.engine.carry import rest_carry, scalars_of, shared_carry, take_over
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.encoding import fingerprint
from ds_dynatrain.engine.registration import Adoption, note, regrouping_to
from ds_dynatrain.engine.targets import needs
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.engine.transaction.swap import Swap
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, OutcomeUnknown
from ds_dynatrain.space import Layout, VirtualParameterSpace

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


class StateSource(Protocol):
    """What has a whole state, as one member of a goal reads it.

    kinds: state kinds in it. client_state: see `Restored`. After `registration`, which the engine then follows,
    `memory` is asked first, `prove` last.
    """

    @property
    def kinds(self) -> Sequence[str]: ...
    @property
    def client_state(self) -> dict[str, Any]: ...
    @property
    def registration(self) -> Regrouping | None:
        """What was trained in which groups, where it says so; None: what is trained now."""
        ...

    def memory(self, memory: Mapping[str, Memory]) -> dict[str, Memory]:
        """Of what the kinds are made that there will be; CheckpointError if it is of another model or optimizer."""
        ...

    def fill(self, rank: int, buffers: Buffers) -> None:
        """Put everything into the buffers of a rank."""
        ...

    def shared(self) -> dict[str, Any]:
        """The shared carry."""
        ...

    def rest(self, rank: int) -> dict[str, Any]:
        """The rest of a rank's carry."""
        ...

    def streams(self, rank: int) -> streams.Streams:
        """A rank's random streams."""
        ...

    def prove(self, rank: int, buffers: Buffers, kinds: Sequence[str]) -> str:
        """One digest over the whole state, once all members together hold what is in the source.

        kinds: that there are buffers of. CheckpointDamaged, naming tensor and kind, if they do not.
        """
        ...


Opener = Callable[[EngineCore, Goal, dict[str, Any] | None], AbstractContextManager[StateSource]]
"""Opens a source for a goal; given, too, the shared carry of now, if there is one."""


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
    """The transaction on one member. where: what it is restored from, in words.

    kinds, digest, client_state: as in `Restored`, once it has run.
    """

    def __init__(self, engine: EngineCore, goal: Goal, opener: Opener, where: str, old: Old | None) -> None:
        self.engine, self.goal, self.where, self.old = engine, goal, where, old
        self._opener = opener
        self.control = engine.control
        self.session = goal.session(engine.control)
        self.client_state: dict[str, Any] = {}
        self.rank = goal.members.index(engine.control.member)
        self.vps: VirtualParameterSpace = engine.vps.with_layout(goal.layout, goal.members)
        self.registered: Regrouping | None = None
        self.buffers: Buffers = {}
        self.shared: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.streams: streams.Streams = {}
        self.memory: dict[str, Memory] = {}
        self.kinds: tuple[str, ...] = ()
        self.digest = ""
        self.swap = Swap(engine)

    def run(self) -> None:
        """Everything or nothing, on all members alike; CheckpointError says why nothing."""
        try:
            decision = self.session.vote(self._carry_out)
        except OutcomeUnknown:
            self._undo()
            if self.old is None:  # it holds nothing that could be wrong: a next generation can restore
                self.control.lost = None
            raise
        if decision.commit:
            self._commit()
            return
        self._undo()
        decision.raise_interrupt()
        what = "" if self.old is None else "engine.load: "
        end = "" if self.old is None else "; training goes on as before it"
        where = "" if self.where in decision.reason else f"{self.where}: "
        raise decision.checkpoint_error(f"{what}{where}{decision.reason}{end}")

    def _carry_out(self) -> None:
        present = None if self.old is None else self.old.shared
        what = f"{'restoring' if self.old is None else 'loading'} {self.where}"
        with OWN_WAITS.waiting(what), self._opener(self.engine, self.goal, present) as source:
            self._register(source)
            self._read(source)
            self._verify_tensors(source)
            self.client_state = source.client_state
        self._swap()
        self._verify_carry()

    def _register(self, source: StateSource) -> None:
        """Train what was trained when it was saved, in the same groups; then the optimizer is off."""
        engine, saved = self.engine, source.registration
        self.registered = None if saved is None else regrouping_to(engine, saved)
        if self.registered is None:
            return
        self._off()
        adoption = Adoption(engine, self.registered)
        self.swap.on_undo(adoption.undo)
        adoption.make()
        self.vps = engine.vps.with_layout(self.goal.layout, self.goal.members)

    # ---- new buffers -------------------------------------------------------------------------------------------------

    def _read(self, source: StateSource) -> None:
        """Fill new buffers, and get ready what else there is; no buffer of the engine's is touched."""
        engine, layout, vps = self.engine, self.goal.layout, self.vps
        self.memory = source.memory(engine.memory_in(layout))
        local = vps.local(layout, self.rank)
        if self.old is not None:
            room = needs(engine, layout, self.goal.members)
            feasible.check_memory(self.control.member, room, engine.candidates.nodes)
        self.buffers = provide(local, self.memory, set(), {}, zeros)
        source.fill(self.rank, self.buffers)
        try:
            self.shared = source.shared()
            if len(self.shared["groups"]) != len(engine.host.basic_optimizer.param_groups):
                raise CheckpointError(
                    f"the checkpoint has {len(self.shared['groups'])} optimizer groups, and this job has "
                    f"{len(engine.host.basic_optimizer.param_groups)}: build the optimizer with the groups of the job "
                    "that saved it"
                )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointDamaged(
                f"the carry cannot be read ({type(error).__name__}: {error}); load another checkpoint"
            ) from None
        self.rest = source.rest(self.rank)
        self.streams = source.streams(self.rank)

    # ---- proofs ------------------------------------------------------------------------------------------------------

    def _verify_tensors(self, source: StateSource) -> None:
        kinds = tuple(kind for kind in self.memory if kind in source.kinds)
        self.kinds, self.digest = tuple(source.kinds), source.prove(self.rank, self.buffers, kinds)

    def _verify_carry(self) -> None:
        """CensusError or CheckpointError unless the rebuilt engine has what was put in, alike on all members."""
        engine = self.engine
        held, scalars = engine.host.state_buffers()
        check_census(engine.host, self.vps, self.rank, held, "after loading")
        shared = shared_carry(engine, scalars)
        lost = [part for part in SAME if fingerprint(shared[part]) != fingerprint(self.shared[part])]
        if lost:
            raise CheckpointError(
                f"{', '.join(lost)}: not as saved once taken over; let load_state_dict of registered objects restore "
                "what state_dict gave"
            )
        if streams.capture() != self.streams:
            raise CheckpointError(
                "the random streams are not those that were put in; load again while no other thread draws random "
                "numbers"
            )
        prints = self.session.reduce("taken", [[self.control.member, fingerprint(shared)]], _two_that_differ)
        if len(prints) > 1:
            raise CheckpointError(
                f"the carry of member {prints[1][0]} is not that of member {prints[0][0]}; let load_state_dict of "
                "registered objects give the same on all members"
            )

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _off(self) -> None:
        """Take the optimizer off, unless it is off."""
        if self.old is not None and not self.swap.has_begun:
            self.swap.off(partial(self._back, self.old))

    def _swap(self) -> None:
        engine, goal = self.engine, self.goal
        self._off()
        if self.old is None:
            self.swap.on_undo(engine.host.leave_world)
            install(goal.world)
        self.swap.over(self.vps, goal.layout, goal.world, self.rank, self.buffers, scalars_of(self.shared))
        self._take(self.shared, self.rest, self.streams)

    def _take(self, shared: dict[str, Any], rest: dict[str, Any], own: streams.Streams) -> None:
        """The carry; what is for a loader or an object that is not there yet waits for it."""
        engine = self.engine
        engine.keep_arrived({**shared["loaders"]}, {**rest["objects"]})
        objects = {name: state for name, state in rest["objects"].items() if name in engine.carried}
        take_over(engine, shared, {**rest, "objects": objects}, casts=True)
        streams.restore(own)

    def _commit(self) -> None:
        engine = self.engine
        if self.registered is not None:
            note(engine, self.registered)
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
