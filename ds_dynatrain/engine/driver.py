"""Driver of `BoundaryMachine`: gives it the state of this process's engines, and carries out its decisions.

A switch covers a list of engines: one engine if the script requested the switch, all of them in a change of members.
Either all of these engines commit or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, singledispatchmethod
from typing import TypeVar

import torch.distributed as td

from ds_dynatrain.adapters.groups.device import is_accelerated, synchronize
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.engine.checkpoints.lean import LeanTransaction
from ds_dynatrain.engine.copies.copy import lacks_frozen
from ds_dynatrain.engine.elastic import Elastic, GenerationBoards
from ds_dynatrain.engine.parts import EngineParts, open_engines
from ds_dynatrain.engine.restoring import StateRecovery, let_go
from ds_dynatrain.errors import ElasticError, SwitchRefused
from ds_dynatrain.extension import backups_of
from ds_dynatrain.membership import agreement
from ds_dynatrain.membership.boundary_machine import (
    Action,
    BoundaryMachine,
    Connect,
    EndProcess,
    Enter,
    Fail,
    Follow,
    GiveUpPreparation,
    HeldState,
    Hold,
    Know,
    LetGo,
    Open,
    OwnFacts,
    PassBy,
    Post,
    PostJob,
    Prepare,
    Restore,
    Serve,
    Spend,
    Transact,
    Void,
)
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.destinations import (
    WITH_NEWCOMERS,
    ChosenLayout,
    Destination,
    DestinationFacts,
    Registry,
    Rules,
    choose,
    destinations,
)
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import VoteResult
from ds_dynatrain.membership.whole import Had, WholeCopies
from ds_dynatrain.records import to_record
from ds_dynatrain.report import logger
from ds_dynatrain.reshard import registration
from ds_dynatrain.reshard.context import Context
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.preparation import Outcome, Preparation
from ds_dynatrain.reshard.switch import Transaction
from ds_dynatrain.reshard.targets import NodeMemory, needs
from ds_dynatrain.space import Layout

T = TypeVar("T")


class Driver:
    """Driver of the boundary machine: gives it the state of this process's engines, and carries out the actions that
    the machine returns.

    elastic: the membership of the process; None in a launch of fixed size, whose generation never changes.
    leave: ends the process; its argument is `EndProcess.must_save`.
    """

    def __init__(self, elastic: Elastic | None = None, leave: Callable[[bool], None] = lambda must_save: None) -> None:
        self._elastic = elastic
        self.machine = BoundaryMachine(self._destinations)
        self._leave = leave
        self._boards: GenerationBoards | None = None
        self._at, self._place, self._has_waited = 0, "", True
        self._said = ""
        self._own_error: BaseException | None = None
        self._before: Context | None = None
        """The engine's surroundings before a late change of members (optimizer state is still in transit); None if
        there is no such change."""

    @property
    def elastic(self) -> Elastic:
        """Membership of this process in a job whose members come and go. Raises RuntimeError in a launch of fixed
        size."""
        if self._elastic is None:
            raise RuntimeError("in a launch of fixed size no generation follows")
        return self._elastic

    @property
    def engines(self) -> list[EngineParts]:
        """Open engines of the process, in the order in which they were made."""
        return open_engines()

    def advance(self, engine: EngineParts, place: str, has_waited: bool = True) -> None:
        """Carry out all actions that are due now. Called when an engine is between two optimizer steps.

        place: the loader or call at which the script has arrived.
        has_waited: see `OwnFacts`.
        """
        self._at, self._place, self._has_waited = self.engines.index(engine), place, has_waited
        engine.release_old_state(unless_needed=True)
        if self._elastic is not None:
            self._elastic.member.built()
        while actions := self.on_board(self._decided):
            self.on_board(partial(self._carry_out, actions))

    def waits_for(self) -> str:
        """Return a description of the members for which this member waits before its next action."""
        boards = () if self._boards is None else self._boards.main_boards
        return self.on_board(lambda: self.machine.waits_for(boards)) or "the board"

    def forget(self) -> None:
        """Abandon a change of members that is in progress, because an engine has ended."""
        self._give_up(GiveUpPreparation("an engine has ended"))
        self.machine.forget()
        self._close_boards()

    def say_once(self, what: str) -> None:
        """Log a warning, unless it is the same as the previous one logged by this method."""
        if what != self._said:
            self._said = what
            logger.warning("%s", what)

    def on_board(self, read: Callable[[], T]) -> T | None:
        """Call a function that reads the board (the job's key-value store), and return its result. If the connection to
        the board is lost, reconnect and return None.

        In a launch of fixed size the loss of the board ends the job: torch's DistError is raised.
        """
        try:
            return read()
        except td.DistError as error:
            if self._elastic is None:
                raise
            logger.warning("the board is gone (%s); training goes on", error)
            self._carry_out(self.machine.board_is_lost(f"the board is gone: {error}"))
            return None

    @property
    def trains_in(self) -> Generation | None:
        """Generation in which this process trains. During a late change of members (optimizer state is still in
        transit), this is already the next generation."""
        return self.elastic.world if self._before is None else self._open_boards.world

    # ---- facts for the machine ---------------------------------------------------------------------------------------

    def _decided(self) -> list[Action]:
        boards = () if self._boards is None else self._boards.main_boards
        newest = None if self._elastic is None else self._elastic.member.newest
        return self.machine.advance(self._own_facts(), newest, boards)

    def _own_facts(self) -> OwnFacts:
        elastic = self._elastic
        held = tuple(held_by(engine, self.say_once, elastic) for engine in self.engines)
        if elastic is None:
            return OwnFacts("", None, Registry(), False, held, at=self._at)
        known = elastic.member.id, elastic.world, elastic.registry, elastic.is_aborted
        return OwnFacts(*known, held, elastic.member.is_leaving, self._at, self._has_waited)

    def _destinations(self, asked: DestinationFacts) -> list[Destination] | None:
        nodes = self.elastic.candidates(asked.world, asked.registry).nodes
        found = destinations(asked, [_rules(engine, nodes) for engine in self.engines], self.say_once)
        if found is None:
            self.elastic.member.lacks(asked.world)
        return found

    # ---- actions of the machine --------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self._do(action)

    @singledispatchmethod
    def _do(self, action: Action) -> None:
        """Carry out one action, using the method that is registered for the action's type."""
        raise TypeError(f"no action: {action!r}")

    @_do.register
    def _give_up(self, action: GiveUpPreparation) -> None:
        for engine in self.engines:
            if engine.is_switching:
                with engine.turn():
                    engine.give_up(action.reason)

    @_do.register
    def _open(self, action: Open) -> None:
        self._close_boards()
        self._boards = GenerationBoards(action.world, self.elastic, [engine.job.number for engine in self.engines])

    @_do.register
    def _know(self, action: Know) -> None:
        """Adopt the registry of members' numbers, because an idle member's number may have changed.

        Idle engines also adopt the layout, the members and the trained parameters of the working engines.
        """
        self._open_boards.know(action.registry)
        for engine in self.engines:
            if engine.idle:
                engine.control.member = action.registry.numbers[self.elastic.member.id]
        for engine, record in zip(self.engines, action.records, strict=False):
            if engine.idle:
                with engine.turn():
                    engine.attempt = int(record["attempt"])
                    engine.layout, engine.members = Layout.from_dict(record["layout"]), tuple(record["members"])
                    registration.repeat(engine, record["registered"][len(engine.registered) :])
                    engine.kept.void_before(tuple(record["since"]))

    @_do.register
    def _post(self, action: Post) -> None:
        preparation = self.engines[action.engine].preparation if action.is_present else None
        board = self._open_boards.of(action.engine)[0] if preparation is None else preparation.board
        (board.decide if action.is_decision else board.post)(action.key, action.value)

    @_do.register
    def _post_job(self, action: PostJob) -> None:
        """Post a description of each engine, from which newcomers build their own, as plain JSON."""
        for place, engine in enumerate(self.engines):
            record = {
                **engine.job.alike,
                "engines": len(self.engines),
                "attempt": engine.attempt,
                "layout": engine.layout.to_dict(),
                "members": engine.members,
                "registry": to_record(action.registry),
                "registered": engine.registered,
                "loaded": self.elastic.loads.get(engine.job.number),
                "since": engine.kept.since,
            }
            self._open_boards.of(place)[0].post("job", record)

    @_do.register
    def _void(self, action: Void) -> None:
        for engine in self.engines:
            engine.kept.void_before(action.before)

    @_do.register
    def _let_go(self, action: LetGo) -> None:
        backups = backups_of(self.engines[0].extensions)
        if action.lost and backups is not None:
            logger.warning("%s; all goes back to the %s", action.lost, backups.what)
        for engine in self.engines:
            let_go(engine)

    @_do.register
    def _hold(self, action: Hold) -> None:
        for engine, source in zip(self.engines, action.sources, strict=True):
            if engine.control.member not in source.members:
                let_go(engine)
            engine.layout, engine.members = source.layout, source.members

    @_do.register
    def _prepare(self, action: Prepare) -> None:
        boards = self._open_boards
        mine = boards.of()[0].member
        nodes = self.elastic.candidates(boards.world, self.machine.registry).nodes
        all_nodes = {**self.engines[0].candidates.nodes, **nodes}
        parts = [
            (engine, proposal, boards.of(place))
            for place, (engine, proposal) in enumerate(zip(self.engines, action.proposals, strict=True))
            if mine in proposal.union and proposal.source_members
        ]
        moving = [(engine, proposal) for engine, proposal, _ in parts if not proposal.moves_nothing]
        wanted = [
            partial(needs, engine, proposal.layout, proposal.members, all_nodes, proposal.late)
            for engine, proposal in moving
        ]
        check = NodeMemory(mine, wanted, all_nodes).check
        checks = dict[int, Callable[[], None]]()
        for engine, proposal in moving:  # before the first thread asks every engine for its needs
            with engine.turn():
                engine.vps.mesh(proposal.source_layout), engine.vps.mesh(proposal.layout)
                if engine.idle:
                    rank = proposal.members.index(mine)
                    checks[engine.job.number] = engine.rehearse(proposal.layout, rank, check)
        for engine, proposal, its in parts:
            with engine.turn():
                if proposal.moves_nothing:
                    agreement.say_prepared(its[0], proposal)
                else:
                    engine.prepare(proposal, its, checks.get(engine.job.number, check), nodes)

    @_do.register
    def _follow(self, action: Follow) -> None:
        engine, proposal = self.engines[action.engine], action.proposal
        with engine.turn():
            registration.catch_up(engine)
            rank = proposal.members.index(engine.control.member)
            engine.prepare(proposal, check=engine.rehearse(proposal.layout, rank))

    @_do.register
    def _pass_by(self, action: PassBy) -> None:
        engine, proposal = self.engines[action.engine], action.proposal
        with engine.turn():
            registration.catch_up(engine)
            engine.close_preparation()
            engine.attempt = proposal.generation
            if action.is_committed:
                engine.layout, engine.members = proposal.layout, proposal.members
                if self._elastic is not None:
                    self._elastic.retrain(proposal.members)

    @_do.register
    def _connect(self, action: Connect) -> None:
        engine = self.engines[action.engine]
        with engine.turn():
            engine.connect_ahead()

    @_do.register
    def _transact(self, action: Transact) -> None:
        engines = self.engines if action.engine is None else [self.engines[action.engine]]
        for engine in engines:
            engine.before_leaving_world()
        parts = [(engine, engine.preparation) for engine in engines if engine.preparation is not None]
        first, prepared = parts[0]
        record = None
        if action.engine is None:
            self._own_error = next((made.own_error for _, made in parts if made.own_error), self._own_error)
            record = (self._open_boards.of()[0], self.machine.proposals[0].record_key) if len(engines) > 1 else None
        if prepared.proposal.late:
            with first.turn():
                first.enter_late(prepared, self._place)
            return
        with without_collection():
            votes = self._switch(parts, record)
        if self._elastic is not None:
            self.ended([engine for engine, _ in parts], prepared.proposal, votes[0].outcome)
        for transaction in votes:
            if transaction.interrupt is not None:
                raise transaction.interrupt

    def _switch(
        self, parts: Sequence[tuple[EngineParts, Preparation]], record: tuple[Control, str] | None
    ) -> Sequence[Transaction]:
        """Switch engines, one after another, in the same order on all members; either all engines commit or none does.
        Return the transactions.

        record: the board and key of the joint decision for several engines, which is written once all of them can
            commit; None for a single engine, whose transaction writes its own decision.
        """
        votes, is_part = list[Transaction](), record is not None
        for engine, preparation in parts:
            given = engine, preparation, self._place
            with engine.turn():
                votes.append(LeanTransaction(*given, engine.saver) if engine.is_lean else Transaction(*given, is_part))
        for (engine, _), transaction in zip(parts, votes, strict=True):
            with engine.turn():
                decision = transaction.vote()
            if not decision.commit:
                break
        outcome = votes[0].outcome
        if record is not None:
            board, key = record
            try:
                found = board.decide(key, {"commit": decision.commit, "reason": decision.reason})
                decision = VoteResult(found["commit"], found["reason"])
            except td.DistError as lost:  # others may have read a commit
                outcome.is_uncertain = True
                decision = VoteResult(False, f"{decision.reason or 'the board is gone'} ({lost})")
        for (engine, _), transaction in zip(parts, votes, strict=True):
            with engine.turn():
                transaction.conclude(decision)
                engine.report(transaction)
            outcome.is_uncertain |= transaction.outcome.is_uncertain
        return votes

    def entered(self, engine: EngineParts) -> None:
        """Make an engine use the next generation's boards if it already trains in that generation, because a late
        change of members has begun."""
        machine = self.machine
        if engine.preparation is not None and machine.is_of_change(engine.preparation.proposal):
            self._before, boards = engine.context, self._open_boards
            boards.adopt(engine, 0, self.elastic.candidates(boards.world, machine.registry))

    def ended(self, engines: Sequence[EngineCore], proposal: Proposal, outcome: Outcome) -> None:
        """Update the membership after a switch of these engines, in a job whose members come and go.

        proposal: the proposal for the first engine.

        If this member cannot know how the switch ended, the world is aborted, and all members have to report what state
        they hold.
        """
        if outcome.is_uncertain:
            self.elastic.abort()
        for engine in engines:
            (self.elastic.settle if outcome.committed else self.elastic.let_go)(engine.job.number)
            if self._before is not None and not outcome.committed:
                engine.context = self._before
        self._before = None
        if self.machine.is_of_change(proposal):
            self._carry_out(self.machine.transacted(self._own_facts(), outcome.committed, outcome.reason))
        elif outcome.committed:
            self.elastic.retrain(proposal.members)

    @_do.register
    def _restore(self, action: Restore) -> None:
        self._carry_out(self.machine.restored(self._own_facts(), self._recovery(action).restore()))

    @_do.register
    def _serve(self, action: Serve) -> None:
        self._recovery(action).serve()

    def _recovery(self, action: Restore | Serve) -> StateRecovery:
        where = self._open_boards, self.machine.registry, self.elastic
        return StateRecovery(self.engines, action.proposals, action.copies, *where)

    @_do.register
    def _spend(self, action: Spend) -> None:
        for engine, proposal in zip(self.engines, action.proposals, strict=True):
            if engine.preparation is not None:  # the attempt ended without this member
                self._own_error = engine.preparation.own_error or self._own_error
            with engine.turn():
                engine.close_preparation()
            engine.attempt = proposal.generation
        if action.tries < WITH_NEWCOMERS:
            return
        generation = self._open_boards.world.generation
        if self._own_error is not None and self.engines[0].idle:
            raise ElasticError(
                f"generation {generation}: this process cannot take part in the job, and ends, so that another one can "
                f"come in its place: {self._own_error}"
            )
        if action.tries == WITH_NEWCOMERS and self.engines[0].rank == 0:
            logger.warning(
                "generation %d: %d attempts failed, the last with: %s; newcomers stay idle until that is mended",
                *(generation, action.tries, action.reason),
            )

    @_do.register
    def _enter(self, action: Enter) -> None:
        self._own_error = None
        boards, candidates = self._open_boards, self.elastic.candidates(action.world, action.registry)
        for place, (engine, proposal) in enumerate(zip(self.engines, action.proposals, strict=True)):
            with engine.turn():
                engine.close_preparation()
            engine.attempt = proposal.generation
            engine.layout, engine.members = proposal.layout, proposal.members
            boards.adopt(engine, place, candidates)
        self._boards = None
        self.elastic.enter(action.world, action.registry, action.registry.ids_of(action.proposals[0].members))

    @_do.register
    def _end(self, action: EndProcess) -> None:
        self._leave(action.must_save)

    @_do.register
    def _fail(self, action: Fail) -> None:
        raise action.error

    # ---- boards of the next generation -------------------------------------------------------------------------------

    @property
    def _open_boards(self) -> GenerationBoards:
        if self._boards is None:
            raise RuntimeError("no later generation's board is there")
        return self._boards

    def _close_boards(self) -> None:
        if self._boards is not None:
            self._boards.close()
            self._boards = None


def held_by(engine: EngineParts, say: Callable[[str], None], elastic: Elastic | None) -> HeldState:
    """Return the current state of one engine of this process, for decisions at a boundary.

    say: logs a message for users.
    elastic: the membership; None in a launch of fixed size, where communicators can be made before the pause.
    """
    number, preparation, lacks = engine.control.member, engine.preparation, None
    if elastic is None and is_accelerated() and preparation is not None and preparation.connections is None:
        lacks = partial(preparation.lacks, engine.world)
    return HeldState(
        number=number,
        layout=engine.layout,
        members=engine.members,
        rank=None if engine.idle else engine.members.index(number),
        attempt=engine.attempt,
        generation=engine.generation,
        step=engine.global_steps,
        board=engine.control if preparation is None else preparation.board,
        is_clean=not engine.is_stepping and not engine.is_in_doubt,
        pending=None if preparation is None else preparation.proposal,
        is_in_window=engine.awaits_late,
        settle=synchronize,
        lacks=lacks,
        can_restore=backups_of(engine.extensions) is not None,
        registered=len(engine.registered),
        since=partial(_newest_load, engine, elastic),
        copies=partial(_copies, engine),
        damaged=partial(_damaged, engine),
        frozen=engine.kept.frozen_of if engine.kept.frozen else None,
        goes_late=partial(_goes_late, engine, say),
    )


def _goes_late(engine: EngineParts, say: Callable[[str], None], layout: Layout) -> bool:
    """Return whether the configuration requests late switches (optimizer state moves after the pause) and this engine
    supports one to the given layout.

    say: logs a message for users.
    """
    if not engine.settings.late:
        return False
    try:
        engine.targets.check_late(layout)
    except SwitchRefused as refusal:
        say(f"members come and go without dynatrain.late: {refusal.reason}")
        return False
    return True


def _newest_load(engine: EngineParts, elastic: Elastic | None) -> tuple[int, ...] | None:
    """Return when a state, such as a checkpoint, was last loaded, as a `Mark.stretch`; None if this member cannot know
    it. Copies taken before that do not count.

    An idle member may not know it. A working member has taken part in every load, unless the others have continued
    without that member.
    """
    said = () if elastic is None else elastic.replaced()
    return None if said is None and engine.idle else max(engine.kept.since, said or ())


def _copies(engine: EngineParts) -> tuple[Had, ...]:
    """Return a description of each copy of state that this process keeps. The contents of the copies are not read."""
    mine = engine.control.member
    present = engine.members.index(mine) if mine in engine.members else None, engine.generation
    return tuple(
        Had(
            copy.mark,
            copy.rank,
            is_own=(copy.rank, copy.mark.generation) == present,
            lacks_frozen=lacks_frozen(engine.vps, copy.mark.layout),
        )
        for copy in engine.kept.copies()
    )


def _damaged(engine: EngineParts, whole: WholeCopies) -> tuple[int, ...]:
    """Check the copies of a set that this member has to provide; return the ranks whose copies are missing or
    damaged."""
    found = list[int]()
    for rank in whole.held_by(engine.control.member):
        copy = engine.kept.find(whole.mark, rank)
        if copy is None or not copy.is_sound(engine.vps):
            logger.error(
                "the copy of rank %d of step %d is damaged; another one is taken, or the newest checkpoint",
                *(rank, whole.mark.step),
            )
            found.append(rank)
    return tuple(found)


def _rules(engine: EngineParts, nodes: Mapping[int, str]) -> Rules:
    targets = engine.targets

    def choice(members: int) -> ChosenLayout:
        with engine.turn():
            return choose(targets.rule, members, engine.layout, lambda layout: targets.check(layout, processes=members))

    def assign(layout: Layout, able: tuple[int, ...]) -> Destination:
        target, found = targets.assigned(layout, able, nodes)
        return target, found.members

    return Rules(choice, assign)
