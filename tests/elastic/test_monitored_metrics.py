"""What Prometheus is told, and what queries of the examples ask it for: the same names, with the same labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

from ds_dynatrain.elastic.history import MEANING
from ds_dynatrain.elastic.view import View, snapshot, view
from ds_dynatrain.monitoring.metrics import encoded
from tests.elastic.driver import running
from tests.elastic.watched import Told, switched

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
QUERY = re.compile(r"(dynatrain_\w+)(?:\{([^}]*)\})?")
ADDED = {"instance", "job"}
"""Labels that Prometheus gives itself."""


@pytest.fixture(scope="module")
def shown() -> View:
    """A job with one of everything."""
    driver, told = running("a", "b"), Told()
    told.come("a/0", "b/0")
    told.publish("a/0", "b/0")
    told.go_on(held=0.5)
    for _ in range(3):
        told.steps(2, 0.5)
    for number, committed in ((1, True), (2, False)):
        told.history.switched(switched(number, committed), told.now)
    told.publish("a/0", change="failure", survivors=1)
    return view(snapshot(driver.membership, "run-7", driver.now), told.history, driver.now, 1.0e9)


@pytest.fixture(scope="module")
def labels(shown: View) -> dict[str, set[str]]:
    """Names of samples, and the labels that they have."""
    found: dict[str, set[str]] = {}
    for family in text(encoded(shown, "")[1].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EXAMPLES / "grafana.json").read_text())
    return found


def queries() -> list[str]:
    board = dashboard()
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [each["expr"] for each in board["annotations"]["list"]]
    asked += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    groups = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    return asked + [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("query", queries())
def test_queries_ask_for_what_there_is(query: str, labels: dict[str, set[str]]) -> None:
    named = QUERY.findall(query)
    assert named
    for name, wanted in named:
        assert name in labels, name
        assert set(re.findall(r"(\w+)\s*=", wanted)) <= labels[name] | ADDED, query


def test_legends_name_labels_that_there_are(labels: dict[str, set[str]]) -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in labels[QUERY.findall(target["expr"])[0][0]], target


def test_the_dashboard_shows_every_metric(labels: dict[str, set[str]]) -> None:
    shown = {name for query in queries() for name, _ in QUERY.findall(query)}
    left = {name for name in labels if not name.endswith("_created")} - shown
    assert left <= {"dynatrain_job", "dynatrain_samples", "dynatrain_max_productive_step"}


def test_both_formats_hold_the_same(shown: View) -> None:
    kind, body = encoded(shown, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert kind.startswith("application/openmetrics-text")
    one = {(s.name, *sorted(s.labels.items()), s.value) for f in openmetrics(body.decode()) for s in f.samples}
    other = {
        (s.name, *sorted(s.labels.items()), s.value) for f in text(encoded(shown, "")[1].decode()) for s in f.samples
    }
    assert one == other


def test_causes_have_googles_names(shown: View) -> None:
    """Of `BadputType` in ml-goodput-measurement 0.2.3."""
    known = """
        TPU_INITIALIZATION TRAINING_PREP PROGRAM_STARTUP DATA_LOADING_SYNC DATA_LOADING_ASYNC
        UNPRODUCTIVE_CHECKPOINT_SAVE_TIME UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME WASTED_PROGRESS_FROM_DISRUPTION
        INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION CUSTOM_BADPUT_EVENTS OTHER ELASTIC_SLICE_DOWN ELASTIC_SCALE_UP
        ELASTIC_REINITIALIZATION
    """
    assert set(MEANING) == set(shown.goodput.badput_time) <= set(known.split())
