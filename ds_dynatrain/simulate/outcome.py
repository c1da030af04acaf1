"""Outcomes of a trace under each policy, as plain data. docs/reference has its JSON schema."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PolicyOutcome(BaseModel):
    """The outcome of a trace under one policy.

    goodput: steps that count, as a share of those that all members would have made in the same time without events.
    ettr: seconds of steps that count, as a share of the seconds in which there was a member.
    ettr_without_starts: the same, without the seconds of starts from nothing.
    steps: the steps that count; a step with a part of the batch counts as that part.
    lost_steps: the steps that were made and lost.
    changes: how often training paused for another world.
    useful, lost, paused, starting, waiting: seconds of steps that count, of steps that were lost, of pauses for changes
        and for checkpoints, of starts when no member had the state, and without enough members; together the trace.
    member_hours: hours of the members of the world, whether they trained or paused.
    course: (seconds, steps that count by then), at each event.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str
    goodput: float
    ettr: float
    ettr_without_starts: float
    steps: float
    lost_steps: float
    changes: int
    useful: float
    lost: float
    paused: float
    starting: float
    waiting: float
    member_hours: float
    course: list[tuple[float, float]]


class SimulationOutcome(BaseModel):
    """The outcome of a trace for all policies.

    seconds: the length of the trace.
    events: the number of rows of each kind.
    reference_seconds: the time of a step if all members train.
    empty_seconds: seconds without any member.
    assumptions: what neither the profile nor the cluster file nor the trace says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    events: dict[str, int]
    reference_seconds: float
    empty_seconds: float
    policies: list[PolicyOutcome]
    assumptions: list[str]
