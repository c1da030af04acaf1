"""The coordinator's history of a job, for people who watch it: how its members changed, and how its time was spent.

No decision depends on this history, and its size is bounded. Members report, by their own clocks, how long they spent
in steps and how long they were stopped (`messages.Tally`); only the report of rank 0 counts. The coordinator knows why
they were stopped. Causes of lost time have the names of the closest causes in Google's `ml-goodput-measurement`
(`BadputType`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_dynatrain.elastic.generation import Generation, Text, WireRecord, nodes_of
from ds_dynatrain.elastic.messages import Count, Report, Seconds, Switched, SwitchOutcome

MOST_POINTS = 1024
MOST_CHANGES = 256
LEAST_SPACING = 0.5
"""The minimum number of seconds between two points. Whenever there are too many points, pairs of points are merged and
the spacing doubles."""
PAUSE_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds, in seconds, of the histogram's buckets for pauses."""

Kind = Literal["start", "join", "leave", "failure", "restore", "taken over"]
"""Why the world has changed."""
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
    """A period of lost training time and its cause.

    cause: the name of the cause; `MEANING` explains it.
    since: when the period began.
    is_standstill: whether no step is taken in this period. If not, training only pauses for a while.
    """

    cause: Cause
    since: float
    is_standstill: bool


