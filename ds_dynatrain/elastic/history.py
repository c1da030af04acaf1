"""What a coordinator remembers of a job for those who watch it. Nothing is decided by it, and all of it is bounded."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_dynatrain.elastic.goodput import Cause, Goodput, Progress
from ds_dynatrain.elastic.messages import Report, Switched, Tally
from ds_dynatrain.elastic.world import World, nodes_of

MOST_POINTS = 1024
MOST_CHANGES = 256
LEAST_SPACING = 0.5
"""Seconds between two points at the least; doubled whenever there are too many, and pairs of them become one."""
PAUSE_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of pauses that are counted together, in seconds."""

Kind = Literal["start", "join", "leave", "failure", "restore", "taken over"]
"""Of a change of the world: what it was for."""


@dataclass(frozen=True)
class Point:
    """Steps that were made between two looks. seconds: between them; stepping: of these, those of steps."""

    at: float
    step: int
    size: int
    steps: int
    samples: int
    stepping: float
    seconds: float

    def then(self, later: Point) -> Point:
        """Both as one."""
        return replace(
            later,
            steps=self.steps + later.steps,
            samples=self.samples + later.samples,
            stepping=self.stepping + later.stepping,
            seconds=self.seconds + later.seconds,
        )


@dataclass(frozen=True)
class Change:
    """A generation as it was published. still: how long training stood still for it, in seconds; None until that is
    known, and for good where the next one came before anyone had entered it."""

    generation: int
    kind: Kind
    at: float
    size: int
    nodes: int
    paused: bool
    reason: str
    still: float | None = None
    lost_steps: int = 0


@dataclass(frozen=True)
class Switch:
    """A switch as its rank 0 told it, and when."""

    at: float
    said: Switched


@dataclass
class Counts:
    """What only grows, since the coordinator was started."""

    steps: int = 0
    samples: int = 0
    lost_steps: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    committed: int = 0
    rolled_back: int = 0
    sent_bytes: int = 0
    pauses: list[int] = field(default_factory=lambda: [0] * (len(PAUSE_BUCKETS) + 1))
    """Pauses by bucket; the last one is for longer ones."""
    pause_seconds: float = 0.0
    phase_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class _Mark:
    """What a member said last."""

    step: int
    tally: Tally


