"""Carries out what `ChangeMachine` decides, on the engines and boards of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch.distributed as td

from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine import agreement, registration
from ds_dynatrain.engine.context import Context
from ds_dynatrain.engine.members.actions import (
    Action,
    Decide,
    Enter,
    Fail,
    GiveUp,
    Hold,
    Know,
    Learn,
    Leave,
    LetGo,
    Open,
    Own,
    Post,
    PostJob,
    Prepare,
    Proposals,
    Restore,
    Serve,
    Spend,
    Transact,
    Void,
)
from ds_dynatrain.engine.members.boards import GenerationBoards
from ds_dynatrain.engine.members.change import ChangeMachine
from ds_dynatrain.engine.members.destinations import WITH_NEWCOMERS, Destination, Question, Rules, destinations
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.held import held_by
from ds_dynatrain.engine.members.joint_switch import JointSwitch, NodeMemory
from ds_dynatrain.engine.members.policy import Choice, choose
from ds_dynatrain.engine.members.registry import Registry
from ds_dynatrain.engine.members.restoring import let_go, restore, serve, void_before
from ds_dynatrain.engine.parts import EngineParts, open_engines
from ds_dynatrain.engine.targets import needs
from ds_dynatrain.engine.transaction.meeting import Outcome
from ds_dynatrain.errors import ElasticError, SwitchRefused
from ds_dynatrain.plan import assign_slots
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout

T = TypeVar("T")


class Executor:
    """Of all engines of the process. leave: ends it; see `Leave`."""

    def __init__(self, elastic: Elastic, leave: Callable[[bool], None]) -> None:
        self.elastic = elastic
        self.machine = ChangeMachine(self._destinations)
        self._leave = leave
        self._boards: GenerationBoards | None = None
        self._place, self._has_waited = "", True
        self._said = ""
        self._own_error: BaseException | None = None
        self._before: Context | None = None
        """In the window of a late change, what was around the engine before it."""

    @property
    def engines(self) -> list[EngineParts]:
        """In the order in which they were made."""
        return open_engines()

    def advance(self, place: str, has_waited: bool = True) -> None:
        """Do what is to be done now, at a boundary of the first engine. has_waited: see `Own`."""
        self._place, self._has_waited = place, has_waited
        self.elastic.member.built()
        while actions := self.on_board(self._decided):
            self.on_board(partial(self._carry_out, actions))

    def waits_for(self) -> str:
        """Whom the next action waits for."""
        boards = () if self._boards is None else self._boards.fronts
        return self.on_board(lambda: self.machine.waits_for(boards)) or "the board"

    def forget(self) -> None:
        """An engine has ended, or a later generation is gone."""
        self._give_up("an engine has ended")
        self.machine.forget()
        self._close_boards()

    def say_once(self, what: str) -> None:
        """A warning that is the same at every boundary."""
        if what != self._said:
            self._said = what
            logger.warning("%s", what)

    def on_board(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None where the board has gone, which is opened again then."""
        try:
            return read()
        except td.DistError as error:
            logger.warning("the board is gone (%s); training goes on", error)
            self._carry_out(self.machine.board_is_lost(f"the board is gone: {error}"))
            return None

    @property
    def trains_in(self) -> World | None:
        """The generation that this process is in; in the window of a late change that which is to come."""
        return self.elastic.world if self._before is None else self._open_boards.world

    # ---- what goes in ------------------------------------------------------------------------------------------------

    def _decided(self) -> list[Action]:
        boards = () if self._boards is None else self._boards.fronts
        return self.machine.advance(self._own(), self.elastic.member.newest, boards)

    def _own(self) -> Own:
        elastic = self.elastic
        held = tuple(held_by(engine, self.say_once, elastic.replaced) for engine in self.engines)
        is_leaving = elastic.member.is_leaving
        known = elastic.member.id, elastic.world, elastic.registry, elastic.is_aborted
        return Own(*known, held, is_leaving, self._has_waited)

    def _destinations(self, asked: Question) -> list[Destination] | None:
        nodes = self.elastic.candidates(asked.world, asked.registry).nodes
        found = destinations(asked, [_rules(engine, nodes) for engine in self.engines], self.say_once)
        if found is None:
            self.elastic.member.lacks(asked.world)
        return found

    # ---- what comes out ----------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case GiveUp(reason):
                self._give_up(reason)
            case Open(world):
                self._close_boards()
                self._boards = GenerationBoards(world, self.elastic, [engine.job.number for engine in self.engines])
            case Know(registry):
                self._know(registry)
            case Post(key, value, engine):
                self._open_boards.of(engine)[0].post(key, value)
            case Decide(key, value):
                self._open_boards.of()[0].decide(key, value)
            case PostJob(registry):
                self._post_job(registry)
            case Learn(records):
                self._learn(records)
            case Void(before):
                for one in self.engines:
                    void_before(one, before)
            case LetGo(lost):
                if lost:
                    logger.warning("%s; all goes back to the fallback checkpoint", lost)
                for one in self.engines:
                    let_go(one)
            case Hold(sources):
                for one, source in zip(self.engines, sources, strict=True):
                    if one.control.member not in source.members:
                        let_go(one)
                    one.layout, one.members = source.layout, source.members
            case Prepare(proposals):
                self._prepare(proposals)
            case Transact():
                self._transact()
            case Restore(proposals, copies):
                where = self._open_boards, self.machine.registry, self.elastic
                is_whole = restore(self.engines, proposals, copies, *where)
                self._carry_out(self.machine.restored(self._own(), is_whole))
            case Serve(proposals, copies):
                serve(self.engines, proposals, copies, self._open_boards, self.machine.registry, self.elastic)
            case Spend(proposals, tries, reason):
                self._spend(proposals, tries, reason)
            case Enter():
                self._enter(action)
            case Leave(must_save):
                self._leave(must_save)
            case Fail(error):
                raise error

    @property
    def _open_boards(self) -> GenerationBoards:
        if self._boards is None:
            raise RuntimeError("no later generation's board is there")
        return self._boards

    def _close_boards(self) -> None:
        if self._boards is not None:
            self._boards.close()
            self._boards = None

    def _give_up(self, reason: str) -> None:
        for engine in self.engines:
            if engine.is_switching:
                with engine.turn():
                    engine.attempts.give_up(reason)

    def _know(self, registry: Registry) -> None:
        """Who holds nothing, and was passed over once, may have another number than before."""
        self._open_boards.know(registry)
        for engine in self.engines:
            if engine.idle:
                engine.control.member = registry.numbers[self.elastic.member.id]

    def _post_job(self, registry: Registry) -> None:
        """All that a newcomer has to know to make each of the engines; plain JSON."""
        for place, engine in enumerate(self.engines):
            job = engine.job
            record = {
                "engines": len(self.engines),
                "attempt": engine.attempt,
                "layout": engine.layout.to_dict(),
                "members": engine.members,
                "registry": registry.to_json(),
                "described": job.described,
                "machine": job.machine,
                "rows": job.rows,
                "batch_sizes": asdict(job.batch_sizes),
                "seed": job.job_seed,
                "registered": engine.registered,
                "loaded": self.elastic.loaded.get(job.number),
                "since": None if engine.kept is None else engine.kept.since,
            }
            self._open_boards.of(place)[0].post("job", record)

    def _learn(self, records: tuple[dict[str, Any], ...]) -> None:
        """Who trains, in what, and what was registered."""
        for engine, record in zip(self.engines, records, strict=True):
            if engine.idle:
                with engine.turn():
                    engine.attempt = int(record["attempt"])
                    engine.layout, engine.members = Layout.from_dict(record["layout"]), tuple(record["members"])
                    registration.repeat(engine, record["registered"][len(engine.registered) :])
                    void_before(engine, tuple(record["since"] or ()))

    def _prepare(self, proposals: Proposals) -> None:
        boards = self._open_boards
        mine = boards.of()[0].member
        nodes = self.elastic.candidates(boards.world, self.machine.registry).nodes
        parts = [
            (engine, proposal, boards.of(place))
            for place, (engine, proposal) in enumerate(zip(self.engines, proposals, strict=True))
            if mine in proposal.union and proposal.source_members
        ]
        moving = [(engine, proposal) for engine, proposal, _ in parts if not proposal.moves_nothing]
        refusals = dict[int, SwitchRefused | None]()
        for engine, proposal in moving:  # all of them before a thread begins, which asks each what it needs
            with engine.turn():
                engine.attempts.settle_meshes(proposal)
                if engine.idle:
                    rank = proposal.members.index(mine)
                    refusals[engine.job.number] = engine.attempts.rehearse(proposal.layout, rank)
        wanted = [
            partial(needs, engine, proposal.layout, proposal.members, proposal.late) for engine, proposal in moving
        ]
        memory = NodeMemory(mine, wanted, {**self.engines[0].candidates.nodes, **nodes})
        for engine, proposal, its in parts:
            with engine.turn():
                if proposal.moves_nothing:
                    agreement.say_prepared(its[0], proposal)
                else:
                    engine.attempts.prepare(proposal, its, memory.check, nodes, refusals.get(engine.job.number))

    def _transact(self) -> None:
        first = self.machine.proposals[0]
        for engine in self.engines:
            engine.before_leaving_world()
        if first.late:
            self._transact_late(self.engines[0])
            return
        record = self._open_boards.of()[0], f"record/{first.generation}"
        with without_collection():
            joint = JointSwitch(self.engines, self._place, record)
            outcome = joint.run()
        self._own_error = joint.own_error or self._own_error
        self.ended(joint.engines, outcome)
        joint.end()

    def _transact_late(self, engine: EngineParts) -> None:
        """The first vote, and `entered` where it is a yes; the record, and `ended`, may come later."""
        if engine.preparation is not None:
            self._own_error = engine.preparation.own_error or self._own_error
        with engine.turn():
            engine.attempts.transact(self._place)

    def entered(self, engine: EngineParts) -> None:
        """All train in the new world of a late switch: if it is one of a change of members, on its board."""
        machine = self.machine
        if engine.preparation is not None and machine.tries_now(engine.preparation.proposal):
            self._before, boards = engine.context, self._open_boards
            boards.adopt(engine, 0, self.elastic.candidates(boards.world, machine.registry))

    def ended(self, engines: Sequence[EngineParts], outcome: Outcome) -> None:
        """A change of members has its record, or was rolled back."""
        if outcome.is_uncertain:
            self.elastic.abort()
        for engine in engines:
            (self.elastic.settle if outcome.committed else self.elastic.let_go)(engine.job.number)
            if self._before is not None and not outcome.committed:
                engine.context = self._before
        self._before = None
        self._carry_out(self.machine.transacted(self._own(), outcome.committed, outcome.reason))

    def _spend(self, proposals: Proposals, tries: int, reason: str) -> None:
        for engine, proposal in zip(self.engines, proposals, strict=True):
            if engine.preparation is not None:  # the others have decided without this member
                self._own_error = engine.preparation.own_error or self._own_error
            with engine.turn():
                engine.close_preparation()
            engine.attempt = proposal.generation
        if tries < WITH_NEWCOMERS:
            return
        generation = self._open_boards.world.generation
        if self._own_error is not None and self.engines[0].idle:
            raise ElasticError(
                f"generation {generation}: this process cannot take part in the job, and ends, so that another one can "
                f"come in its place: {self._own_error}"
            )
        if tries == WITH_NEWCOMERS and self.engines[0].rank == 0:
            logger.warning(
                "generation %d: %d attempts failed, the last with: %s; newcomers stay idle until that is mended",
                *(generation, tries, reason),
            )

    def _enter(self, entered: Enter) -> None:
        self._own_error = None
        boards, candidates = self._open_boards, self.elastic.candidates(entered.world, entered.registry)
        for place, (engine, proposal) in enumerate(zip(self.engines, entered.proposals, strict=True)):
            with engine.turn():
                engine.close_preparation()
            engine.attempt = proposal.generation
            engine.layout, engine.members = proposal.layout, proposal.members
            boards.adopt(engine, place, candidates)
        self._boards = None
        self.elastic.enter(entered.world, entered.registry, entered.registry.ids_of(entered.proposals[0].members))


def _rules(engine: EngineParts, nodes: Mapping[int, str]) -> Rules:
    targets = engine.targets

    def choice(members: int) -> Choice:
        with engine.turn():
            return choose(targets.rule, members, engine.layout, lambda layout: targets.check(layout, processes=members))

    return Rules(choice, lambda layout, able: assign_slots(engine.vps, layout, able, nodes))
