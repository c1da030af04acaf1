"""What a member tells whoever watches the job: what its time goes into, boundary by boundary, and how switches went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_dynatrain.elastic.messages import LONGEST_WORDS, MOST_PHASES, Switched, Tally, clipped
from ds_dynatrain.report import SwitchEvent


class Clock:
    """Of the first engine of a process. now: seconds, of any clock that never goes back."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None
        """When this process came to the boundary that it is at, or left the last one."""
        self._step = 0
        self._is_at_boundary = False
        self._steps, self._samples = 0, 0
        self._stepping = self._held = self._saving = 0.0

    @property
    def tally(self) -> Tally:
        """What there is up to now, whole steps alone."""
        return Tally(
            steps=self._steps,
            samples=self._samples,
            stepping_seconds=self._stepping,
            held_seconds=self._held,
            saving_seconds=self._saving,
        )

    def arrive(self, step: int) -> None:
        """It comes to a boundary, with so many optimizer steps done."""
        is_first, seconds = self._since is None, self._lap()
        if not is_first and self._has_made_one(step):
            self._steps += 1
            self._stepping += seconds
        else:
            self._held += seconds
        self._is_at_boundary = True

    def depart(self, step: int, samples: int) -> None:
        """It goes on from the boundary, with the state of that step, before which there were so many samples."""
        self._held += self._lap()
        self._step, self._samples, self._is_at_boundary = step, samples, False

    def start_over(self, step: int) -> None:
        """What it has done since it left the last boundary is void; it goes on with the state of that step."""
        if not self._is_at_boundary:
            self._held += self._lap()
            self._steps += self._has_made_one(step)
            self._step = step

    def skip(self) -> None:
        """It has waited for work: that counts for nothing."""
        self._lap()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around whatever a checkpoint takes at a boundary."""
        begin = self._now()
        try:
            yield
        finally:
            self._saving += self._now() - begin

    def _has_made_one(self, step: int) -> bool:
        """Between two boundaries there is one step, or none; another number comes from a checkpoint."""
        return step == self._step + 1

    def _lap(self) -> float:
        """Seconds since the last call; before the first one nothing counts."""
        since, self._since = self._since, self._now()
        return 0.0 if since is None else self._since - since


def told(engine: int, event: SwitchEvent) -> Switched:
    """A switch of an engine, by the engine's number, in what a message may hold."""
    return Switched(
        engine=engine,
        number=event.generation,
        committed=event.outcome == "committed",
        step=event.step,
        source=_words(event.source.describe()),
        target=_words(event.target.describe()),
        members=len(event.target.members),
        pause_ms=event.pause_ms,
        certificate_ms=event.certificate_ms,
        phases_ms=dict(list(event.phases_ms.items())[:MOST_PHASES]),
        bytes_sent=event.bytes_sent,
        bytes_minimum=event.bytes_minimum,
        cause=_words(event.cause),
        reason=_words(event.reason),
    )


def _words(text: str) -> str:
    """In one line, and not too long."""
    return clipped(" ".join(text.split()), LONGEST_WORDS)
