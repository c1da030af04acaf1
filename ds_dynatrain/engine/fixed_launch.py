"""Membership of a launch of fixed size: all members are present from the start, and none joins later."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from ds_dynatrain.engine.driver import Driver
from ds_dynatrain.engine.parts import EngineParts, parts_of
from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.membership.liveness import Heartbeat, ending_error, post_end, say_last_words
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.membership import Membership
from ds_dynatrain.reshard.process import PROCESS

IDLE_POLL_SECONDS = 0.02
SEE_OFF_SECONDS = 5.0


class FixedLaunch(Membership):
    """Membership of a job whose generation never changes.

    A member learns of deaths from missing heartbeats, and a lost peer ends the job.
    """

    def __init__(self) -> None:
        self._driver = Driver()

    def add(self, engine: EngineCore) -> None:
        """Start this member's heartbeat, which waiting members observe."""
        parts_of(engine).heartbeat = Heartbeat(engine.control)

    def say_end(self, engine: EngineCore) -> None:
        """Post that the script has ended, including the error that ended it, if there was one."""
        error = ending_error()
        say_last_words(engine.control, error)
        post_end(engine.control, error)
        beating = parts_of(engine).heartbeat
        if beating is not None:
            beating.stop()

    def end_script(self, engine: EngineCore) -> None:
        """Wait, on member 0, until idle and late members have read that the job has ended. Needed because member 0's
        process may serve the key-value store."""
        board = engine.control
        if board.member != 0:
            return
        waiting = [f"left/{member}" for member in engine.candidates.members if member not in engine.members]
        waiting += [f"ended/{member}" for member in PROCESS.sync_points.late]
        if waiting:
            with suppress(MemberMissing):
                board.wait(dict(enumerate(waiting)), "the ends of others", time.monotonic() + SEE_OFF_SECONDS)

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Take part in a switch that is due, or wait for one; see `Membership.at_boundary`."""
        parts = parts_of(engine)
        if not engine.idle:
            if parts.has_open_window:
                return parts.window_in_words
            for extension in parts.extensions:
                extension.save_if_due()
            self._driver.advance(parts, place)
        if parts.idle:
            self._wait_for_work(parts, place)
        return ""

    def _wait_for_work(self, engine: EngineParts, place: str) -> None:
        """Wait until this member works. Raises SystemExit(0) when the working members' scripts have ended."""
        engine.close_loaders()  # their processes must not outlive the world that they fetched for
        watch = self.watch(engine.control)
        while engine.idle:
            self._driver.advance(engine, place)
            if engine.idle:
                engine.tell_of_change()
                if watch.look(engine.members):
                    engine.cancel()
                    engine.control.post(f"left/{engine.control.member}", True)
                    raise SystemExit(0)
                engine.pass_time(IDLE_POLL_SECONDS)
        engine.note_safe()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return the output of a forward pass. Keep it, too, while a late switch may still discard the batch."""
        return parts_of(engine).remember(output) if engine.awaits_late else output
