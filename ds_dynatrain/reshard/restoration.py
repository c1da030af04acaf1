"""Restoration of a state into surviving processes: fill new buffers, prove their contents, rebuild the engine, and
vote.

The state comes from a `StateSource`: a checkpoint, copies that members keep of each other, or the same members under
other parameter groups (`regrouping`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.zero.optimizers import forget_running_products
from ds_dynatrain.adapters.zero.regroup import Regrouping
from ds_dynatrain.adapters.zero.state import Buffers, Memory, provide, release, zeros
from ds_dynatrain.elastic.main_thread import OWN_WAITS
from ds_dynatrain.errors import CheckpointError, OutcomeUnknown
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session, VoteResult, first_and_other
from ds_dynatrain.reshard import feasible, streams
from ds_dynatrain.reshard.carry import LoadReason, scalars_of, shared_carry, take
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.encoding import fingerprint
from ds_dynatrain.reshard.registration import Adoption, note
from ds_dynatrain.reshard.swap import Before, Swap, check_census
from ds_dynatrain.reshard.targets import needs
from ds_dynatrain.space import Layout, VirtualParameterSpace, row_of


@dataclass(frozen=True)
class Restored:
    """A checkpoint from which training continues.

    path: the folder of the checkpoint.
    step: the number of optimizer steps that had been completed when it was saved.
    client_state: the dictionary that the user passed to DeepSpeed's `save_checkpoint`, with DeepSpeed's additions;
        empty for a checkpoint of this package.
    kinds: the state kinds that were saved.
    digest: the digest of the whole state, as in the certificate of a switch.
    """

    path: Path
    step: int
    client_state: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class Goal:
    """The layout and world into which a state is restored, and the keys under which the members communicate meanwhile.

    members: the member at each rank.
    world: the process groups.
    key: the key prefix of the members' messages.
    record: the key of the outcome.
    begins_anew: whether an engine that held no state starts as it does after a failure; false in the middle of a
        switch.
    what: the name of the operation, for errors.
    is_patient: whether members are waited for as long as they are alive (see `Session`).
    """

    layout: Layout
    members: tuple[int, ...]
    world: World
    key: str
    record: str
    begins_anew: bool = True
    what: str = "loading a checkpoint"
    is_patient: bool = True

    def session(self, board: Control) -> Session:
        """Return a session for the joint steps of all members that take part in the restoration."""
        return Session(board, self.key, self.members, self.what, record=self.record, is_patient=self.is_patient)


class StateSource:
    """Base class of sources from which a whole state can be restored, as read by one member.

    kinds: state kinds that the source has.
    client_state: see `Restored`.
    compared: keys of the extra state that must have the same values in the engine after the restoration.
    is_proved_at_the_end: whether `prove` checks the buffers of the rebuilt engine; if not, it checks the new buffers
        before the engine is rebuilt.

    The engine first adopts the parameter groups of `regrouping`. After that `memory` is called first and `prove` last.
    """

    compared: Sequence[str] = ("counters", "windows", "epoch", "groups", "scalars", "scaling", "scheduler")
    is_proved_at_the_end = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing by default; sources that keep files open override this method to close them."""

    @property
    def kinds(self) -> Sequence[str]:
        raise NotImplementedError

    @property
    def client_state(self) -> dict[str, Any]:
        return {}

    @property
    def regrouping(self) -> Regrouping | None:
        """Change that turns the current parameter groups into those of the source; None if they are the same."""
        return None

    def memory(self, memory: Mapping[str, Memory]) -> dict[str, Memory]:
        """Return the dtype and device of the buffers of each state kind that the engine will have.

        memory: the same for the kinds that the engine can have in this layout.

        Raises CheckpointError if the source belongs to another model or optimizer.
        """
        return {kind: made_of for kind, made_of in memory.items() if kind in self.kinds or not row_of(kind).is_moment}

    def fill(self, rank: int, buffers: Buffers) -> None:
        """Fill the buffers of a rank with the source's state."""
        raise NotImplementedError

    def shared(self) -> dict[str, Any]:
        """Return the extra state that is equal on all ranks: counters, schedule, hyper-parameters."""
        raise NotImplementedError

    def rest(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's extra state that may differ between ranks, such as module buffers and user objects.

        Returns None if the rank keeps its own extra state and random streams.
        """
        return None

    def streams(self, rank: int) -> streams.Streams:
        """Return the random streams (states of the random generators) for a rank."""
        return streams.capture()

    def prove(self, rank: int, buffers: Buffers, kinds: Sequence[str]) -> str:
        """Return one digest of the whole state, after proving that all members together hold the state of the source.

        kinds: state kinds that have buffers.

        Raises CheckpointDamaged or CertificateError, naming tensor and kind, if members hold any other state.
        """
        raise NotImplementedError


Opener = Callable[[], AbstractContextManager[StateSource]]
"""Function that opens a source of state. Called in the voted part of a restoration, so it may fail."""


class Restoration:
    """The restoration of a state on one member. Either all members that take part restore it or none does.

    where: the name of the source, for messages.
    old: the state to return to after a failure; None if this member holds none.
    kinds, digest, client_state: see `Restored`; set once the restoration has run.
    """

    def __init__(self, engine: EngineCore, goal: Goal, opener: Opener, where: str, old: Before | None) -> None:
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
        self.rest: dict[str, Any] | None = None
        self.streams: streams.Streams = {}
        self.memory: dict[str, Memory] = {}
        self.kinds: tuple[str, ...] = ()
        self.digest = ""
        self.swap = Swap(engine)

    def run(self) -> None:
        """Restore the state on all members. If this fails, no member is changed, and CheckpointError with the reason is
        raised."""
        decision = self.vote()
        if decision.commit:
            return
        what = "" if self.old is None else "engine.load: "
        end = "" if self.old is None else "; training goes on as before it"
        where = "" if self.where in decision.reason else f"{self.where}: "
        raise decision.checkpoint_error(f"{what}{where}{decision.reason}{end}")

    def vote(self) -> VoteResult:
        """Restore the state and vote on the result. Commit or undo the restoration as all members decide, and return
        their decision."""
        try:
            decision = self.session.vote(self._carry_out)
        except OutcomeUnknown:
            self._undo()
            if self.old is None:  # it holds no state, so a later generation can restore it
                self.control.lost = None
            raise
        self._commit() if decision.commit else self._undo()
        if self.swap.has_begun and self.engine.host.compilations.count:
            self.engine.host.compilations.forget()
        decision.raise_interrupt()
        return decision

    def _carry_out(self) -> None:
        what = f"{'restoring' if self.old is None else 'loading'} {self.where}"
        with OWN_WAITS.waiting(what), self._opener() as source:
            self._register(source)
            self._read(source)
            if not source.is_proved_at_the_end:
                self._verify_tensors(source, self.buffers)
            self.client_state = source.client_state
        self._swap()
        self._verify_carry(source)

    def _register(self, source: StateSource) -> None:
        """Adopt the source's trained parameters and groups if they differ from the current ones. This detaches the
        optimizer."""
        engine = self.engine
        self.registered = source.regrouping
        if self.registered is None:
            return
        if self.old is not None:
            self.swap.off(self.old)
        adoption = Adoption(engine, self.registered)
        self.swap.on_undo(adoption.undo)
        adoption.make()
        self.vps = engine.vps.with_layout(self.goal.layout, self.goal.members)

    def _read(self, source: StateSource) -> None:
        """Fill new buffers and read the extra state, without touching the engine's own buffers."""
        engine, layout = self.engine, self.goal.layout
        self.memory = source.memory(engine.memory_in(layout))
        if self.old is not None:
            nodes = engine.candidates.nodes
            feasible.check_memory(self.control.member, needs(engine, layout, self.goal.members, nodes), nodes)
        self.buffers = provide(self.vps.local(layout, self.rank), self.memory, set(), {}, zeros)
        source.fill(self.rank, self.buffers)
        self.shared, self.rest = source.shared(), source.rest(self.rank)
        self.streams = source.streams(self.rank)

    def _verify_tensors(self, source: StateSource, held: Buffers) -> None:
        kinds = tuple(kind for kind in self.memory if kind in source.kinds)
        self.kinds, self.digest = tuple(source.kinds), source.prove(self.rank, held, kinds)

    def _verify_carry(self, source: StateSource) -> None:
        """Raise CensusError or CheckpointError unless the rebuilt engines of all members have the restored state."""
        engine = self.engine
        held, scalars = engine.host.state_buffers()
        check_census(engine.host, self.vps, self.rank, held, "after loading")
        shared = shared_carry(engine, scalars)
        lost = [part for part in source.compared if fingerprint(shared[part]) != fingerprint(self.shared[part])]
        if lost:
            raise CheckpointError(
                f"{', '.join(lost)}: not as saved once taken over; let load_state_dict of registered objects restore "
                "what state_dict gave"
            )
        if self.rest is not None and streams.capture() != self.streams:
            raise CheckpointError(
                "the random streams are not those that were put in; load again while no other thread draws random "
                "numbers"
            )
        prints = self.session.reduce("taken", [[self.control.member, fingerprint(shared)]], first_and_other)
        if len(prints) > 1:
            raise CheckpointError(
                f"the carry of member {prints[1][0]} is not that of member {prints[0][0]}; let load_state_dict of "
                "registered objects give the same on all members"
            )
        if source.is_proved_at_the_end:
            self._verify_tensors(source, held)

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _swap(self) -> None:
        goal = self.goal
        if self.old is None:
            self.swap.into(goal.world)
        else:
            self.swap.off(self.old)
        self.swap.over(self.vps, goal.layout, goal.world, self.rank, self.buffers, scalars_of(self.shared))
        if self.rest is None:
            take(self.engine, self.shared, LoadReason.NEW_OPTIMIZER)
            return
        take(self.engine, {**self.shared, **self.rest, "casts": True}, LoadReason.START)
        streams.restore(self.streams)

    def _commit(self) -> None:
        engine, goal = self.engine, self.goal
        if self.registered is not None:
            note(engine, self.registered)
        self.swap.keep()
        if self.old is not None:
            self.control.teardowns.add(release(self.old.buffers))
        else:
            engine.world, engine.layout, engine.members = goal.world, goal.layout, goal.members
            if goal.begins_anew:
                engine.begin_anew(goal.world.generation)
        forget_running_products(engine.host.basic_optimizer)

    def _undo(self) -> None:
        """Return the engine to the state that it had before the restoration; a member that had none becomes idle
        again."""
        self.swap.undo()
        self.buffers = {}


def let_go(engine: EngineCore) -> None:
    """Make an engine idle without communicating with other members; this member's state is lost."""
    engine.close_loaders()
    engine.release_old_state()
    if engine.world is not None:
        engine.host.detach()
        engine.host.leave_world()
        engine.world = None