class Goodput:
    """Account of how one job's time was spent. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self.productive = 0.0
        """Seconds spent in steps that count."""
        self._lost: defaultdict[Cause, float] = defaultdict(float)
        self._blames: list[Blame] = []
        self._pause, self._attributed = 0.0, 0.0
        """Seconds of pauses that switches have reported for the current cause, and seconds of other lost time that
        already count towards that cause."""
        self._begin: float | None = None
        self._end: float | None = None
        self._step_seconds = 0.0

    def begin(self, now: float) -> None:
        """Start the account. Called whenever a peer connects; only the first call has an effect."""
        if self._begin is None:
            self._begin = now
            self.blame("PROGRAM_STARTUP", now, is_standstill=True)

    def end(self, now: float) -> None:
        """Close the account. Called when the job has finished; only the first call has an effect."""
        if self._end is None:
            self._end = now
            self._lost.update(self.lost(now))
            self.end_losses()

    def blame(self, cause: Cause, now: float, is_standstill: bool) -> None:
        """Attribute lost time to this cause from now on, until `end_losses` is called.

        is_standstill: whether no step is taken until then.
        """
        if self._blames and not self._blames[-1].is_standstill:
            self._blames.pop()
        if len(self._blames) == MOST_BLAMES or (self._blames and self._blames[-1].cause == cause):
            return
        self._blames.append(Blame(cause, now, is_standstill))
        self._pause = self._attributed = 0.0

    def paused(self, seconds: float) -> None:
        """Add the duration, in seconds, of a pause that a switch has caused."""
        self._pause += seconds

    def add(self, steps: int, lost_steps: int, stepping: float, held: float, saving: float, now: float) -> float:
        """Add the work that rank 0 has reported, and return the number of seconds for which training was stopped.

        The member may have joined in the middle of a standstill, so that its report does not cover the beginning. The
        duration of the standstill by the caller's clock is therefore taken into account as well.

        steps: number of optimizer steps taken.
        lost_steps: number of these steps that no longer count.
        stepping: seconds spent in steps.
        held: seconds spent at boundaries (the points between two optimizer steps) and in discarded global batches.
        saving: the part of `held` that was spent on checkpoints.
        now: the time by the caller's clock.
        """
        if steps:
            self._step_seconds = stepping / steps
        saving = min(saving, held)
        stood = sum(seconds for _, seconds in self._standstills(now))
        pause = max(0.0, self._pause - self._attributed)
        still = max(held - saving, stood - stepping if stood else pause)
        self._lost["UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"] += saving
        self._spread(still, now)
        wasted = min(lost_steps * self._step_seconds, self.productive + stepping)
        self.productive += stepping - wasted
        self._lost["WASTED_PROGRESS_FROM_DISRUPTION"] += wasted
        return still

    def end_losses(self) -> None:
        """Record that training continues, so that no more time is lost to the current causes."""
        self._blames.clear()
        self._pause = self._attributed = 0.0

    def lost(self, now: float) -> dict[Cause, float]:
        """Return the seconds lost to each cause, including a standstill that has not ended yet."""
        found = dict(self._lost)
        for blame, seconds in self._standstills(now):
            found[blame.cause] = found.get(blame.cause, 0.0) + seconds
        return {cause: found.get(cause, 0.0) for cause in MEANING}

    def elapsed(self, now: float) -> float:
        """Return the seconds from the first peer's connection to the end of the job, or to `now` if the job has not
        ended."""
        return 0.0 if self._begin is None else (now if self._end is None else self._end) - self._begin

    def ratio(self, now: float) -> float:
        """Return the effective training time ratio (ETTR): productive seconds as a fraction of all seconds accounted
        for. A step that is still in progress is not included."""
        whole = self.productive + sum(self.lost(now).values())
        return self.productive / whole if whole else 0.0

    def _standstills(self, now: float) -> list[tuple[Blame, float]]:
        """Return each period without steps together with its duration in seconds by the caller's clock. A period that
        has not ended is counted until `now`."""
        ends = [*(blame.since for blame in self._blames[1:]), now]
        pairs = zip(self._blames, ends, strict=False)
        return [(blame, max(0.0, end - blame.since)) for blame, end in pairs if blame.is_standstill]

    def _spread(self, seconds: float, now: float) -> None:
        """Distribute lost seconds over the current causes: each standstill gets its duration by the caller's clock, and
        the most recent cause gets the rest."""
        standstills = self._standstills(now)
        for blame, length in standstills:
            taken = min(length, seconds)
            self._lost[blame.cause] += taken
            seconds -= taken
        last = self._blames[-1].cause if self._blames else "OTHER"
        self._lost[last] += seconds
        self._blames = [Blame(each.cause, now, each.is_standstill) for each in self._blames[-1:]]
        self._attributed += seconds if self._blames else 0.0


@dataclass(frozen=True)
class Point:
    """Progress of training between two points in time.

    seconds: time between the two points.
    stepping: the part of `seconds` that was spent in steps.
    loss: mean of the members' losses at the end; None if no member reported a finite loss.
    """

    at: float
    step: int
    size: int
    steps: int
    samples: int
    stepping: float
    seconds: float
    loss: float | None = None

    def merged_with(self, later: Point) -> Point:
        """Return one point that covers this one and a later one."""
        sums = {
            name: getattr(self, name) + getattr(later, name) for name in ("steps", "samples", "stepping", "seconds")
        }
        return replace(later, **sums)


class GenerationChange(WireRecord):
    """Record of a published generation and of the training time that the change to it cost.

    still_seconds: how long training was stopped until the generation was entered. None until the duration is known;
        stays None if another generation was published before any member entered this one.
    lost_steps: number of optimizer steps whose results were lost.
    """

    generation: Count
    kind: Kind
    at: float
    size: Count
    nodes: Count
    paused: bool
    reason: Text
    still_seconds: Seconds | None = None
    lost_steps: Count = 0


class SwitchRecord(SwitchOutcome):
    """Record of one switch. The durations of its phases are listed in the order in which the phases ran."""

    at: float


@dataclass
class Counts:
    """Counters since the coordinator's start; none of them ever decreases."""

    steps: int = 0
    samples: int = 0
    lost_steps: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    committed: int = 0
    rolled_back: int = 0
    sent_bytes: int = 0
    pauses: list[int] = field(default_factory=lambda: [0] * (len(PAUSE_BUCKETS) + 1))
    """Number of pauses in each bucket of `PAUSE_BUCKETS`; the last entry counts pauses longer than every bucket."""
    pause_seconds: float = 0.0
    saved_member_seconds: float = 0.0
    """The value of `Tally.saved_member_seconds` that rank 0 reported last."""
    phase_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class JobHistory:
    """History of one job. In all methods `now` is the time by the coordinator's clock, in seconds."""

    def __init__(self) -> None:
        self.goodput = Goodput()
        self.counts = Counts()
        self.points: deque[Point] = deque()
        self.changes: deque[GenerationChange] = deque(maxlen=MOST_CHANGES)
        self.switches: deque[SwitchRecord] = deque(maxlen=MOST_CHANGES)
        self.step = 0
        self.samples = 0
        self.stepped_at: float | None = None
        """Time at which a new step was last reported."""
        self._first_step: int | None = None
        self._spacing = LEAST_SPACING
        self._open: Point | None = None
        self._reports: dict[str, Report] = {}
        """The last report of each member, keyed by member id."""
        self._leader = ""
        self._known: deque[tuple[int, int]] = deque(maxlen=MOST_CHANGES)

    # -- events ------------------------------------------------------------------------------------------------------

    def gone(self, member: str) -> None:
        """Forget the last report of a member that has left."""
        self._reports.pop(member, None)

    def published(self, world: Generation, term: str, now: float) -> None:
        """Record a new generation.

        term: the id of this run of the coordinator. A generation with a different id was taken over from an earlier
            coordinator, and its members are already training.
        """
        kind = _kind(world, term)
        self.changes.append(
            GenerationChange(
                generation=world.generation,
                kind=kind,
                at=now,
                size=len(world.members),
                nodes=len(nodes_of(world.members)),
                paused=world.paused,
                reason=world.reason,
            )
        )
        self.counts.changes[kind] += 1
        cause = _cause(kind, world)
        if cause is None:
            self.goodput.end_losses()
        else:
            self.goodput.blame(cause[0], now, is_standstill=cause[1])

    def reported(self, member: str, said: Report, world: Generation | None, now: float) -> None:
        """Process a worker's report.

        world: the newest generation.
        """
        before, self._reports[member] = self._reports.get(member), said
        if world is not None and world.rank(member) == 0 and said.tally.generation >= world.generation:
            self._leader = member
        if member != self._leader or world is None or before is None:
            return
        if before.tally != said.tally or before.step != said.step:
            self._go_on(before, said, world, now)

    def switched(self, said: Switched, now: float) -> None:
        """Record the outcome of a switch. Ignores repeated reports: a member that has reconnected sends its most recent
        ones again."""
        key = said.engine, said.number
        if key in self._known:
            return
        self._known.append(key)
        self.switches.append(SwitchRecord(at=now, **said.model_dump(exclude={"kind", "number"})))
        counts, seconds = self.counts, 1e-3 * said.pause_ms
        counts.committed += said.committed
        counts.rolled_back += not said.committed
        counts.sent_bytes += said.bytes_sent
        counts.pauses[sum(seconds > bound for bound in PAUSE_BUCKETS)] += 1
        counts.pause_seconds += seconds
        for name, milliseconds in said.phases_ms.items():
            counts.phase_seconds[name] += 1e-3 * milliseconds
        if said.engine == 1:
            if not self.changes or self.changes[-1].still_seconds is not None:
                self.goodput.blame("ELASTIC_REINITIALIZATION", now, is_standstill=False)
            self.goodput.paused(seconds)

    # -- figures from reports ----------------------------------------------------------------------------------------

    def _go_on(self, before: Report, said: Report, world: Generation, now: float) -> None:
        """Add the steps, samples and times of rank 0 since its previous report to the job's history.

        before: the previous report.
        said: the new report.
        """
        old, new = before.tally, said.tally
        steps = max(0, new.steps - old.steps)
        lost_steps = max(0, steps - (said.step - before.step))
        stepping = max(0.0, new.stepping_seconds - old.stepping_seconds)
        held = max(0.0, new.held_seconds - old.held_seconds)
        saving = max(0.0, new.saving_seconds - old.saving_seconds)
        still = self.goodput.add(steps, lost_steps, stepping, held, saving, now)
        samples = max(0, new.samples - self.samples)
        if self._first_step is None:
            self._first_step, samples = said.step - steps, 0
        self.counts.lost_steps += lost_steps
        self.counts.saved_member_seconds = new.saved_member_seconds
        self.counts.samples += samples
        if steps or said.step > self.step:
            self.stepped_at = now
        self.step = max(self.step - lost_steps, said.step)
        self.counts.steps = self.step + self.counts.lost_steps - self._first_step
        self.samples = new.samples
        size = len(world.members)
        self._note(Point(now, said.step, size, steps, samples, stepping, stepping + still, self._loss(world)))
        if new.generation >= world.generation:
            self.goodput.end_losses()
        for place, one in enumerate(self.changes):  # the next generation may already have been published
            if one.generation == new.generation and one.still_seconds is None:
                cost = {"still_seconds": still, "lost_steps": lost_steps}
                self.changes[place] = one.model_copy(update=cost)

    def _loss(self, world: Generation) -> float | None:
        """Return the mean of the finite losses that the members of a generation have reported; None if there are
        none."""
        told = (self._reports[member].figures.loss for member in world.members if member in self._reports)
        losses = [loss for loss in told if isinstance(loss, float)]
        return sum(losses) / len(losses) if losses else None

    def _note(self, point: Point) -> None:
        self._open = point if self._open is None else self._open.merged_with(point)
        if self._open.seconds < self._spacing or not self._open.steps:
            return
        self.points.append(self._open)
        self._open = None
        if len(self.points) > MOST_POINTS:
            later = iter(self.points)
            self.points = deque(one.merged_with(other) for one, other in zip(later, later, strict=False))
            self._spacing *= 2


def _kind(world: Generation, term: str) -> Kind:
    if world.term != term:
        return "taken over"
    if not world.survivors and world.members:
        return "restore" if world.begun else "start"
    if world.change == "failure":
        return "failure"
    return "join" if len(world.members) > world.survivors else "leave"


def _cause(kind: Kind, world: Generation) -> tuple[Cause, bool] | None:
    """Return the cause of the time that is lost because of a change, and whether training stands still until the change
    is over; None if no time is lost."""
    if kind == "taken over":
        return None
    if world.paused or not world.members:
        return "ELASTIC_SLICE_DOWN", True
    if kind == "start":
        return "TRAINING_PREP", True
    if kind in ("failure", "restore"):
        return "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION", True
    return ("ELASTIC_SCALE_UP" if kind == "join" else "ELASTIC_SLICE_DOWN"), False
