"""A member's reports to the coordinator: how its time was spent in steps and between them, and how switches ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_dynatrain.elastic.messages import LONGEST_WORDS, MOST_PHASES, Switched, Tally, clipped
from ds_dynatrain.report import SwitchEvent


class Clock:
    """Clock that adds up how much time a process spends in training steps, between steps, and in saves. It covers the
    process's first engine.

    now: returns the time in seconds by any monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None
        """Time at which this process reached its current boundary or, between boundaries, left the last one."""
        self._step = 0
        self._is_at_boundary = False
        self._steps, self._samples = 0, 0
        self._stepping = self._held = self._saving = 0.0

    @property
    def tally(self) -> Tally:
        """Time and steps counted so far. A step that is still in progress is not included."""
        return Tally(
            steps=self._steps,
            samples=self._samples,
            stepping_seconds=self._stepping,
            held_seconds=self._held,
            saving_seconds=self._saving,
        )

    def arrive(self, step: int) -> None:
        """Record that the process has reached a boundary (the point between two optimizer steps).

        step: the number of optimizer steps done.
        """
        is_first, seconds = self._since is None, self._seconds_since_last()
        if not is_first and self._has_made_one(step):
            self._steps += 1
            self._stepping += seconds
        else:
            self._held += seconds
        self._is_at_boundary = True

    def depart(self, step: int, samples: int) -> None:
        """Record that training continues after a boundary (the point between two optimizer steps).

        step: the number of optimizer steps done.
        samples: the number of samples trained on.
        """
        self._held += self._seconds_since_last()
        self._step, self._samples, self._is_at_boundary = step, samples, False

    def start_over(self, step: int) -> None:
        """Count the time of an interrupted step as time spent between steps, because the work done in it is lost.

        step: the step from which training resumes.
        """
        if not self._is_at_boundary:
            self._held += self._seconds_since_last()
            self._steps += self._has_made_one(step)
            self._step = step

    def skip(self) -> None:
        """Leave the time since the clock's last call out of all figures, because the member was idle."""
        self._seconds_since_last()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager for saving a checkpoint. The duration of its block counts as saving time."""
        begin = self._now()
        try:
            yield
        finally:
            self._saving += self._now() - begin

    def _has_made_one(self, step: int) -> bool:
        """Return whether exactly one step was taken since the last boundary. After a checkpoint was loaded, the step
        number may differ by any amount."""
        return step == self._step + 1

    def _seconds_since_last(self) -> float:
        """Return the seconds since the last call of this method; 0 in the first call."""
        since, self._since = self._since, self._now()
        return 0.0 if since is None else self._since - since


def switch_message(engine: int, event: SwitchEvent) -> Switched:
    """Return the message that reports a switch to the coordinator. Its texts are truncated to the maximum length in
    messages.

    engine: number of the engine that switched.
    """
    return Switched(
        engine=engine,
        number=event.generation,
        committed=event.outcome == "committed",
        step=event.step,
        source=_one_line(event.source.describe()),
        target=_one_line(event.target.describe()),
        members=len(event.target.members),
        pause_ms=event.pause_ms,
        certificate_ms=event.certificate_ms,
        phases_ms=dict(list(event.phases_ms.items())[:MOST_PHASES]),
        bytes_sent=event.bytes_sent,
        bytes_minimum=event.bytes_minimum,
        cause=_one_line(event.cause),
        reason=_one_line(event.reason),
    )


def _one_line(text: str) -> str:
    """Return a text on one line, truncated to the maximum length of a text in a message."""
    return clipped(" ".join(text.split()), LONGEST_WORDS)
