"""Moves that a job makes by itself: asked for as any switch is, judged by the windows that follow, and taken back if
they have made steps slower."""

from __future__ import annotations

from ds_dynatrain.balance.course import Course, Wanted
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.pending import PendingSwitch
from ds_dynatrain.engine.switcher import Reason
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.space import Layout

CAUSE = "balance"


class Acting:
    """What an engine does about its course, which is the same on all members that work: all ask at one place."""

    def __init__(self, engine: EngineParts, course: Course) -> None:
        self._engine, self.course = engine, course
        self._asked: tuple[Wanted, PendingSwitch, Layout] | None = None
        """What is on its way: what was wanted, the switch, and the layout before it."""
        self._open: SwitchEvent | None = None
        """The move that waits to be judged."""
        engine.switcher.listeners.append(self._note_switch)

    @property
    def is_open(self) -> bool:
        """Whether a move waits to be judged, or to be made."""
        return self._asked is not None or self.course.history.open is not None or self.course.needs_steps

    def follow(self, course: Course, present: Layout) -> None:
        """Go on with the course that all members have since a window has ended."""
        self.course = course
        logger.debug("balance: step %d: %s", self._engine.global_steps, course.why or "nothing was decided")
        if course.gain is not None and self._open is not None:
            self._engine.switcher.note_gain(self._open, course.gain)
        if course.verdict is not None:
            self._open = None
        if course.wanted is not None and self._asked is None:
            self._move(course.wanted, present)

    def _move(self, wanted: Wanted, present: Layout) -> None:
        engine = self._engine
        reason = Reason(CAUSE, wanted.predicted_gain, tuple(engine.members[rank] for rank in wanted.without))
        try:
            pending = engine.switcher.ask(wanted.layout, None, {}, late=False, reason=reason)
        except SwitchRefused as refusal:  # as where the script has a switch of its own pending, or members change
            self._put_off(str(refusal))
            return
        self._asked = wanted, pending, present
        if engine.rank == 0:
            what = "back to" if wanted.back else "to"
            logger.info("balance: %s %s: %s", what, wanted.layout, wanted.why)

    def look(self) -> None:
        """See whether what was asked for has come to nothing; called after each step."""
        if self._asked is None:
            return
        event = self._asked[1].event
        if event is not None:  # a committed one has gone through `_note_switch`
            self._asked = None
            self._put_off(event.reason)

    def _put_off(self, reason: str) -> None:
        self.course = self.course.failed(self._engine.global_steps)
        if self._engine.rank == 0:
            logger.info("balance: nothing moves for now: %s", reason)

    def _note_switch(self, event: SwitchEvent) -> None:
        """Note a switch that was committed; one that was asked for elsewhere leaves nothing to judge."""
        if self._asked is None or event.generation != self._asked[1].generation:
            self._open, self.course = None, self.course.overtaken()
            return
        (wanted, _, left), self._asked = self._asked, None
        self.course, self._open = self.course.moved(wanted, event.step, left), event