class History:
    """Of one job. `now` is the coordinator's clock, in seconds."""

    def __init__(self) -> None:
        self.goodput = Goodput()
        self.counts = Counts()
        self.points: deque[Point] = deque()
        self.changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self.switches: deque[Switch] = deque(maxlen=MOST_CHANGES)
        self.step = 0
        self.samples = 0
        self.stepped_at: float | None = None
        """When a step was heard of last."""
        self._first_step: int | None = None
        self._spacing = LEAST_SPACING
        self._open: Point | None = None
        self._marks: dict[str, _Mark] = {}
        self._leader = ""
        self._known: deque[tuple[int, int]] = deque(maxlen=MOST_CHANGES)

    # -- what happens ------------------------------------------------------------------------------------------------

    def announced(self, now: float) -> None:
        """A node's agent is there, or a worker."""
        self.goodput.begin(now)

    def gone(self, member: str) -> None:
        """It is not there any more."""
        self._marks.pop(member, None)

    def finished(self, now: float) -> None:
        """The job is over."""
        self.goodput.end(now)

    def published(self, world: World, term: str, now: float) -> None:
        """A generation. term: of this coordinator; another one's world was taken over, and trains already."""
        kind, size = _kind(world, term, self.changes[-1].size if self.changes else 0), len(world.members)
        nodes = len(nodes_of(world.members))
        self.changes.append(Change(world.generation, kind, now, size, nodes, world.paused, world.reason))
        self.counts.changes[kind] += 1
        cause = _cause(kind, world)
        if cause is None:
            self.goodput.over()
        else:
            self.goodput.blame(cause[0], now, stands=cause[1])

    def reported(self, member: str, said: Report, world: World | None, now: float) -> None:
        """A worker says what it is; world: the newest."""
        before, self._marks[member] = self._marks.get(member), _Mark(said.step, said.tally)
        if world is not None and world.rank(member) == 0 and said.tally.generation >= world.generation:
            self._leader = member
        if member != self._leader or world is None or before is None:
            return
        if before.tally != said.tally or before.step != said.step:
            made = Progress.between(before.tally, said.tally, said.step - before.step)
            self._go_on(made, said, world, now)

    def switched(self, said: Switched, now: float) -> None:
        """How a switch went; one that is known already is told again by whoever has found another coordinator."""
        key = said.engine, said.number
        if key in self._known:
            return
        self._known.append(key)
        self.switches.append(Switch(now, said))
        counts, seconds = self.counts, 1e-3 * said.pause_ms
        counts.committed += said.committed
        counts.rolled_back += not said.committed
        counts.sent_bytes += said.bytes_sent
        counts.pauses[sum(seconds > bound for bound in PAUSE_BUCKETS)] += 1
        counts.pause_seconds += seconds
        for name, milliseconds in said.phases_ms.items():
            counts.phase_seconds[name] += 1e-3 * milliseconds
        if said.engine == 1:
            if not self.changes or self.changes[-1].still is not None:
                self.goodput.blame("ELASTIC_REINITIALIZATION", now, stands=False)
            self.goodput.paused(seconds)

    # -- what follows ------------------------------------------------------------------------------------------------

    def _go_on(self, made: Progress, said: Report, world: World, now: float) -> None:
        still, samples = self.goodput.add(made, now), max(0, said.tally.samples - self.samples)
        if self._first_step is None:
            self._first_step, samples = said.step - made.steps, 0
        self.counts.lost_steps += made.lost_steps
        self.counts.samples += samples
        has_stepped = made.steps > 0 or said.step > self.step
        self.step = max(self.step - made.lost_steps, said.step)
        self.counts.steps = self.step + self.counts.lost_steps - self._first_step
        self.samples = said.tally.samples
        self.stepped_at = now if has_stepped else self.stepped_at
        self._note(Point(now, said.step, len(world.members), made.steps, samples, made.stepping, made.stepping + still))
        if said.tally.generation >= world.generation:
            self.goodput.over()
        self._entered(said.tally.generation, still, made.lost_steps)

    def _entered(self, generation: int, still: float, lost_steps: int) -> None:
        """What that one has cost, also where the next one is published by now."""
        place = next((at for at, one in enumerate(self.changes) if one.generation == generation), None)
        if place is not None and self.changes[place].still is None:
            self.changes[place] = replace(self.changes[place], still=still, lost_steps=lost_steps)

    def _note(self, point: Point) -> None:
        self._open = point if self._open is None else self._open.then(point)
        if self._open.seconds < self._spacing or not self._open.steps:
            return
        self.points.append(self._open)
        self._open = None
        if len(self.points) > MOST_POINTS:
            whole = list(self.points)
            pairs = zip(whole[::2], whole[1::2], strict=False)
            self.points = deque([one.then(other) for one, other in pairs])
            self._spacing *= 2


def _kind(world: World, term: str, before: int) -> Kind:
    if world.term != term:
        return "taken over"
    if not world.survivors and world.members:
        return "restore" if world.begun else "start"
    if world.change == "failure":
        return "failure"
    return "join" if len(world.members) > world.survivors else "leave"


def _cause(kind: Kind, world: World) -> tuple[Cause, bool] | None:
    """What time that is lost from now on is due to, and whether nobody trains until it is over; None if nothing is."""
    if kind == "taken over":
        return None
    if world.paused or not world.members:
        return "ELASTIC_SLICE_DOWN", True
    if kind == "start":
        return "TRAINING_PREP", True
    if kind in ("failure", "restore"):
        return "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION", True
    return ("ELASTIC_SCALE_UP" if kind == "join" else "ELASTIC_SLICE_DOWN"), False
