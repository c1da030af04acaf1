"""A process's part in what is due: where its members meet, one switch or several together, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ds_dynatrain.adapters.watched import Fate
from ds_dynatrain.data.workers import without_collection
from ds_dynatrain.engine import agreement
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.following import Following
from ds_dynatrain.engine.members.together import Together
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.transaction.meeting import Outcome


class TakingPart(Following):
    """Called where this process stands at a boundary of its first engine."""

    def __init__(self, elastic: Elastic) -> None:
        super().__init__(elastic)
        self._place = ""

    @property
    def _is_paused(self) -> bool:
        return self.elastic.world is not None and self.elastic.world.paused

    @property
    def _ahead(self) -> int:
        """How many steps ahead rank 0 can name a meeting: none where nobody makes steps."""
        return 0 if self._is_paused or self.elastic.is_torn else 1

    def meet(self) -> None:
        """On a working member: take part in what is due at this step."""
        change, ahead = self.change, self._ahead
        if change is None or change.proposal is None:
            due = self.on_board(lambda: self.switcher.is_due(ahead))
            if due:
                self.engine.attempts.transact(self._place)
            return
        proposal, step = change.proposal, self.engine.global_steps
        rank = proposal.source_members.index(change.board.member)
        if rank == 0 and not self.on_board(lambda: self._others_are_prepared(change)):
            return
        meet = self.on_board(lambda: agreement.meeting_step(change.board, proposal, rank, step, ahead))
        if meet is None or step < meet:
            return
        if change.moves_nothing:
            self.on_board(lambda: change.board.decide(f"record/{proposal.generation}", {"commit": True, "reason": ""}))
            self.enter(change)
        else:
            self._transact(change)

    def _others_are_prepared(self, change: Change) -> bool:
        """Whether all members are ready for what the engines beside the first one are to do."""
        return all(
            agreement.all_prepared(change.boards_of(engine.job.number)[0], proposal)
            for engine, proposal in zip(self.beside, change.proposals[1:], strict=True)
        )

    def _transact(self, change: Change) -> None:
        """Take part in what was prepared: one engine by itself, several together."""
        if not self.beside:
            self.engine.attempts.transact(self._place)
            return
        with without_collection():
            together = Together(self.engines, self._place, change)
            outcome = together.run()
        self._after_change(change, outcome)
        together.end()

    def _meet_idle(self) -> None:
        """On a member without work: take part in a switch that begins, or see how one without it has ended."""
        change = self.change
        if change is None:
            for engine in self.engines:
                if engine.is_switching:
                    with engine.turn():
                        self.on_board(partial(engine.switcher.meet_idle, self._place))
            return
        proposal = change.proposal
        if proposal is None:
            return
        if not proposal.source_members and change.board.member in proposal.members:
            self.forming.restore(change)
            return
        is_busy = any(engine.is_switching for engine in self.engines)
        if is_busy and self.on_board(lambda: agreement.wait_for_rank_0(change.board, proposal)):
            self._transact(change)
            return
        record = self.on_board(lambda: change.board.read(f"record/{proposal.generation}"))
        if record is None:
            return
        for engine, its in zip(self.engines, change.proposals, strict=True):
            with engine.turn():
                engine.close_preparation()
            if record["commit"]:
                engine.layout, engine.members = its.layout, its.members
        if record["commit"]:
            self.enter(change)
        else:
            self._failed(change, change.proposals, record["reason"])

    def after(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """A switch of one engine has ended on this member, whoever asked for it."""
        change = self.change
        if change is not None and change.proposal is proposal:
            self._after_change(change, outcome)
            return
        self._see_outcome([engine], outcome)
        if outcome.committed:
            self.retrain(proposal.members)

    def _after_change(self, change: Change, outcome: Outcome) -> None:
        """What was prepared for a change of members has ended."""
        pairs = zip(self.engines, change.proposals, strict=True)
        self._see_outcome([engine for engine, its in pairs if not its.moves_nothing], outcome)
        if outcome.committed:
            self.enter(change)
        else:
            self._failed(change, change.proposals, outcome.reason)

    def _see_outcome(self, engines: Sequence[EngineCore], outcome: Outcome) -> None:
        if outcome.is_uncertain:
            self.elastic.tear()
        for engine in engines:
            if outcome.committed:
                self.elastic.settle(engine.job.number)
            else:
                self.elastic.let_go(engine.job.number)

    def guard(self, preparation: Preparation) -> None:
        """Let a failure break a preparation off: it must not wait for the dead."""
        world = self.elastic.world if self.change is None else self.change.world
        generation = 0 if world is None else world.generation
        preparation.building = lambda: self.elastic.building(generation, preparation.number)
        preparation.stop = lambda: self.elastic.stop_if_over(generation)
        preparation.fate = Fate()
        preparation.committed = lambda: self._say_committed(preparation)

    def _say_committed(self, preparation: Preparation) -> None:
        """Let the coordinator know at once who holds the state now: others may die before all is in place."""
        change, member = self.change, self.elastic.member
        is_its = change is not None and any(one is preparation.proposal for one in change.proposals)
        if change is not None and is_its and member.id in change.world.members:
            member.enter(change.world)

    def retrain(self, members: tuple[int, ...]) -> None:
        """Others hold the state now, in the same generation; on a member that is none of them."""
        self.elastic.retrain(self.elastic.roll.ids_of(members))
