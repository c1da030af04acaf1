"""Prometheus metrics of a snapshot of a job (a `View`): as text, or as OpenMetrics for clients that ask for it.

Each answer has its own registry, filled from one view, and so contains no metrics of this process or of Python.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_dynatrain.elastic.generation import nodes_of
from ds_dynatrain.elastic.history import PAUSE_BUCKETS
from ds_dynatrain.elastic.messages import Phase
from ds_dynatrain.elastic.view import STATES, View
from ds_dynatrain.errors import ConfigError

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.exposition import choose_encoder
except ImportError as missing:
    raise ConfigError(
        "what Prometheus reads is written by prometheus_client, which is not installed: "
        "pip install 'ds-dynatrain[monitoring]'"
    ) from missing

PHASES: tuple[Phase, ...] = ("warming", "waiting", "building", "working", "leaving")


def encoded(view: View, accept: str) -> tuple[str, bytes]:
    """Return the content type of an answer and its body, in the format that the Accept header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)


class _Collector:
    """Collector for a Prometheus registry: the metrics of one view (snapshot of the job)."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the job."""
        yield from _job(self._view)
        yield from _training(self._view)
        yield from _changes(self._view)
        yield from _goodput(self._view)


def _job(view: View) -> Iterator[Metric]:
    status = view.status
    info = _labelled("dynatrain_job", "The job; the term is new with each start of the coordinator.", "name", "term")
    info.add_metric([status.job, status.term], 1)
    yield info
    state = _labelled("dynatrain_state", "Whether the job is in this state.", "state")
    for each in STATES:
        state.add_metric([each], float(each == view.state))
    yield state
    yield _gauge("dynatrain_generation", "Number of the present world.", status.generation)
    yield _gauge("dynatrain_world_size", "Members of the present world.", len(status.ranks))
    yield _gauge("dynatrain_nodes", "Nodes of the present world.", len(nodes_of(status.ranks)))
    yield _gauge("dynatrain_min_nodes", "Below so many nodes training waits.", status.min_nodes)
    yield _gauge("dynatrain_max_nodes", "No more nodes than this train.", status.max_nodes)
    members = _labelled("dynatrain_members", "Members by what they do.", "phase")
    for phase in PHASES:
        members.add_metric([phase], sum(one.phase == phase for one in status.members))
    yield members
    protected = sum(one.protected == "yes" for one in status.members)
    yield _gauge("dynatrain_protected_members", "Members whose state others keep, too.", protected)


def _training(view: View) -> Iterator[Metric]:
    counts = view.counts
    yield _gauge("dynatrain_step", "Optimizer steps that count.", view.step)
    yield _gauge("dynatrain_samples", "Samples before the present step.", view.samples)
    yield _counter("dynatrain_steps", "Steps made since the coordinator was started.", counts.steps)
    yield _counter("dynatrain_trained_samples", "Samples trained since then.", counts.samples)
    yield _counter("dynatrain_lost_steps", "Steps of these that were lost by a death.", counts.lost_steps)
    saved = "Time of members that were free because fewer were enough."
    yield _gauge("dynatrain_saved_member_seconds", saved, counts.saved_member_seconds)
    if view.points:
        last = view.points[-1]
        yield _gauge("dynatrain_step_seconds", "What steps took last, standstills left out.", last.step_seconds)
        yield _gauge("dynatrain_samples_per_second", "Standstills included.", last.samples_per_second)
    if view.quiet_seconds is not None:
        yield _gauge("dynatrain_quiet_seconds", "Since a step was heard of last.", view.quiet_seconds)


def _changes(view: View) -> Iterator[Metric]:
    counts = view.counts
    changes = CounterMetricFamily("dynatrain_changes", "Changes of the world, by what they were for.", labels=["kind"])
    for kind, number in sorted(counts.changes.items()):
        changes.add_metric([kind], number)
    yield changes
    switches = CounterMetricFamily("dynatrain_switches", "Switches of engines, by how they ended.", labels=["outcome"])
    switches.add_metric(["committed"], counts.committed)
    switches.add_metric(["rolled_back"], counts.rolled_back)
    yield switches
    bounds = [*map(str, PAUSE_BUCKETS), "+Inf"]
    below = [sum(counts.pauses[: place + 1]) for place in range(len(counts.pauses))]
    yield HistogramMetricFamily(
        "dynatrain_pause_seconds",
        "How long switches held training up.",
        buckets=list(zip(bounds, below, strict=True)),
        sum_value=counts.pause_seconds,
    )
    phases = CounterMetricFamily("dynatrain_phase_seconds", "What these pauses went into.", labels=["phase"])
    for phase, seconds in counts.phase_seconds.items():
        phases.add_metric([phase], seconds)
    yield phases
    yield _counter("dynatrain_sent_bytes", "Bytes that crossed between members in switches.", counts.sent_bytes)


def _goodput(view: View) -> Iterator[Metric]:
    """Yield the metrics of productive and lost time, under the names that the ml-goodput-measurement library uses.

    Time metrics are gauges rather than counters, because the seconds of steps that are lost later stop counting.
    """
    found = view.goodput
    yield _gauge("dynatrain_goodput_ratio", "ETTR: share of the time that became training.", found.ratio)
    good = _labelled("dynatrain_goodput_time_seconds", "Time of steps that count.", "goodput_source")
    good.add_metric(["TOTAL"], found.goodput_time)
    yield good
    bad = _labelled("dynatrain_badput_time_seconds", "Time that was lost, by cause.", "badput_source")
    for cause, seconds in found.badput_time.items():
        bad.add_metric([cause], seconds)
    yield bad
    yield _gauge("dynatrain_total_elapsed_time_seconds", "Since the first node was there.", found.total_elapsed_time)
    yield _counter("dynatrain_disruptions", "Failures of a world.", found.disruption_count)
    yield _gauge("dynatrain_max_productive_step", "The last step that counts.", found.max_productive_step)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)


def _labelled(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, labels=list[str](labels))
