"""All that is shown of a job, as one value: what `/status.json` is, and what the page and the metrics are made of.

Times are seconds since 1970 by the coordinator's clock.
"""

from __future__ import annotations

from ds_dynatrain.elastic.goodput import MEANING, Cause
from ds_dynatrain.elastic.history import Change, History, Point, Switch
from ds_dynatrain.elastic.messages import Count, Seconds, Status
from ds_dynatrain.elastic.standing import State, standing
from ds_dynatrain.elastic.world import Record, Text


class PointView(Record):
    """Steps between two looks at the job. samples_per_second: standstills included."""

    at: float
    step: Count
    size: Count
    step_seconds: Seconds
    samples_per_second: Seconds


class ChangeView(Record):
    """A generation. still_seconds: how long training stood still for it; None until that is known, and for good where
    the next one came before anyone had entered it."""

    generation: Count
    kind: str
    at: float
    size: Count
    nodes: Count
    paused: bool
    reason: Text
    still_seconds: Seconds | None
    lost_steps: Count


class SwitchView(Record):
    """A switch of an engine, its phases in their order."""

    at: float
    engine: Count
    committed: bool
    step: Count
    source: str
    target: str
    members: Count
    pause_ms: Seconds
    certificate_ms: Seconds
    phases_ms: dict[str, Seconds]
    bytes_sent: Count
    bytes_minimum: Count
    cause: str
    reason: str


class GoodputView(Record):
    """Seconds. ratio: ETTR, of what is accounted for; the step under way is not yet."""

    ratio: Seconds
    goodput_time: Seconds
    badput_time: dict[Cause, Seconds]
    total_elapsed_time: Seconds
    disruption_count: Count
    max_productive_step: Count


class CountsView(Record):
    """What only grows, since the coordinator was started. pauses: by bucket, see `history.PAUSE_BUCKETS`."""

    steps: Count
    samples: Count
    lost_steps: Count
    changes: dict[str, Count]
    committed: Count
    rolled_back: Count
    sent_bytes: Count
    pauses: tuple[Count, ...]
    pause_seconds: Seconds
    phase_seconds: dict[str, Seconds]


class View(Record):
    """One job at one instant."""

    at: float
    state: State
    why: str
    status: Status
    step: Count
    samples: Count
    quiet_seconds: Seconds | None
    """Since a step was heard of last."""
    goodput: GoodputView
    counts: CountsView
    points: tuple[PointView, ...]
    changes: tuple[ChangeView, ...]
    switches: tuple[SwitchView, ...]
    meaning: dict[Cause, str] = MEANING


def view(status: Status, history: History, now: float, wall: float) -> View:
    """Return what the page shows. now: the coordinator's clock; wall: the same instant in seconds since 1970."""
    counts, ago = history.counts, wall - now
    quiet = None if history.stepped_at is None else max(0.0, now - history.stepped_at)
    usual = _usual_seconds(history)
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
        counts=CountsView(
            steps=counts.steps,
            samples=counts.samples,
            lost_steps=counts.lost_steps,
            changes=dict(counts.changes),
            committed=counts.committed,
            rolled_back=counts.rolled_back,
            sent_bytes=counts.sent_bytes,
            pauses=tuple(counts.pauses),
            pause_seconds=counts.pause_seconds,
            phase_seconds=dict(counts.phase_seconds),
        ),
        points=tuple(_point(each, ago) for each in history.points),
        changes=tuple(_change(each, ago) for each in history.changes),
        switches=tuple(_switch(each, ago) for each in history.switches),
    )


def _usual_seconds(history: History) -> float:
    """That a step takes, by the last points."""
    last = list(history.points)[-8:]
    return max((each.seconds / each.steps for each in last), default=0.0)


def _point(point: Point, ago: float) -> PointView:
    return PointView(
        at=point.at + ago,
        step=point.step,
        size=point.size,
        step_seconds=point.stepping / point.steps,
        samples_per_second=point.samples / point.seconds if point.seconds else 0.0,
    )


def _change(change: Change, ago: float) -> ChangeView:
    return ChangeView(
        generation=change.generation,
        kind=change.kind,
        at=change.at + ago,
        size=change.size,
        nodes=change.nodes,
        paused=change.paused,
        reason=change.reason,
        still_seconds=change.still,
        lost_steps=change.lost_steps,
    )


def _switch(switch: Switch, ago: float) -> SwitchView:
    said = switch.said.model_dump(exclude={"kind", "number"})
    return SwitchView(at=switch.at + ago, **said)
