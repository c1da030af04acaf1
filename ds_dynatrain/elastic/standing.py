"""Whether a job runs, in a word, and if not, why, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from ds_dynatrain.elastic.messages import MemberStatus, Status
from ds_dynatrain.elastic.world import nodes_of

State = Literal["waiting", "running", "changing", "standing", "paused", "lost", "finished"]
STATES: tuple[State, ...] = get_args(State)
LEAST_QUIET_SECONDS = 10.0
QUIET_STEPS = 5.0
"""A job stands that has made no step for so many times what one takes, and for so many seconds."""
MOST_NAMED = 5


def standing(status: Status, quiet: float | None, usual: float) -> tuple[State, str]:
    """(the state, why). quiet: seconds since the last step, None before the first; usual: that a step takes."""
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
    step = max((one.step for one in working), default=0)
    return "running", f"step {step} on {_count(len(working), 'member')}" + (
        ", unprotected" if is_unprotected(status) else ""
    )


def is_lost(status: Status) -> bool:
    """Return whether a failure has left nobody who holds the state of the job."""
    return not status.finished and not status.ranks and bool(status.changes) and status.changes[-1].change == "failure"


def is_unprotected(status: Status) -> bool:
    """Return whether a member that trains has said that a death would cost more than the newest steps."""
    return any(one.protected == "no" for one in status.members if one.rank is not None)


def _before_the_start(status: Status) -> str:
    ready = nodes_of(one.member for one in status.members if one.phase == "waiting")
    warming = nodes_of(one.member for one in status.members if one.phase == "warming")
    words = f"{_count(len(ready), 'node')} of {status.min_nodes} ready"
    words += f"; {_named(sorted(warming))} still importing or building" if warming else ""
    starting = [f"{one.node} ({one.seconds:.0f} s)" for one in status.starting]
    return words + (f"; its workers start on {_named(starting)}" if starting else "")


def _awaited(members: Iterable[MemberStatus]) -> str:
    """Who is waited for, in their own words where they have some."""
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
