"""Membership of a launch of fixed size: all members are present from the start, and none joins later."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ds_dynatrain.engine.driver import Driver
from ds_dynatrain.engine.parts import EngineParts, parts_of
from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.membership.liveness import (
    FIRST_ERROR,
    Heartbeat,
    ending_error,
    first_error,
    is_consequence,
    post_end,
    say_last_words,
)
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.membership import Membership
from ds_dynatrain.reshard.process import PROCESS

T = TypeVar("T")
IDLE_POLL_SECONDS = 0.02
SEE_OFF_SECONDS = 5.0


class FixedLaunch(Membership):
    """Membership of a job whose members never change.

    A member learns of deaths from missing heartbeats, and a lost peer ends the job.
    """

    def __init__(self) -> None:
        self._driver = Driver()
        self._is_at_fault = False
        """Whether an error of this member was the first, and has ended the job."""

    def add(self, engine: EngineCore) -> None:
        """Start this member's heartbeat, by which waiting members see that it is alive."""
        parts_of(engine).heartbeat = Heartbeat(engine.control)

    def say_end(self, engine: EngineCore) -> None:
        """Post that the script has ended, including the error that ended it, if there was one."""
        error = ending_error()
        self._is_at_fault = say_last_words(engine.control, error)
        post_end(engine.control, error)
        beating = parts_of(engine).heartbeat
        if beating is not None:
            beating.stop()

    def end_script(self, engine: EngineCore) -> None:
        """Wait, at the end of the script, until other members have read that the job has ended, or why.

        Member 0 waits for idle and late members, because its process may serve the key-value store. A member whose
        error has ended the job waits for all others, because its launcher kills them as soon as its process has ended.
        """
        board = engine.control
        waiting = list[str]()
        if board.member == 0:
            waiting += [f"left/{member}" for member in engine.candidates.members if member not in engine.members]
            waiting += [f"ended/{member}" for member in PROCESS.sync_points.late]
        if self._is_at_fault:
            waiting += [f"{FIRST_ERROR}/{member}" for member in engine.members]
        if waiting:
            with suppress(MemberMissing, RuntimeError):  # the store may have ended with another member
                board.wait(dict(enumerate(waiting)), "the ends of others", time.monotonic() + SEE_OFF_SECONDS)

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Take part in a switch that is due or, on an idle member, wait for one; see `Membership.at_boundary`."""
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
        """Wait until this idle member is given work. Raises SystemExit(0) when the others' scripts have ended."""
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

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the result of `call`. If a peer is lost during the call, the error tells why that peer has ended."""
        try:
            return call()
        except RuntimeError as error:
            found = first_error(engine.control) if is_consequence(error) else None
            if found is None:
                raise
            raise RuntimeError("the job has ended with an error of member {}: {}".format(*found)) from error

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return the output of a forward pass. Also keep the output while a late switch may still discard the batch."""
        return parts_of(engine).remember(output) if engine.awaits_late else output
