"""Fifty updates from an elastic job: a switch, a join and a death between them, and receivers that never start anew."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

from tests.elastic.deaths import protected
from tests.elastic.runs import finish, node_of, training
from tests.weights import fakes

UPDATES = 50
SCRIPT = Path(__file__).with_name("elastic_sender.py")


def test_receivers_live_through_a_switch_a_join_and_a_death(tmp_path: Path) -> None:
    cuts = {"words.weight": 0, "blocks.0.up.weight": 1, "blocks.1.down.weight": 0}
    with fakes.rollouts(2, cuts, seconds=120) as rollouts:
        variables = {"RECEIVERS": rollouts.address, "STEP_SECONDS": "0.1"}
        block = {"buddies": {"mode": "copy"}}
        job = training(tmp_path, 2, block, variables=variables, nodes="2:3", script=SCRIPT)
        try:
            job.coordinator("coordinator")
            for node in ("a", "b"):
                job.node(node, is_host=0)
            first = job.settled(2)
            rollouts.wait(12)
            step = 4 + max(row["step"] for row in job.rows("step"))
            (tmp_path / "telling").write_text(f'{step} {{"zero_stage": 3}}')
            (tmp_path / "telling").rename(tmp_path / "switches")
            job.wait(lambda: [row for row in job.rows("switch") if row["layout"]["zero_stage"] == 3], "the switch")
            job.node("c", is_host=0)
            joined = job.settled(3, first.generation)
            rollouts.wait(len(rollouts.updates) + 8)
            job.wait(lambda: protected(job.status()), "protection")
            job.kill(node_of(job, joined, 1), signal.SIGKILL)
            job.settled(2, joined.generation)
            rollouts.wait(max(UPDATES, len(rollouts.updates) + 8))
            finish(job)
        finally:
            job.clean_up()
    versions = [each.version for each in rollouts.updates]
    assert len(versions) >= UPDATES and all(one < other for one, other in pairwise(versions))
    layouts = list(dict.fromkeys(each.layout for each in rollouts.updates))
    assert len(layouts) >= 3, layouts
    assert any(each.is_delta for each in rollouts.updates) and not rollouts.updates[0].is_delta
    for receiver in rollouts.receivers:
        assert receiver.version == versions[-1]
    sent = {row["version"]: row["step"] for row in job.rows("update")}
    assert all(sent.get(each.version, each.step) == each.step for each in rollouts.updates)
