"""Membership of a launch of fixed size: all are there from the start, and nobody comes later."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import nn

from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.adapters.worlds import Note, ignore
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.liveness import Heartbeat, Watch, ending_error, post_end, say_last_words
from ds_dynatrain.engine.members.membership import EndWatch
from ds_dynatrain.engine.parts import EngineParts, parts_of
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.transaction.meeting import Outcome
from ds_dynatrain.report import SwitchEvent

IDLE_POLL_SECONDS = 0.02
SEE_OFF_SECONDS = 5.0

T = TypeVar("T")


class FixedLaunch:
    """See `membership.Membership`."""

    is_newcomer = restores = is_aborted = takes_sigterm = saves_jointly = False
    formed = 0, ""

    @property
    def node(self) -> str:
        """This process's host."""
        return platform.node()

    # ---- an engine is made, and ends ---------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """A launch of fixed size refuses nothing."""

    def new_status(self) -> GroupStatus | None:
        """A lost peer is the end of the job."""
        return None

    def building(self, generation: int, engine: int) -> AbstractContextManager[Note]:
        """Nothing can come in between."""
        return nullcontext(ignore)

    def building_more(self, engine: int) -> AbstractContextManager[Note]:
        """Likewise."""
        return nullcontext(ignore)

    def stop_if_over(self, generation: int) -> None:
        """Never."""

    def could_not_build(self) -> None:
        """The launcher sees it."""

    def add(self, engine: EngineCore) -> None:
        """It beats, for those who wait for work."""
        beating = parts_of(engine).heartbeat = Heartbeat(engine.control)
        beating.start()

    def begin(self, world: World, members: tuple[int, ...]) -> None:
        """There are no generations of members."""

    def say_end(self, engine: EngineCore) -> None:
        """On the board, with the error that ended the job, if there was one."""
        error = ending_error()
        say_last_words(engine.control, error)
        post_end(engine.control, error)
        beating = parts_of(engine).heartbeat
        if beating is not None:
            beating.stop()

    def remove(self, engine: EngineCore) -> None:
        """The others wait for nothing."""

    def end_script(self, engine: EngineCore) -> None:
        """The store may live in this process: who is released by it, idle or late, reads that before it goes."""
        board = engine.control
        if board.member != 0:
            return
        waiting = [f"left/{member}" for member in engine.candidates.members if member not in engine.members]
        waiting += [f"ended/{member}" for member in PROCESS.sync_points.late]
        deadline = time.monotonic() + SEE_OFF_SECONDS
        while waiting and time.monotonic() < deadline:
            waiting = [key for key in waiting if board.read(key) is None]
            time.sleep(IDLE_POLL_SECONDS)

    def watch(self, board: Control) -> EndWatch:
        """By heartbeats."""
        return Watch(board)

    def activate_between(self, engine: EngineCore) -> None:
        """Of the processes of the launch."""
        engine.launch.install()

    # ---- training ----------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Take part in a switch that is due."""
        parts = parts_of(engine)
        if not parts.idle:
            if parts.has_open_window:
                return parts.window_in_words
            parts.fallback.at_boundary()
            if parts.switcher.connects_ahead():
                parts.attempts.connect_ahead()
            if not parts.switcher.is_due():
                return ""
            parts.attempts.transact(place)
        if parts.idle:
            self._wait_for_work(parts, place)
            parts.settle_fallback()
        return ""

    def waiting_change(self, engine: EngineCore) -> str:
        """Return "": nobody comes or goes."""
        return ""

    def _wait_for_work(self, engine: EngineParts, place: str) -> None:
        """Poll the board until this member works; SystemExit(0) when the working members' scripts have ended."""
        switcher, watch = engine.switcher, self.watch(engine.control)
        engine.close_loaders()  # their processes must not outlive the world that they fetched for
        while engine.idle:
            switcher.look_for_proposal()
            switcher.meet_idle(place)
            if engine.idle:
                switcher.tell_changes()
                if watch.look(engine.members):
                    engine.attempts.cancel()
                    engine.control.post(f"left/{engine.control.member}", True)
                    raise SystemExit(0)
                switcher.pass_time(IDLE_POLL_SECONDS)

    def open_window(self, engine: EngineCore) -> None:
        """What was void before it is over."""
        engine.is_discarded = False

    def stays_discarded(self, engine: EngineCore) -> bool:
        """No batch is discarded."""
        return False

    def before_micro_batch(self, engine: EngineCore) -> None:
        """In the middle of a global batch nothing happens."""

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """The call."""
        return call()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """The output; kept while the batch may become void."""
        return parts_of(engine).window.remember(output) if engine.awaits_late else output

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineCore) -> None:
        """The launcher's store is there to the end."""

    def able(self, engine: EngineCore) -> tuple[int, ...]:
        """All."""
        return engine.candidates.members

    def guard(self, preparation: Preparation) -> None:
        """It has the preparation's own time-outs."""

    def entered(self, engine: EngineCore) -> None:
        """A lost peer is the end of the job."""

    def ended(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """Nothing follows."""

    def retrain(self, members: tuple[int, ...]) -> None:
        """Likewise."""

    def tell(self, engine: EngineCore, event: SwitchEvent) -> None:
        """Nobody watches: there is the report file, and there are DeepSpeed's monitors."""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """Nobody comes later."""
        return None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """Likewise."""

    def say_replaced(self, stretch: tuple[int, ...]) -> None:
        """Nobody has copies."""
