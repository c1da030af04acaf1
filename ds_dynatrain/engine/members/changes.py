"""Members come and go: what a member does about it at its boundaries, in a job that knows no fixed launch.

A later generation has a notice board of its own. Rank 0 of those that train leads: it posts the job's record, by which
newcomers build their engines, waits for them, and proposes the layout that the policy has for so many members. From
there it is a switch like any other, over the new board. Whoever takes part in it stands in the later generation when it
is committed; where nothing moves (a member comes for which there is no place, an idle one goes) all step over at the
meeting, without a switch. A change that is rolled back is tried once more, then without the newcomers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as td

from ds_dynatrain.adapters.watched import Fate
from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.engine import agreement, feasible, registration
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.forming import Forming
from ds_dynatrain.engine.members.leading import WITH_NEWCOMERS, Leader
from ds_dynatrain.engine.members.roll import Roll
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.errors import SwitchRefused, WorldChanged
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine
    from ds_dynatrain.engine.meeting import Outcome
    from ds_dynatrain.engine.preparation import Preparation
    from ds_dynatrain.engine.switcher import Switcher

POLL_SECONDS = 0.02
END_POLL_SECONDS = 0.25

T = TypeVar("T")


class Changes:
    """One member's part in changes of members; a boundary leads here in an elastic job."""

    def __init__(self, engine: DynatrainEngine, elastic: Elastic, switcher: Switcher) -> None:
        self.engine = engine
        self.elastic = elastic
        self.switcher = switcher
        self.change: Change | None = None
        self.leader = Leader(engine, elastic, switcher)
        self.forming = Forming(engine, elastic, self)
        self._place = ""
        self._looked = 0.0

    # ---- at a boundary -------------------------------------------------------------------------------------------

    def stand(self, place: str, window_is_open: bool) -> None:
        """A boundary. SystemExit(0) on a member that leaves, or has waited when the job ended."""
        self._place = place
        self.forming.see_failure()
        if self.elastic.is_torn and not self.engine.idle:
            self.forming.form_anew()
        if not self.engine.idle and not window_is_open:
            self._stand_working()
        if self.engine.idle:
            self.wait_for_work()
            self.switcher.settle_fallback()
        self.elastic.member.progress(int(self.engine.global_steps), str(self.engine.layout), self._pause_ms)

    def _stand_working(self) -> None:
        begin = time.monotonic()
        while not self.engine.idle:
            self._saved(self.switcher.save_if_due)
            self.look()
            self.meet()
            if self.elastic.is_torn and not self.engine.idle:
                self.forming.form_anew()
            if self.engine.idle or not self._is_paused:
                return
            self._wait_for_members(begin)

    def _saved(self, save: Callable[[], None]) -> None:
        """The fallback checkpoint; without a coordinator it is put off."""
        try:
            save()
        except WorldChanged as torn:
            logger.warning("no fallback checkpoint of step %d: %s", self.engine.global_steps, torn)
        except td.DistError as lost:
            self.switcher.settle_fallback()
            try:
                self.reopen()
            except SwitchRefused:
                logger.warning("no fallback checkpoint of step %d: %s", self.engine.global_steps, lost)

    def wait_for_work(self) -> None:
        """On an idle member: until it works; SystemExit(0) when the job has ended, or this member was told to go."""
        self.engine.close_loaders()  # their processes must not outlive the world that they fetched for
        while self.engine.idle:
            if self.elastic.member.is_finished or self._have_all_ended():
                raise SystemExit(0)
            self.look()
            self._meet_idle()
            if self.engine.idle:
                self.switcher.pass_time(POLL_SECONDS)

    def _have_all_ended(self) -> bool:
        """Whether the scripts of all that work are through; they say so where this member stands, too."""
        now = time.monotonic()
        if now - self._looked < END_POLL_SECONDS:
            return False
        self._looked = now
        try:
            board, members = self.engine.control, self.engine.members
            is_over = board.all_posted("ended", members)
            return is_over and all(board.read(f"ended/{member}") == "done" for member in members)
        except td.DistError:
            return False

    @property
    def _is_paused(self) -> bool:
        return self.elastic.world is not None and self.elastic.world.paused

    @property
    def _ahead(self) -> int:
        """How many steps ahead rank 0 can name a meeting: none where nobody makes steps."""
        return 0 if self._is_paused or self.elastic.is_torn else 1

    def _wait_for_members(self, begin: float) -> None:
        """Below MIN: hold the state and make no step, until others come or nobody has come for too long."""
        seconds = self.elastic.wait_seconds
        self.leader.say_once(f"fewer nodes than MIN: training waits for others, with its state, for {seconds:g} s")
        if time.monotonic() - begin > seconds:
            self._saved(self.switcher.save_now)
            logger.error("fewer nodes than MIN for %g s: this process ends with code %d", seconds, Ending.TOO_FEW)
            raise SystemExit(int(Ending.TOO_FEW))
        time.sleep(POLL_SECONDS)

    # ---- seeing that there is a change ---------------------------------------------------------------------------

    def look(self) -> None:
        """See what the coordinator and the leader have published, and make ready what follows from it."""
        self._see_newest()
        change = self.change
        if change is None:
            if self.engine.idle:
                self.on_board(self.switcher.look_for_proposal)
        elif change.boards is not None:
            self.on_board(lambda: self._follow(change))

    def _see_newest(self) -> None:
        newest = self.elastic.member.newest
        at = self.elastic.generation if self.change is None else self.change.world.generation
        if newest is None or newest.generation <= at:
            return
        if self.change is None and self.switcher.is_busy and newest.change == "planned":
            return  # first the switch that was asked for
        self.switcher.give_up(newest.reason)
        if self.change is not None:
            self.change.close()
        self.change = Change(newest, self.elastic)
        self.change.is_agreed = newest.change == "planned"
        if self.engine.idle and self.elastic.member.id not in newest.members:
            self._go()

    def _follow(self, change: Change) -> None:
        """Learn from the new board; every member of either generation comes by here again and again."""
        if change.roll is None or not change.is_adopted:
            if not self._adopt(change):
                return
        if self.leader.leads(change):
            self.leader.lead(change)
        if change.proposal is None:
            self._take(change)

    def _adopt(self, change: Change) -> bool:
        """Know the numbers of all members; an idle member also learns what the job is doing."""
        if not self.forming.agree(change):
            return False
        if not self.engine.idle or self.leader.leads(change):
            change.know(self.elastic.roll.extended(change.world.members))
        else:
            record = change.board.read("job")
            if record is None:
                return False
            change.know(Roll.from_json(record["roll"]))
            self.learn(record)
            change.board.post(f"built/{change.board.member}", True)
        change.is_adopted = True
        return True

    def learn(self, record: dict[str, Any]) -> None:
        """On an idle member: who trains, in what, and what was registered."""
        engine = self.engine
        self.switcher.attempt = int(record["attempt"])
        engine.layout, engine.members = Layout.from_dict(record["layout"]), tuple(record["members"])
        registration.repeat(engine, record["registered"][len(engine.registered) :])

    def _take(self, change: Change) -> None:
        """Take a proposal of the leader up, if there is one."""
        record = change.board.read(f"change/{change.tries + 1}")
        if record is None:
            return
        proposal = Proposal.from_json(record)
        decided = change.board.read(f"record/{proposal.generation}")
        if decided is not None and not decided["commit"]:
            self._failed(change, proposal, decided["reason"])
            return
        change.proposal = proposal
        mine = change.board.member
        if mine not in proposal.union or not proposal.source_members:
            return
        if proposal.moves_nothing:
            change.board.post(f"prepared/{proposal.generation}/{mine}", {"error": None})
            return
        if self.engine.idle:
            self.switcher.rehearse(proposal.layout, proposal.members.index(mine))
        check = partial(self._check_memory, change, proposal)
        self.switcher.prepare(proposal, change.boards, check, change.candidates.nodes)

    def _check_memory(self, change: Change, proposal: Proposal) -> None:
        nodes = {**self.engine.candidates.nodes, **change.candidates.nodes}
        needs = self.switcher.needs(proposal.layout, proposal.members)
        feasible.check_memory(change.board.member, needs, nodes)

    # ---- meeting -------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """On a working member: take part in what is due at this step."""
        change, ahead = self.change, self._ahead
        if change is None or change.proposal is None:
            due = self.on_board(lambda: self.switcher.is_due(ahead))
            if due:
                self.switcher.transact(self._place)
            return
        proposal, step = change.proposal, int(self.engine.global_steps)
        rank = proposal.source_members.index(change.board.member)
        meet = self.on_board(lambda: agreement.meeting_step(change.board, proposal, rank, step, ahead))
        if meet is None or step < meet:
            return
        if proposal.moves_nothing:
            self.on_board(lambda: change.board.decide(f"record/{proposal.generation}", {"commit": True, "reason": ""}))
            self.enter(change, proposal)
        else:
            self.switcher.transact(self._place)

    def _meet_idle(self) -> None:
        """On a member without work: take part in a switch that begins, or see how one without it has ended."""
        change = self.change
        if change is None:
            self.on_board(lambda: self.switcher.meet_idle(self._place))
            return
        proposal = change.proposal
        if proposal is None:
            return
        if not proposal.source_members and change.board.member in proposal.members:
            self.forming.restore(change, proposal)
            return
        if self.switcher.is_busy and self.on_board(lambda: agreement.wait_for_rank_0(change.board, proposal)):
            self.switcher.transact(self._place)
            return
        record = self.on_board(lambda: change.board.read(f"record/{proposal.generation}"))
        if record is None:
            return
        self.switcher.close()
        if record["commit"]:
            self.engine.layout, self.engine.members = proposal.layout, proposal.members
            self.enter(change, proposal)
        else:
            self._failed(change, proposal, record["reason"])

    def after(self, preparation: Preparation, outcome: Outcome) -> None:
        """A switch has ended on this member, whoever asked for it."""
        change, committed, reason = self.change, outcome.committed, outcome.reason
        if outcome.is_uncertain:
            self.elastic.tear()
        if committed:
            self.elastic.settle()
        else:
            self.elastic.let_go()
        if change is None or change.proposal is not preparation.proposal:
            if committed:
                self.retrain(preparation.proposal.members)
        elif committed:
            self.enter(change, preparation.proposal)
        else:
            self._failed(change, preparation.proposal, reason)

    def guard(self, preparation: Preparation) -> None:
        """Let a failure break a preparation off: it must not wait for the dead."""
        world = self.elastic.world if self.change is None else self.change.world
        generation = 0 if world is None else world.generation
        preparation.building = lambda: self.elastic.building(generation)
        preparation.stop = lambda: self.elastic.stop_if_over(generation)
        preparation.fate = Fate()
        preparation.committed = lambda: self._say_committed(preparation)

    def _say_committed(self, preparation: Preparation) -> None:
        """Let the coordinator know at once who holds the state now: others may die before all is in place."""
        change, member = self.change, self.elastic.member
        if change is not None and change.proposal is preparation.proposal and member.id in change.world.members:
            member.enter(change.world)

    def retrain(self, members: tuple[int, ...]) -> None:
        """Others hold the state now, in the same generation; on a member that is none of them."""
        self.elastic.retrain(self.elastic.roll.ids_of(members))

    def _failed(self, change: Change, proposal: Proposal, reason: str) -> None:
        """An attempt was rolled back, on all members alike."""
        self.switcher.attempt = proposal.generation
        change.proposal = None
        change.tries += 1
        if self.engine.rank == 0 and change.tries == WITH_NEWCOMERS:
            logger.warning(
                "generation %d: %d attempts failed, the last with: %s; newcomers stay idle",
                change.world.generation,
                change.tries,
                reason,
            )

    def enter(self, change: Change, proposal: Proposal) -> None:
        """Stand in the later generation from here on, or go."""
        engine, boards, roll = self.engine, change.boards, change.known
        self.change = None
        self.switcher.attempt = proposal.generation
        if self.elastic.member.id not in change.world.members:
            self._go()
        if boards is None:
            raise RuntimeError("a change was committed without a board")
        if boards[0] is not engine.control:
            boards[0].succeed(engine.control)
        candidates = change.candidates
        engine.surroundings = Surroundings(engine.launch, candidates, *boards)
        self.elastic.enter(change.world, roll, roll.ids_of(proposal.members))

    def _go(self) -> None:
        """This member has handed over what it had; its process ends."""
        logger.info("%s: its state is with others; it leaves", self.elastic.member.id)
        raise SystemExit(0)

    # ---- small things --------------------------------------------------------------------------------------------

    def on_board(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None where the board has gone, which is opened again then."""
        try:
            return read()
        except td.DistError as error:
            logger.warning("the notice board is gone (%s); training goes on", error)
            self.switcher.give_up(f"the notice board is gone: {error}")
            if self.change is not None:
                self.change.open()
            return None

    def reopen(self) -> None:
        """Have a living board for the present generation, after a coordinator was started again.

        SwitchRefused if there is none.
        """
        world, engine = self.elastic.world, self.engine
        try:
            for board in (engine.control, engine.surroundings.background):
                board.read("alive")
        except td.DistError as lost:
            if world is None:
                raise SwitchRefused(f"the notice board is gone: {lost}", "ask again later") from lost
            try:
                boards = self.elastic.open_boards(world, engine.control.member)
            except (td.DistError, OSError) as error:
                raise SwitchRefused(f"no coordinator answers: {error}", "training goes on; ask again later") from error
            boards[0].succeed(engine.control)
            engine.surroundings = Surroundings(engine.launch, engine.candidates, *boards)

    @property
    def _pause_ms(self) -> float:
        last = self.engine.last_switch
        return 0.0 if last is None else last.pause_ms
