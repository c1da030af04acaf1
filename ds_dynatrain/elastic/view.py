"""Everything that is shown of a job, as one value: the content of `/status.json`, from which the web page and the
metrics are made.

Times are in seconds since 1970 by the coordinator's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Generic, Literal, TypeVar, get_args

from ds_dynatrain.elastic.generation import NO_WORLD, WireRecord, nodes_of
from ds_dynatrain.elastic.history import MEANING, Cause, Counts, GenerationChange, JobHistory, SwitchRecord
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import (
    MOST_PARTED,
    ChangeStatus,
    Count,
    Finite,
    MemberStatus,
    Seconds,
    StartingNode,
    Status,
)

Value = TypeVar("Value")
State = Literal["waiting", "running", "changing", "standing", "paused", "lost", "finished"]
STATES: tuple[State, ...] = get_args(State)
LEAST_QUIET_SECONDS = 10.0
QUIET_STEPS = 5.0
"""A job is in state "standing" if the time since its last step exceeds both `LEAST_QUIET_SECONDS` and this multiple of
the usual step time."""
MOST_NAMED = 5
REPORTED = {"entered", "step", "layout", "pause_ms", "protected", "waits_for", "figures"}
"""Fields of a member's report that the status also shows."""
FRESH_SECONDS = 0.5
"""The shortest time in seconds between two values of a feed, independent of the number of readers."""
REST = 20.0
"""The shortest time between two values of a feed, as a multiple of the time that making the last value has taken."""
PATIENCE_SECONDS = 2.0
"""How long a reader waits for a fresh value before it gets the previous one."""


class PointView(WireRecord):
    """Progress of training between two points in time, as shown to people.

    samples_per_second: the rate over the whole time between the two points, standstills included.
    loss: the mean of the members' losses at the end of these steps; None if no member reported a finite loss.
    """

    at: float
    step: Count
    size: Count
    step_seconds: Seconds
    samples_per_second: Seconds
    loss: Finite | None


class GoodputView(WireRecord):
    """How the job's time was spent, in seconds.

    ratio: effective training time ratio (ETTR), the productive fraction of the time accounted for. A step that is still
        in progress is not included.
    """

    ratio: Seconds
    goodput_time: Seconds
    badput_time: dict[Cause, Seconds]
    total_elapsed_time: Seconds
    disruption_count: Count
    max_productive_step: Count


class View(WireRecord):
    """Everything that is shown of one job at one instant."""

    at: float
    state: State
    why: str
    status: Status
    step: Count
    samples: Count
    quiet_seconds: Seconds | None
    """Seconds since a new optimizer step was last reported; None before the first step."""
    goodput: GoodputView
    counts: Counts
    points: tuple[PointView, ...]
    changes: tuple[GenerationChange, ...]
    switches: tuple[SwitchRecord, ...]
    meaning: dict[Cause, str] = MEANING


def view(status: Status, history: JobHistory, now: float, wall: float) -> View:
    """Return everything that is shown of a job at one instant.

    now: the time by the coordinator's clock.
    wall: the same time in seconds since 1970.
    """
    counts, ago = history.counts, wall - now
    quiet = None if history.stepped_at is None else max(0.0, now - history.stepped_at)
    usual = max((each.seconds / each.steps for each in list(history.points)[-8:]), default=0.0)
    state, why = standing(status, quiet, usual)
    failures = counts.changes["failure"] + counts.changes["restore"]
    return View(
        at=wall,
        state=state,
        why=why,
        status=status,
        step=history.step,
        samples=history.samples,
        quiet_seconds=quiet,
        goodput=GoodputView(
            ratio=history.goodput.ratio(now),
            goodput_time=max(0.0, history.goodput.productive),
            badput_time=history.goodput.lost(now),
            total_elapsed_time=history.goodput.elapsed(now),
            disruption_count=failures,
            max_productive_step=history.step,
        ),
        counts=deepcopy(counts),
        points=tuple(
            PointView(
                at=each.at + ago,
                step=each.step,
                size=each.size,
                step_seconds=each.stepping / each.steps,
                samples_per_second=each.samples / each.seconds if each.seconds else 0.0,
                loss=each.loss,
            )
            for each in history.points
        ),
        changes=tuple(each.model_copy(update={"at": each.at + ago}) for each in history.changes),
        switches=tuple(each.model_copy(update={"at": each.at + ago}) for each in history.switches),
    )


