"""Simulation of a trace (a list of losses, joins and other events) under a policy; it adds up the time by activity.

Between two events nothing changes except the number of steps. Events are the rows of a trace and their later effects:
started processes become ready, and slow members are noticed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ds_dynatrain.simulate.outcome import PolicyOutcome, SimulationOutcome
from ds_dynatrain.simulate.policies import RIVALS, Kept, Reaction, Rival, Standing
from ds_dynatrain.simulate.simulated_job import SimulatedJob, SimulatedWorld
from ds_dynatrain.simulate.trace import TraceRow, at_the_beginning

TIMES = ("useful", "lost", "paused", "starting", "waiting")
NO_SAVE = (math.inf, 0.0)
_ROUNDING = 1e-9
"""Fraction of a step by which rounding errors may make a whole number of steps too small."""
ASSUMED = (
    "members are equally fast until the trace says otherwise; a member whose first row is no join trains from 0 s on",
    "steps follow the profile (docs/dev/balance-formulas.md), without overlap of messages; the bytes of a live switch "
    "follow `ds-dynatrain plan`, as if all members of the old world sent them",
    "a checkpoint is there at 0 s; all but DeepSpeed's are written beside training, and reading one converts nothing",
    "torchft and ReCycle lose members when they get notice; joins cost them and this library one pause, and no reading",
    "rivals may hold more than a device has; only this library's layouts are checked against the cluster's memory",
    "nobody but this library reacts to slow members",
)


def play(job: SimulatedJob, rows: Sequence[TraceRow], rivals: Iterable[Rival] = RIVALS) -> SimulationOutcome:
    """Return the outcome of a trace under each policy. Raises DynatrainError if a switch cannot be planned."""
    there, before, empty = at_the_beginning(rows, job.topology.node_of), 0.0, 0.0
    for row in rows:
        empty, before = empty + (0.0 if there else row.seconds - before), row.seconds
        there = row.there_after(there)
    fields = type(job.assumed).model_fields
    named = [f"{name}={getattr(job.assumed, name):g}: {field.description}" for name, field in fields.items()]
    return SimulationOutcome(
        seconds=rows[-1].seconds,
        events=dict(Counter(row.event for row in rows if row.event != "end")),
        reference_seconds=job.reference_seconds,
        empty_seconds=empty,
        policies=[_Player(job, rival, rows).outcome(empty) for rival in rivals],
        assumptions=[f"all members train in {job.layout}", f"links from {job.topology.origin}", *named, *ASSUMED],
    )


class _Player:
    """The simulation of one trace under one policy: its current state, and the sums so far.

    held: the last world that trained; None if no living member has its state.
    world: the world that trains now, or from `stands_at` on; None while too few members are ready.
    kept: the state from which `world` continues.
    ready, speeds, seen, dead, leaving: as in `Standing`.
    ready_at: the times at which members whose processes are starting will be ready.
    noticed_at: the time at which the others have noticed all losses of members in the world.
    seconds: the time spent so far, keyed by the names in `PolicyOutcome`.
    stretches: (seconds, steps in a second) for each period of training that counts, oldest first.
    trained: the seconds trained since all members of the world last had a common state.
    saved: the number of steps in the newest complete checkpoint.
    writing: the time at which the checkpoint being written will be complete, and its number of steps.
    """

    def __init__(self, job: SimulatedJob, rival: Rival, rows: Sequence[TraceRow]) -> None:
        self.job, self.rival, self.rows = job, rival, rows
        self.ready = at_the_beginning(rows, job.topology.node_of)
        self.speeds = dict.fromkeys(job.topology.node_of, 1.0)
        self.seen = dict(self.speeds)
        self.dead, self.leaving, self.notice, self.ready_at = set[int](), set[int](), 0.0, dict[int, float]()
        self.clock, self.trained, self.is_pending, self.stands_at = 0.0, 0.0, False, 0.0
        self.steps, self.lost_steps, self.saved, self.writing = 0.0, 0.0, 0.0, NO_SAVE
        self.save_at, self.changes, self.member_seconds = job.assumed.save_every_seconds, 0, 0.0
        self.seconds = dict.fromkeys(TIMES, 0.0)
        self.stretches: list[tuple[float, float]] = []
        self.course = [(0.0, 0.0)]
        self.kept: Kept = "all"
        self.held: SimulatedWorld | None = None
        self.noticed_at = 0.0
        self.world = self.held = self._ask().world if self.ready else None

    def outcome(self, empty: float) -> PolicyOutcome:
        """Simulate all rows of the trace, and return the outcome.

        empty: the seconds without any member.
        """
        order, end, assumed = itertools.count(), self.rows[-1].seconds, self.job.assumed
        start = 0.0 if self.rival.joins_at_once else assumed.start_seconds
        delays = {"join": ("ready", start), "slow": ("noticed", assumed.slow_seconds)}
        due: list[tuple[float, int, str, TraceRow]] = [(row.seconds, next(order), row.event, row) for row in self.rows]
        while due and due[0][0] <= end:
            at, _, event, row = heapq.heappop(due)
            self._go_to(at)
            self._happens(event, row)
            if event in delays:
                name, delay = delays[event]
                heapq.heappush(due, (at + delay, next(order), name, row))
                self.ready_at |= dict.fromkeys(row.members if event == "join" else (), at + delay)
        useful, seen = self.seconds["useful"], end - empty
        started = seen - self.seconds["starting"]
        return PolicyOutcome(
            policy=self.rival.title,
            goodput=self.steps * self.job.reference_seconds / end if end else 1.0,
            ettr=useful / seen if seen else 1.0,
            ettr_without_starts=useful / started if started else 1.0,
            steps=self.steps,
            lost_steps=self.lost_steps,
            changes=self.changes,
            **self.seconds,
            member_hours=self.member_seconds / 3600,
            course=self.course,
        )

    def _ask(self) -> Reaction:
        """Return the policy's reaction to the current situation."""
        ready, dead, leaving = tuple(sorted(self.ready)), frozenset(self.dead), frozenset(self.leaving)
        detection = max(0.0, self.noticed_at - self.clock)
        standing = Standing(self.held, ready, self.speeds, self.seen, dead, leaving, self.notice, detection)
        return self.rival.policy(self.job, standing)

    def _happens(self, event: str, row: TraceRow) -> None:
        """Record what an event changes, and carry out the policy's reaction."""
        members = {*row.members}
        theirs, trains = (members & set(() if each is None else each.members) for each in (self.held, self.world))
        if event in ("loss", "preemption"):
            self.ready -= members
            self.ready_at = {member: at for member, at in self.ready_at.items() if member not in members}
        if event == "loss":
            self.dead, self.leaving = self.dead | theirs, self.leaving - theirs
            if theirs | trains:
                after = self.job.assumed.detection_seconds if row.noticed_seconds is None else row.noticed_seconds
                self.noticed_at = max(self.noticed_at, self.clock + after)
        elif event == "preemption":
            self.leaving, self.notice = self.leaving | theirs, row.notice_seconds
        elif event == "ready":  # only members whose processes have not died and been restarted meanwhile
            come = {member for member in members if self.ready_at.get(member) == self.clock}
            self.ready |= come
            self.ready_at = {member: at for member, at in self.ready_at.items() if member not in come}
        elif event in ("slow", "join"):
            self.speeds |= dict.fromkeys(members, row.speed)
        if event in ("join", "noticed"):
            self.seen |= {member: self.speeds[member] for member in members}
        if event not in ("join", "end"):
            self._answer(self._ask())
        self.course.append((self.clock, self.steps))

    def _answer(self, reaction: Reaction) -> None:
        """Change to the world that a policy chose. If its members and layout are unchanged, only update its
        step time.
        """
        world = reaction.world
        is_same = world is not None and self.world is not None and world.place == self.world.place
        if is_same and reaction.kept in ("all", self.kept):
            if world != self.world and not self.is_pending:
                self.held, self.trained = world, 0.0
            self.world = world
            return
        self._go_back(reaction.kept)
        self.kept, self.world = reaction.kept, world
        self.is_pending, self.stands_at = world is not None, self.clock + reaction.pause_seconds
        if world is None and self.held is not None and not {*self.held.members} & self.ready:
            self.held, self.dead, self.leaving = None, set(), set()

    def _go_back(self, kept: Kept) -> None:
        """Discard the steps that a loss has undone.

        kept: what training continues from: "all", "copies", "checkpoint" or "saved".
        """
        held = self.held
        if kept == "saved":
            self.saved = self.steps
        elif kept == "checkpoint":
            self._forget(self.steps - self.saved)
        elif kept != "all" and held is not None:
            behind = self.job.copy_seconds(held.layout) if kept == "copies" else 0.0
            made = self.trained / held.step_seconds
            safe = max(0, math.floor((self.trained - behind) / held.step_seconds + _ROUNDING))
            self._forget((made - safe) * held.share)
        if kept != "all":
            self.trained, self.writing = 0.0, NO_SAVE

    def _forget(self, steps: float) -> None:
        """Count the newest steps as lost, and the seconds that they took as lost time instead of useful time."""
        self.steps, self.lost_steps = self.steps - steps, self.lost_steps + steps
        while steps > 0 and self.stretches:
            seconds, rate = self.stretches.pop()
            gone = min(seconds, steps / rate)
            self.seconds["lost"] += gone
            self.seconds["useful"] -= gone
            steps -= gone * rate
            if gone < seconds:
                self.stretches.append((seconds - gone, rate))
                return

    # ---- time --------------------------------------------------------------------------------------------------------

    def _go_to(self, at: float) -> None:
        """Let the job train, pause or wait until time `at`. The caller has handled all events before that time."""
        while self.clock < at:
            if self.world is None:
                is_start = self.held is None and bool(self.ready_at)
                self._pass("starting" if is_start else "waiting", at)
            elif self.is_pending and self.clock < self.stands_at:
                self._pass("starting" if self.held is None else "paused", min(at, self.stands_at))
            elif self.is_pending:
                self._stand(self.world)
            elif self.clock >= self.save_at:
                self._save()
            else:
                self._pass("useful", min(at, self.save_at))

    def _pass(self, name: str, until: float) -> None:
        seconds, self.clock = until - self.clock, until
        self.seconds[name] += seconds
        if self.world is not None:
            self.member_seconds += seconds * len(self.world.members)
            if name == "useful":
                rate = self.world.share / self.world.step_seconds
                self.steps += seconds * rate
                self.trained += seconds
                self.stretches.append((seconds, rate))
        if self.clock >= self.writing[0]:
            self.saved, self.writing = self.writing[1], NO_SAVE

    def _stand(self, world: SimulatedWorld) -> None:
        """Start training in a world, or resume it after a pause for a checkpoint."""
        self.changes += self.held is not None and self.held.place != world.place
        self.held, self.dead, self.leaving = world, set(), set()
        self.is_pending, self.trained, self.kept = False, 0.0, "all"

    def _save(self) -> None:
        """Start writing a checkpoint, after waiting for the previous one if it is still being written."""
        if self.writing != NO_SAVE:
            self.save_at = self.writing[0]
            return
        done = self.clock + self.job.storage_seconds
        self.writing, self.save_at = (done, self.steps), self.clock + self.job.assumed.save_every_seconds
        if self.rival.saving_stops:
            self.is_pending, self.stands_at = True, done
