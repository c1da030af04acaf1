"""Members come and go: what a member does about it at its boundaries, in a job that knows no fixed launch.

A later generation has a notice board of its own. Rank 0 of those that train leads: it posts the job's record, by which
newcomers build their engines, waits for them, and proposes the layout that the policy has for so many members. From
there it is a switch like any other, over the new board. Whoever takes part in it stands in the later generation when it
is committed; where nothing moves (a member comes for which there is no place, an idle one goes) all step over at the
meeting, without a switch. A change that is rolled back is tried once more, then without the newcomers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as td

from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine import agreement, feasible, registration
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.elastic import Boards, Elastic
from ds_dynatrain.engine.policy import choose
from ds_dynatrain.engine.roll import Roll
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.errors import ElasticError, SwitchRefused
from ds_dynatrain.plan import assign_slots
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine
    from ds_dynatrain.engine.preparation import Preparation
    from ds_dynatrain.engine.switcher import Switcher

WITH_NEWCOMERS = 2
"""A change is tried so often with those who come; after that only with those who hold the state already."""
POLL_SECONDS = 0.02
REOPEN_SECONDS = 0.5

T = TypeVar("T")


class Change:
    """On the way to a later generation, on one member. Its board is opened in a thread: the store may be slow, or away.

    proposal: what is tried now, None in between. tries: attempts that were rolled back.
    """

    def __init__(self, world: World, elastic: Elastic) -> None:
        self.world = world
        self.roll: Roll | None = None
        self.tries = 0
        self.proposal: Proposal | None = None
        self.has_led = self.is_adopted = False
        self._elastic = elastic
        self._boards: Boards | None = None
        self._is_over = threading.Event()
        self.open()

    def open(self) -> None:
        """Connect, or connect again: what was read before does not count any more."""
        self._boards, self.proposal, self.tries = None, None, 0
        self.has_led = self.is_adopted = False
        threading.Thread(target=self._open, name=f"dynatrain-board-{self.world.generation}", daemon=True).start()

    def close(self) -> None:
        """Do not try any longer."""
        self._is_over.set()

    @property
    def boards(self) -> Boards | None:
        """None while they are not open."""
        return self._boards

    @property
    def board(self) -> Control:
        """For the main thread; RuntimeError while it is not open."""
        if self._boards is None:
            raise RuntimeError(f"the notice board of generation {self.world.generation} is not open")
        return self._boards[0]

    def know(self, roll: Roll) -> None:
        """Take the numbers of everybody in it, this member's own among them."""
        self.roll = roll
        for board in self._boards or ():
            board.member = roll.numbers[self._elastic.member.id]

    def _open(self) -> None:
        while not self._is_over.is_set():
            try:
                boards = self._elastic.open_boards(self.world)
            except (td.DistError, OSError) as error:
                logging.getLogger("ds_dynatrain.elastic").info("generation %d: %s", self.world.generation, error)
                self._is_over.wait(REOPEN_SECONDS)
                continue
            self._boards = boards
            return


