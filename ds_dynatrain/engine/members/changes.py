"""Members come and go: what a process does about it at its boundaries, in a job that knows no fixed launch.

A later generation has a notice board of its own. Rank 0 of those that train leads: it posts the job's record, by which
newcomers build their engines, waits for them, and proposes the layout that the policy has for so many members. From
there it is a switch like any other, over the new board. Whoever takes part in it stands in the later generation when it
is committed; where nothing moves (a member comes for which there is no place, an idle one goes) all step over at the
meeting, without a switch. A change that is rolled back is tried once more, then without the newcomers.

Of several engines in a process the first one speaks for all: at its boundaries, when no other is in a global batch,
members come and go, for all engines in one transaction (`together`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch.distributed as td

from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.forming import Forming
from ds_dynatrain.engine.members.rounds import Rounds
from ds_dynatrain.engine.members.taking_part import TakingPart
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.report import logger

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine

POLL_SECONDS = 0.02
END_POLL_SECONDS = 0.25


class Changes(TakingPart):
    """One process's part in changes of members; a boundary of an engine leads here in an elastic job."""

    def __init__(self, elastic: Elastic) -> None:
        super().__init__(elastic)
        self.forming = Forming(elastic, self)
        self._rounds = Rounds()
        self._looked = 0.0

    def stand(self, engine: DynatrainEngine, place: str, window_is_open: bool) -> None:
        """A boundary of an engine. SystemExit(0) on a member that leaves, or has waited when the job ended."""
        if engine is not self.engine:
            self._stand_beside(engine, place, window_is_open)
            return
        self._place = place
        self._rounds.begin()
        self._open_fates()
        self.forming.see_failure()
        if self.elastic.is_torn and not self.engine.idle:
            self.forming.form_anew()
        self._end_void()
        if not self.engine.idle and not window_is_open and not self._others_are_busy():
            self._stand_working()
        if self.engine.idle:
            self.wait_for_work()
            self.switcher.settle_fallback()
            if self.elastic.is_torn:  # somebody died just when this member got its share
                self.forming.form_anew()
        self.elastic.member.progress(int(self.engine.global_steps), str(self.engine.layout), self._pause_ms)

    def _stand_beside(self, engine: DynatrainEngine, place: str, window_is_open: bool) -> None:
        """A boundary of another engine than the first: switches that the user asked of it take place here.

        ConfigError if the script comes here before it has come to one of the first: newcomers would wait here.
        WorldChanged if it comes here for ever.
        """
        if not self.engine.has_stood:
            raise ConfigError(
                f"members come and go between two global batches of the engine that was made first, and the script "
                f"asks engine {engine.job.number} for a batch ({place!r}) before that one: make this engine first, or "
                "ask that one first"
            )
        self.forming.see_failure()
        if self.elastic.is_torn:
            self.forming.form_anew()
        self._rounds.stay(engine.job.number, self.engine.is_void)
        if self.engine.is_void or engine.idle or window_is_open:
            return
        if self.change is not None and self.change.proposals:
            return  # what is prepared is a part of a change of members, which begins where the first engine stands
        if self.on_board(lambda: engine._switcher.is_due()):
            engine._switcher.transact(place)

    def _others_are_busy(self) -> bool:
        """Whether another engine is in a global batch: the same on all members, who run one script."""
        busy = [one for one in self.beside if one.has_open_window]
        newest = self.elastic.member.newest
        if busy and newest is not None and newest.generation > self.elastic.generation:
            self.leader.say_once(
                f"engine {busy[0].job.number} is in a global batch whenever the first engine begins one: members can "
                "come and go only where none is"
            )
        return bool(busy)

    def _open_fates(self) -> None:
        for engine in self.engines:
            if engine.world is not None and engine.world.fate is not None:
                engine.world.fate.is_closed = False

    def keeps_void(self, engine: DynatrainEngine) -> bool:
        """Whether what an engine deals stays void: the first one's batch, in which the world was torn, is not over."""
        return engine is not self.engine and self.engine.is_void

    def _end_void(self) -> None:
        """The first engine begins a global batch: what others have dealt since the world was torn is dealt again."""
        for engine in self.beside:
            if engine.is_void:
                with engine.turn():
                    engine.void_window()
                engine.end_void()

    def _stand_working(self) -> None:
        begin = time.monotonic()
        while not self.engine.idle:
            self.save(self.switcher.save_if_due)
            self.look()
            self.meet()
            if self.elastic.is_torn and not self.engine.idle:
                self.forming.form_anew()
            if self.engine.idle or not self._is_paused:
                return
            self._wait_for_members(begin)

    def wait_for_work(self) -> None:
        """On an idle member: until it works; SystemExit(0) when the job has ended, or this member was told to go."""
        for engine in self.engines:
            engine.close_loaders()  # their processes must not outlive the world that they fetched for
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

    def _wait_for_members(self, begin: float) -> None:
        """Below MIN: hold the state and make no step, until others come or nobody has come for too long."""
        seconds = self.elastic.wait_seconds
        self.leader.say_once(f"fewer nodes than MIN: training waits for others, with its state, for {seconds:g} s")
        if time.monotonic() - begin > seconds:
            self.save(self.switcher.save_now)
            logger.error("fewer nodes than MIN for %g s: this process ends with code %d", seconds, Ending.TOO_FEW)
            raise SystemExit(int(Ending.TOO_FEW))
        time.sleep(POLL_SECONDS)

    @property
    def _pause_ms(self) -> float:
        last = self.engine.last_switch
        return 0.0 if last is None else last.pause_ms
