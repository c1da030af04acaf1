"""How much of a job's time became training, and what the rest was lost to.

Members tell how long they stepped and stood still (`messages.Tally`), by their own clocks; of these the member of rank
0 counts. The coordinator knows why they stood still. Causes have the names of Google's `ml-goodput-measurement`
(`BadputType`), the closest one each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from ds_dynatrain.elastic.messages import Tally

Cause = Literal[
    "PROGRAM_STARTUP",
    "TRAINING_PREP",
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "WASTED_PROGRESS_FROM_DISRUPTION",
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "ELASTIC_SLICE_DOWN",
    "ELASTIC_SCALE_UP",
    "ELASTIC_REINITIALIZATION",
    "OTHER",
]
MEANING: dict[Cause, str] = {
    "PROGRAM_STARTUP": "from the first node to the first world: imports, waiting for MIN nodes",
    "TRAINING_PREP": "from the first world to the first step: engines are made, the first batch is loaded",
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": "steps waited for fallback checkpoints",
    "WASTED_PROGRESS_FROM_DISRUPTION": "steps that were made, lost by a death, and made again",
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": "from the last step before a failure to the first one after it",
    "ELASTIC_SLICE_DOWN": "training stood still for members that left, or waits for nodes, below MIN",
    "ELASTIC_SCALE_UP": "training stood still for members that joined",
    "ELASTIC_REINITIALIZATION": "training stood still for switches that the script or an extension asked for",
    "OTHER": "everything else at the boundaries between steps: copies of state, measuring",
}
MOST_BLAMES = 16


@dataclass(frozen=True)
class Blame:
    """What lost time is due to from then on. stands: nobody trains until it is over; else there is but a pause."""

    cause: Cause
    since: float
    stands: bool


@dataclass(frozen=True)
class Progress:
    """What a member has done since it was heard of last. lost_steps: that were made, and count no more."""

    steps: int
    lost_steps: int
    stepping: float
    held: float
    saving: float

    @classmethod
    def between(cls, before: Tally, after: Tally, advanced: int) -> Progress:
        """advanced: by how much its step number has changed."""
        steps = max(0, after.steps - before.steps)
        return cls(
            steps=steps,
            lost_steps=max(0, steps - advanced),
            stepping=max(0.0, after.stepping_seconds - before.stepping_seconds),
            held=max(0.0, after.held_seconds - before.held_seconds),
            saving=max(0.0, after.saving_seconds - before.saving_seconds),
        )


class Goodput:
    """The account of one job. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self.productive = 0.0
        """Seconds of steps that count."""
        self._lost: defaultdict[Cause, float] = defaultdict(float)
        self._blames: list[Blame] = []
        self._pause, self._attributed = 0.0, 0.0
        """What switches have told of the present cause, and what was attributed to it by the member's own clock."""
        self._begin: float | None = None
        self._end: float | None = None
        self._step_seconds = 0.0

    def begin(self, now: float) -> None:
        """Somebody is there; only the first call counts."""
        if self._begin is None:
            self._begin = now
            self.blame("PROGRAM_STARTUP", now, stands=True)

    def end(self, now: float) -> None:
        """The job has finished."""
        if self._end is None:
            self._end = now
            for blame, seconds in self._standstills(now):
                self._lost[blame.cause] += seconds
            self.over()

    def blame(self, cause: Cause, now: float, stands: bool) -> None:
        """Lost time is due to that from now on, until `over`."""
        if self._blames and not self._blames[-1].stands:
            self._blames.pop()
        if len(self._blames) == MOST_BLAMES or (self._blames and self._blames[-1].cause == cause):
            return
        self._blames.append(Blame(cause, now, stands))
        self._pause = self._attributed = 0.0

    def paused(self, seconds: float) -> None:
        """A switch has held training up for so long."""
        self._pause += seconds

    def add(self, made: Progress, now: float) -> float:
        """What the member of rank 0 has done since it was heard of last; how long training stood still.

        That member may not have been there for all of a standstill, so the caller's clock counts as well.
        """
        if made.steps:
            self._step_seconds = made.stepping / made.steps
        saving = min(made.saving, made.held)
        stood = sum(seconds for _, seconds in self._standstills(now))
        pause = max(0.0, self._pause - self._attributed)
        still = max(made.held - saving, stood - made.stepping if stood else pause)
        self._lost["UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"] += saving
        self._spread(still, now)
        wasted = min(made.lost_steps * self._step_seconds, self.productive + made.stepping)
        self.productive += made.stepping - wasted
        self._lost["WASTED_PROGRESS_FROM_DISRUPTION"] += wasted
        return still

    def over(self) -> None:
        """Training goes on: what was to blame is past."""
        self._blames.clear()
        self._pause = self._attributed = 0.0

    def lost(self, now: float) -> dict[Cause, float]:
        """Seconds by cause, also those of the standstill that there may be now."""
        found = dict(self._lost)
        for blame, seconds in self._standstills(now):
            found[blame.cause] = found.get(blame.cause, 0.0) + seconds
        return {cause: found.get(cause, 0.0) for cause in MEANING}

    def elapsed(self, now: float) -> float:
        """Seconds since somebody was there, to the end."""
        return 0.0 if self._begin is None else (now if self._end is None else self._end) - self._begin

    def ratio(self, now: float) -> float:
        """ETTR: productive seconds by all that are accounted for; the step under way is not yet."""
        whole = self.productive + sum(self.lost(now).values())
        return self.productive / whole if whole else 0.0

    def _standstills(self, now: float) -> list[tuple[Blame, float]]:
        """How long each took by this clock; the last one until now."""
        ends = [*(blame.since for blame in self._blames[1:]), now]
        pairs = zip(self._blames, ends, strict=False)
        return [(blame, max(0.0, end - blame.since)) for blame, end in pairs if blame.stands]

    def _spread(self, seconds: float, now: float) -> None:
        """Lost seconds over what they are due to: standstills as long as this clock says, the last one the rest."""
        standstills = self._standstills(now)
        for blame, length in standstills:
            taken = min(length, seconds)
            self._lost[blame.cause] += taken
            seconds -= taken
        last = self._blames[-1].cause if self._blames else "OTHER"
        self._lost[last] += seconds
        self._blames = [Blame(each.cause, now, each.stands) for each in self._blames[-1:]]
        self._attributed += seconds if self._blames else 0.0