def standing(status: Status, quiet: float | None, usual: float) -> tuple[State, str]:
    """Return the state of a job, such as "running", and a description of the details.

    quiet: seconds since the last step; None before the first one.
    usual: usual step time in seconds.
    """
    if status.finished:
        return "finished", "the scripts of those that worked have ended"
    if status.generation == 0:
        return "waiting", _before_the_start(status)
    if not status.ranks:
        if is_lost(status):
            return "lost", (
                "no member has its state any more; nodes that start go on from the newest fallback checkpoint, or "
                "without one from where the script starts"
            )
        return "waiting", f"all members were told to go; {_before_the_start(status)}"
    if status.paused:
        there = len(nodes_of(status.ranks))
        return "paused", f"{_count(there, 'node')} of the {status.min_nodes} that training needs at least"
    working = [one for one in status.members if one.rank is not None]
    outside = [one for one in working if one.entered < status.generation]
    if outside or len(working) < len(status.ranks):
        return "changing", f"generation {status.generation} is being entered; {_awaited(outside)}"
    most = max(LEAST_QUIET_SECONDS, QUIET_STEPS * usual)
    if quiet is None:
        return "changing", f"no step was made yet; {_awaited(working)}"
    if quiet > most:
        return "standing", f"no step for {quiet:.0f} s; {_awaited(working)}"
    step, unprotected = max((one.step for one in working), default=0), ", unprotected" * is_unprotected(status)
    return "running", f"step {step} on {_count(len(working), 'member')}{unprotected}"


def is_lost(status: Status) -> bool:
    """Return whether a failure has left no member that holds the state of the job."""
    return not status.finished and not status.ranks and bool(status.changes) and status.changes[-1].change == "failure"


def is_unprotected(status: Status) -> bool:
    """Return whether any training member has reported that its death would cost the job more than a step or two."""
    return any(one.protected == "no" for one in status.members if one.rank is not None)


def _before_the_start(status: Status) -> str:
    ready = nodes_of(one.member for one in status.members if one.phase == "waiting")
    warming = nodes_of(one.member for one in status.members if one.phase == "warming")
    words = f"{_count(len(ready), 'node')} of {status.min_nodes} ready"
    words += f"; {_named(sorted(warming))} still importing or building" if warming else ""
    starting = [f"{one.node} ({one.seconds:.0f} s)" for one in status.starting]
    return words + (f"; its workers start on {_named(starting)}" if starting else "")


def _awaited(members: Iterable[MemberStatus]) -> str:
    """Return a description of what the given members are waiting for. If none of them reports a wait, name the members
    themselves."""
    members = list(members)
    said = [f"{one.member} waits for {one.waits_for}" for one in members if one.waits_for]
    if said:
        return "; ".join(said[:MOST_NAMED])
    return f"{_named([one.member for one in members])} at work on it" if members else "members are not back yet"


def _named(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def snapshot(membership: MembershipStateMachine, job: str, now: float) -> Status:
    """Return the status at time `now`. Workers with a rank come first, in the order of their ranks, and the others
    follow in the order of their names."""
    world = membership.world or NO_WORLD
    members = [
        MemberStatus(
            member=entry.member,
            phase=membership.phase(entry),
            rank=world.rank(entry.member),
            pid=entry.pid,
            heard_seconds=max(0.0, now - entry.heard),
            **entry.report.model_dump(include=REPORTED),
        )
        for entry in membership.roster.values()
    ]
    members.sort(key=lambda one: (one.rank is None, one.rank or 0, one.member))
    changes = tuple(
        ChangeStatus(
            generation=each.generation,
            change=each.change,
            size=len(each.members),
            seconds_ago=max(0.0, now - at),
            reason=each.reason,
        )
        for each, at in membership.changes
    )
    parted = sorted(membership.links.parted)
    started = nodes_of(membership.roster)
    starting = sorted((since, node) for node, since in membership.watched.items() if node not in started)
    return Status(
        job=job,
        term=membership.term,
        min_nodes=membership.settings.min_nodes,
        max_nodes=membership.settings.max_nodes,
        beat_seconds=membership.settings.beat_seconds,
        generation=world.generation,
        paused=world.paused,
        finished=membership.is_finished,
        ranks=world.members,
        members=tuple(members),
        starting=tuple(StartingNode(node=node, seconds=max(0.0, now - since)) for since, node in starting),
        changes=changes,
        parted=tuple(f"{one} and {other} do not reach each other" for one, other in parted[:MOST_PARTED]),
    )


class Feed(Generic[Value]):
    """The newest value of a function, for readers on other threads.

    make: makes the value. It runs through `call_soon`, and only if a reader has asked since the last value.
    call_soon: schedules a call on the thread that may make values.
    """

    def __init__(self, make: Callable[[], Value], call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._make, self._call_soon = make, call_soon
        self._changed = threading.Condition()
        self._value: Value | None = None
        self._fresh_until = 0.0
        self._is_asked = False

    def read(self) -> Value | None:
        """Return a fresh value, or the previous one if a fresh one is not made in time; None if there has never been a
        value.

        May be called from any thread.
        """
        with self._changed:
            if time.monotonic() >= self._fresh_until and not self._is_asked:
                self._is_asked = True
                try:
                    self._call_soon(self._refresh)
                except RuntimeError:  # the loop has ended: the last value is final
                    self._is_asked = False
            self._changed.wait_for(lambda: not self._is_asked, PATIENCE_SECONDS)
            return self._value

    def _refresh(self) -> None:
        value, begin = None, time.monotonic()
        try:
            value = self._make()
        finally:
            end = time.monotonic()
            with self._changed:
                self._fresh_until = end + max(FRESH_SECONDS, REST * (end - begin))
                self._value = self._value if value is None else value
                self._is_asked = False
                self._changed.notify_all()
