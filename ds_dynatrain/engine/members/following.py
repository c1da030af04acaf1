"""What a process learns of a change of members, and makes ready for it, while training still runs.

The coordinator publishes a generation; on its notice boards rank 0 of those that train posts what newcomers have to
know, and later what each engine is to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as td

from ds_dynatrain.engine import agreement, registration
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.forming import Forming
from ds_dynatrain.engine.members.leading import WITH_NEWCOMERS, Leader
from ds_dynatrain.engine.members.parting import Parting
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.engine.members.room import Room
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.engine.targets import needs as needs_of
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout

T = TypeVar("T")


class Following(Parting):
    """The engines of a process in an elastic job, and the change that is under way."""

    forming: Forming

    def __init__(self, elastic: Elastic) -> None:
        super().__init__(elastic)
        self.change: Change | None = None
        self.leader = Leader(elastic, self.engines)

    def leave(self, engine: EngineCore) -> None:
        """An engine has ended, on all members at the same place of their scripts."""
        kept = [one for one in self.engines if one is not engine]
        if kept and len(kept) < len(self.engines):
            self._give_up("an engine has ended")
            self.engines[:] = kept
            if self.change is not None:
                self.change.close()
                self.change = None

    # ---- seeing that there is a change ---------------------------------------------------------------------------

    def look(self) -> None:
        """See what the coordinator and the leader have published, and make ready what follows from it."""
        self._see_newest()
        change = self.change
        if change is None:
            for engine in self.engines if self.engine.idle else ():
                with engine.turn():
                    self.on_board(engine.switcher.look_for_proposal)
        elif change.is_open:
            self.on_board(lambda: self._follow(change))

    def _see_newest(self) -> None:
        newest = self.elastic.member.newest
        at = self.elastic.generation if self.change is None else self.change.world.generation
        if newest is None or newest.generation <= at:
            return
        if self.change is None and newest.change == "planned" and any(one.is_switching for one in self.engines):
            return  # first the switch that was asked for
        self._give_up(newest.reason)
        if self.change is not None:
            self.change.close()
        self.change = Change(newest, self.elastic, [engine.job.number for engine in self.engines])
        self.change.is_agreed = newest.change == "planned"
        if self.engine.idle and self.elastic.member.id not in newest.members:
            self.go()

    def _follow(self, change: Change) -> None:
        """Learn from the new board; every member of either generation comes by here again and again."""
        if change.roll is None or not change.is_adopted:
            if not self._adopt(change):
                return
        if self.leader.leads(change):
            self.leader.lead(change)
        if not change.proposals:
            self._take(change)

    def _give_up(self, reason: str) -> None:
        """Whatever is being prepared cannot come about any more."""
        for engine in self.engines:
            if engine.is_switching:
                with engine.turn():
                    engine.attempts.give_up(reason)

    def _adopt(self, change: Change) -> bool:
        """Know the numbers of all members; an idle member also learns what the job is doing."""
        if not self.forming.agree(change):
            return False
        if not self.engine.idle or self.leader.leads(change):
            change.know(self.elastic.roll.extended(change.world.members))
        else:
            found = [change.boards_of(engine.job.number)[0].read("job") for engine in self.engines]
            records: list[dict[str, Any]] = [record for record in found if record is not None]
            if len(records) < len(found):
                return False
            self._compare_engines(records[0])
            change.know(Roll.from_json(records[0]["roll"]))
            for engine, record in zip(self.engines, records, strict=True):
                with engine.turn():
                    self._learn(engine, record)
            change.board.post(f"built/{change.board.member}", True)
        change.is_adopted = True
        return True

    def _compare_engines(self, record: dict[str, Any]) -> None:
        """ConfigError in a process that has not made the engines that the job has."""
        if record["engines"] != len(self.engines):
            raise ConfigError(
                f"this process cannot join the job: it has made {len(self.engines)} engines, and the job's processes "
                f"{record['engines']}; make all of them before the first batch"
            )

    def _learn(self, engine: EngineParts, record: dict[str, Any]) -> None:
        """On an idle member: who trains, in what, and what was registered."""
        if not engine.idle:
            return
        engine.attempt = int(record["attempt"])
        engine.layout, engine.members = Layout.from_dict(record["layout"]), tuple(record["members"])
        registration.repeat(engine, record["registered"][len(engine.registered) :])

    def _take(self, change: Change) -> None:
        """Take up what the leader proposes, if it does."""
        records = change.board.read(f"change/{change.tries + 1}")
        if records is None:
            return
        proposals = tuple(Proposal.from_json(record) for record in records)
        decided = change.board.read(f"record/{proposals[0].generation}")
        if decided is not None and not decided["commit"]:
            self._failed(change, proposals, decided["reason"])
            return
        change.proposals = proposals
        self._prepare(change)

    def _prepare(self, change: Change) -> None:
        """Make each engine ready for its part."""
        mine, nodes = change.board.member, change.candidates.nodes
        pairs = list(zip(self.engines, change.proposals, strict=True))
        parts = [pair for pair in pairs if mine in pair[1].union and pair[1].source_members]
        moving = [pair for pair in parts if not pair[1].moves_nothing]
        for engine, proposal in moving:  # all of them before a thread begins, which asks each what it needs
            with engine.turn():
                engine.attempts.settle_meshes(proposal)
                if engine.idle:
                    engine.attempts.rehearse(proposal.layout, proposal.members.index(mine))
        needs = [partial(needs_of, engine, proposal.layout, proposal.members) for engine, proposal in moving]
        room = Room(mine, needs, {**self.engine.candidates.nodes, **nodes})
        for engine, proposal in parts:
            boards = change.boards_of(engine.job.number)
            with engine.turn():
                if proposal.moves_nothing:
                    agreement.say_prepared(boards[0], proposal)
                else:
                    engine.attempts.prepare(proposal, boards, room.check, nodes)

    # ---- how it ends ---------------------------------------------------------------------------------------------

    def _failed(self, change: Change, proposals: Sequence[Proposal], reason: str) -> None:
        """An attempt was rolled back, on all members alike."""
        for engine, proposal in zip(self.engines, proposals, strict=True):
            engine.attempt = proposal.generation
        change.proposals = ()
        change.tries += 1
        if self.engine.rank == 0 and change.tries == WITH_NEWCOMERS:
            logger.warning(
                "generation %d: %d attempts failed, the last with: %s; newcomers stay idle",
                change.world.generation,
                change.tries,
                reason,
            )

    def enter(self, change: Change) -> None:
        """Stand in the later generation from here on, or go."""
        roll, candidates = change.known, change.candidates
        self.change = None
        if change.world.members and self.elastic.member.id not in change.world.members:
            self.go()
        for engine, proposal in zip(self.engines, change.proposals, strict=True):
            boards = change.boards_of(engine.job.number)
            engine.attempt = proposal.generation
            if boards[0] is not engine.control:
                boards[0].succeed(engine.control)
            engine.surroundings = Surroundings(engine.launch, candidates, *boards)
        self.elastic.enter(change.world, roll, roll.ids_of(change.proposals[0].members))
        if not change.world.members:
            self.save_and_go()

    # ---- notice boards -------------------------------------------------------------------------------------------

    def on_board(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None where the board has gone, which is opened again then."""
        try:
            return read()
        except td.DistError as error:
            logger.warning("the notice board is gone (%s); training goes on", error)
            self._give_up(f"the notice board is gone: {error}")
            if self.change is not None:
                self.change.open()
            return None