class Changes:
    """One member's part in changes of members; a boundary leads here in an elastic job."""

    def __init__(self, engine: DynatrainEngine, elastic: Elastic, switcher: Switcher) -> None:
        self.engine = engine
        self.elastic = elastic
        self.switcher = switcher
        self.change: Change | None = None
        self._said = ""

    # ---- at a boundary -------------------------------------------------------------------------------------------

    def stand(self, place: str, window_is_open: bool) -> None:
        """A boundary. SystemExit(0) on a member that leaves, or has waited when the job ended."""
        if not self.engine.idle and not window_is_open:
            self._stand_working(place)
        if self.engine.idle:
            self._wait_for_work(place)
            self.switcher.settle_fallback()
        self.elastic.member.progress(int(self.engine.global_steps), str(self.engine.layout), self._pause_ms)

    def _stand_working(self, place: str) -> None:
        begin = time.monotonic()
        while not self.engine.idle:
            self._save_if_due()
            self._look()
            self._meet(place)
            if self.engine.idle or not self._is_paused:
                return
            self._wait_for_members(begin)

    def _save_if_due(self) -> None:
        """The fallback checkpoint; without a coordinator it is put off."""
        try:
            self.switcher.save_if_due()
        except td.DistError as lost:
            self.switcher.settle_fallback()
            try:
                self.reopen()
            except SwitchRefused:
                logger.warning("no fallback checkpoint of step %d: %s", self.engine.global_steps, lost)

    def _wait_for_work(self, place: str) -> None:
        self.engine.close_loaders()  # their processes must not outlive the world that they fetched for
        while self.engine.idle:
            if self.elastic.member.is_finished:
                raise SystemExit(0)
            self._look()
            self._meet_idle(place)
            if self.engine.idle:
                self.switcher.pass_time(POLL_SECONDS)

    @property
    def _is_paused(self) -> bool:
        return self.elastic.world is not None and self.elastic.world.paused

    def _wait_for_members(self, begin: float) -> None:
        """Below MIN: hold the state and make no step, until others come or nobody has come for too long."""
        seconds = self.elastic.wait_seconds
        self._say_once(f"fewer nodes than MIN: training waits for others, with its state, for {seconds:g} s")
        if time.monotonic() - begin > seconds:
            logger.error("fewer nodes than MIN for %g s: this process ends with code %d", seconds, Ending.TOO_FEW)
            raise SystemExit(int(Ending.TOO_FEW))
        time.sleep(POLL_SECONDS)

    # ---- seeing that there is a change ---------------------------------------------------------------------------

    def _look(self) -> None:
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
        if self.elastic.is_torn:
            raise ElasticError(f"generation {newest.generation}: {newest.reason}; this world cannot go on")
        if self.change is None and self.switcher.is_busy and newest.change == "planned":
            return  # first the switch that was asked for
        self.switcher.close()
        if self.change is not None:
            self.change.close()
        self.change = Change(newest, self.elastic)
        if self.engine.idle and self.elastic.member.id not in newest.members:
            self._go()

    def _follow(self, change: Change) -> None:
        """Learn from the new board; every member of either generation comes by here again and again."""
        if change.roll is None or not change.is_adopted:
            if not self._adopt(change):
                return
        if self.engine.rank == 0:
            self._lead(change)
        if change.proposal is None:
            self._take(change)

    def _adopt(self, change: Change) -> bool:
        """Know the numbers of all members; an idle member also learns what the job is doing."""
        if not self.engine.idle:
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
        if mine not in proposal.union:
            return
        if proposal.moves_nothing:
            change.board.post(f"prepared/{proposal.generation}/{mine}", {"error": None})
            return
        if self.engine.idle:
            self.switcher.rehearse(proposal.layout, proposal.members.index(mine))
        self.switcher.prepare(proposal, change.boards, lambda: self._check_memory(change, proposal))

    def _check_memory(self, change: Change, proposal: Proposal) -> None:
        nodes = {**self.engine.candidates.nodes, **self._candidates(change).nodes}
        needs = self.switcher.needs(proposal.layout, proposal.members)
        feasible.check_memory(change.board.member, needs, nodes)

    # ---- leading, on rank 0 --------------------------------------------------------------------------------------

    def _lead(self, change: Change) -> None:
        if not change.has_led:
            change.board.post("job", self._job_record(change))
            change.has_led = True
        if change.proposal is not None:
            return
        roll = self._roll(change)
        newcomers = [roll.numbers[one] for one in change.world.members if one not in self.elastic.roll.numbers]
        if newcomers and not change.board.all_posted("built", newcomers):
            return
        target = self._target(change)
        if target is None:
            return
        engine = self.engine
        before = engine.layout, engine.members
        proposal = Proposal(self.switcher.attempt + 1, *before, *target, None, int(engine.global_steps))
        change.board.post(f"change/{change.tries + 1}", proposal.to_json())

    def _target(self, change: Change) -> tuple[Layout, tuple[int, ...]] | None:
        """Where to go: (layout, members); the present ones if nothing has to move, None if there is no way."""
        engine, pool = self.engine, self._candidates(change)
        present = engine.layout, engine.members
        stay = [member for member in engine.members if member in pool.nodes]
        all_stay = len(stay) == len(engine.members)
        with_newcomers = change.tries < WITH_NEWCOMERS
        if not with_newcomers and all_stay:
            return present
        able = pool.members if with_newcomers else tuple(stay)
        choice = choose(
            self.elastic.rule,
            len(able),
            engine.layout,
            lambda layout: self.switcher.check(layout, processes=len(able)),
        )
        if choice.layout is not None and len(able) > choice.layout.world_size:
            why = f" ({choice.refusals[0]})" if choice.refusals else ""
            self._say_once(
                f"{choice.layout}: {len(able) - choice.layout.world_size} of {len(able)} members wait{why}; see "
                "dynatrain.layouts"
            )
        if all_stay and choice.layout in (None, engine.layout):
            return present
        if choice.layout is None:
            self._say_once(
                f"generation {change.world.generation}: no layout for {len(able)} members "
                f"({'; '.join(choice.refusals) or 'dynatrain.layouts names none'}); members that were told to leave "
                "cannot hand over their state"
            )
            return None
        return choice.layout, assign_slots(engine.vps, choice.layout, able, pool.nodes)

    def _job_record(self, change: Change) -> dict[str, Any]:
        """All that a newcomer has to know; plain JSON."""
        engine, job = self.engine, self.engine.job
        return {
            "attempt": self.switcher.attempt,
            "layout": engine.layout.to_dict(),
            "members": engine.members,
            "roll": self._roll(change).to_json(),
            "described": job.described,
            "rows": job.rows,
            "batch_sizes": asdict(job.batch_sizes),
            "seed": job.job_seed,
            "registered": engine.registered,
            "loaded": self.elastic.loaded,
        }

    # ---- meeting -------------------------------------------------------------------------------------------------

    def _meet(self, place: str) -> None:
        """On a working member: take part in what is due at this step."""
        change, ahead = self.change, 0 if self._is_paused else 1
        if change is None or change.proposal is None:
            due = self.on_board(lambda: self.switcher.is_due(ahead))
            if due:
                self.switcher.transact(place)
            return
        proposal, step = change.proposal, int(self.engine.global_steps)
        meet = self.on_board(lambda: agreement.meeting_step(change.board, proposal, self.engine.rank, step, ahead))
        if meet is None or step < meet:
            return
        if proposal.moves_nothing:
            self.on_board(lambda: change.board.decide(f"record/{proposal.generation}", {"commit": True, "reason": ""}))
            self._enter(change, proposal)
        else:
            self.switcher.transact(place)

    def _meet_idle(self, place: str) -> None:
        """On a member without work: take part in a switch that begins, or see how one without it has ended."""
        change = self.change
        if change is None:
            self.on_board(lambda: self.switcher.meet_idle(place))
            return
        proposal = change.proposal
        if proposal is None:
            return
        if self.switcher.is_busy and self.on_board(lambda: agreement.wait_for_rank_0(change.board, proposal)):
            self.switcher.transact(place)
            return
        record = self.on_board(lambda: change.board.read(f"record/{proposal.generation}"))
        if record is None:
            return
        self.switcher.close()
        if record["commit"]:
            self.engine.layout, self.engine.members = proposal.layout, proposal.members
            self._enter(change, proposal)
        else:
            self._failed(change, proposal, record["reason"])

    def after(self, preparation: Preparation, committed: bool, reason: str) -> None:
        """A switch has ended on this member, whoever asked for it."""
        change = self.change
        if committed:
            self.elastic.settle()
        else:
            self.elastic.let_go()
        if change is None or change.proposal is not preparation.proposal:
            if committed:
                self.retrain(preparation.proposal.members)
        elif committed:
            self._enter(change, preparation.proposal)
        else:
            self._failed(change, preparation.proposal, reason)

    def guard(self, preparation: Preparation) -> None:
        """Let a failure break a preparation off: it must not wait for the dead."""
        world = self.elastic.world if self.change is None else self.change.world
        generation = 0 if world is None else world.generation
        preparation.building = lambda: self.elastic.building(generation)
        preparation.stop = lambda: self.elastic.stop_if_over(generation)

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

    def _enter(self, change: Change, proposal: Proposal) -> None:
        """Stand in the later generation from here on, or go."""
        engine, boards, roll = self.engine, change.boards, self._roll(change)
        self.change = None
        self.switcher.attempt = proposal.generation
        if self.elastic.member.id not in change.world.members:
            self._go()
        if boards is None:
            raise RuntimeError("a change was committed without a board")
        boards[0].succeed(engine.control)
        candidates = self.elastic.candidates(change.world, roll)
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

    def _roll(self, change: Change) -> Roll:
        return self.elastic.roll if change.roll is None else change.roll

    def _candidates(self, change: Change) -> Any:
        return self.elastic.candidates(change.world, self._roll(change))

    @property
    def _pause_ms(self) -> float:
        last = self.engine.last_switch
        return 0.0 if last is None else last.pause_ms

    def _say_once(self, what: str) -> None:
        if what != self._said:
            self._said = what
            logger.warning("%s", what)
