"""A real job that is scraped while nodes join, are killed and leave: what is shown is what its report file says."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.report import read_events
from tests.elastic.agents import Job, processes
from tests.elastic.runs import finish, node_of, steps_on
from tests.elastic.watched import READERS, fetched, metrics, status
from tools.nodes import free_port


def readers(folder: Path) -> Path:
    """The file of the readers' token."""
    file = folder / "readers"
    file.touch(mode=0o600)
    file.write_text(READERS)
    return file


@pytest.fixture
def watch(tmp_path: Path, train: Callable[..., Job]) -> Callable[..., tuple[Job, str, Path]]:
    """(a job with its coordinator, where it can be watched, its report file), with the buddies of every elastic job."""

    def make(**given: Any) -> tuple[Job, str, Path]:
        report, port = tmp_path / "report.jsonl", free_port()
        block = {"report": {"jsonl": str(report)}, "fallback": {"path": str(tmp_path / "fallback"), "every_steps": 3}}
        block["buddies"] = {}
        job = train(nodes="1:4", block=block, variables={"WORKERS": "0", "STEP_SECONDS": "0.8"}, **given)
        job.coordinator("coordinator", f"--http=127.0.0.1:{port}", f"--http-token-file={readers(tmp_path)}")
        return job, f"http://127.0.0.1:{port}", report

    return make


def test_counters_are_what_the_report_file_says(watch: Callable[..., tuple[Job, str, Path]]) -> None:
    job, url, report = watch()
    job.node("a", is_host=0)
    first = job.settled(1)
    job.wait(lambda: status(url)["why"].endswith("on 1 member, unprotected"), "the word that one node is unprotected")
    assert (job.folder / "a.log").read_text().count("buddies: unprotected: all members that train are on node") == 1
    job.node("b", is_host=0)
    job.node("c", is_host=0)
    joined = job.settled(3, first.generation)
    job.wait(lambda: status(url)["why"].endswith("on 3 members"), "protection")
    steps_on(job)
    job.kill(node_of(job, joined, 1))
    left = job.settled(2, joined.generation)
    steps_on(job)
    job.kill(node_of(job, left, 0), signal.SIGTERM)
    last = job.settled(1, left.generation)
    assert processes(last) == processes(left)[1:]
    steps_on(job)
    made = max(row["step"] for row in job.rows("step")) + 1
    job.wait(lambda: status(url)["step"] >= made, "the steps in the status")
    numbers, seen, events = metrics(url), status(url), read_events(report)
    compare(numbers, events)
    assert [one["kind"] for one in seen["changes"] if one["kind"] != "join"] == ["start", "failure", "leave"]
    assert seen["state"] == "running" and seen["why"].endswith(", unprotected") and len(seen["switches"]) == len(events)
    planned = [one["still_seconds"] for one in seen["changes"] if one["kind"] in ("join", "leave")]
    stood = [each for each in planned if each is not None]  # none for one that the next one came before
    assert len(stood) == len(events), (planned, events)
    assert min(stood) >= min(event.pause_ms for event in events) / 1000  # none is taken for one of the script's own
    assert seen["goodput"]["badput_time"]["ELASTIC_REINITIALIZATION"] == 0
    failure = next(one for one in seen["changes"] if one["kind"] == "failure")
    rows = [row["step"] for row in job.rows("step") if row["pid"] == processes(left)[0]]
    again = len(rows) - len(set(rows))
    assert again <= 1, "they go on from copies, not from the checkpoint of every third step"
    assert abs(failure["lost_steps"] - again) <= 1 and numbers["dynatrain_lost_steps_total"] == failure["lost_steps"]
    assert numbers["dynatrain_disruptions_total"] == 1 and 0 < failure["still_seconds"] < 60
    account(seen, numbers)
    for member in seen["status"]["ranks"]:
        code, _, body = fetched(f"{url}/doing?{member}")
        log, _, stacks = body.decode().partition("Stacks\n\n")
        assert code == 200 and f"{member}: generation" in log and stacks.startswith("thread MainThread:\n")
        assert "training.py" in stacks and "thread dynatrain-member:" in stacks
    finish(job)


@pytest.mark.full
def test_an_agent_that_hosts_the_coordinator_shows_it_too(tmp_path: Path) -> None:
    """The script is no engine's; it tells of its steps alone. All processes are new ones: threads do not fork well."""
    port, job = free_port(), Job(tmp_path)
    try:
        job.node("a", is_host=1, http=f"127.0.0.1:{port}", http_token_file=readers(tmp_path))
        job.settled(1)
        found = job.wait(lambda: (seen := status(f"http://127.0.0.1:{port}"))["state"] == "running" and seen, "steps")
        assert found["step"] > 0 and found["status"]["job"] == "job"
        finish(job)
    finally:
        job.clean_up()


def compare(numbers: dict[str, float], events: list[Any]) -> None:
    """Every counter of switches, against the file."""
    assert numbers["dynatrain_switches_total{outcome=committed}"] == sum(one.outcome == "committed" for one in events)
    assert numbers["dynatrain_switches_total{outcome=rolled_back}"] == sum(one.outcome != "committed" for one in events)
    assert numbers["dynatrain_sent_bytes_total"] == sum(one.bytes_sent for one in events)
    assert numbers["dynatrain_pause_seconds_count"] == len(events) > 1
    assert numbers["dynatrain_pause_seconds_sum"] == pytest.approx(sum(one.pause_ms for one in events) / 1000)
    for phase in {name for one in events for name in one.phases_ms}:
        seconds = sum(one.phases_ms.get(phase, 0.0) for one in events) / 1000
        assert numbers[f"dynatrain_phase_seconds_total{{phase={phase}}}"] == pytest.approx(seconds)


def account(seen: dict[str, Any], numbers: dict[str, float]) -> None:
    """The time since the first worker is accounted for, but for the step under way and what heartbeats are late."""
    found = seen["goodput"]
    whole = found["goodput_time"] + sum(found["badput_time"].values())
    assert whole == pytest.approx(found["total_elapsed_time"], abs=2.5 + 0.1 * found["total_elapsed_time"])
    for cause in ("PROGRAM_STARTUP", "TRAINING_PREP", "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION", "ELASTIC_SCALE_UP"):
        assert found["badput_time"][cause] > 0, cause
    assert 0 < numbers["dynatrain_goodput_ratio"] < 1
    assert numbers["dynatrain_badput_time_seconds{badput_source=PROGRAM_STARTUP}"] > 0
    figures = [one["figures"] for one in seen["status"]["members"]]
    assert figures and all(0 < one["memory_bytes"] < one["memory_limit"] and one["learning_rate"] for one in figures)
    assert all(isinstance(one["loss"], float) for one in figures) and seen["points"][-1]["loss"] is not None
    assert seen["points"] and all(one["samples_per_second"] >= 0 for one in seen["points"])
    assert time.time() - 600 < seen["changes"][0]["at"] < seen["at"] < time.time() + 5
