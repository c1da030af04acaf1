"""Weights for a rollout engine, from a trainer whose nodes join and die, to a receiver that lives on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.weights.receivers.group_receiver import GroupReceiver
from ds_dynatrain.weights.update import Update
from tests.elastic.agents import Job

SCRIPT = Path(__file__).with_name("sending.py")
UPDATES = 50
BUDDIES = {"buddies": {"mode": "copy"}}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_fifty_updates_with_a_switch_a_join_and_a_death(train: Callable[..., Job], stage: int) -> None:
    """Versions come in order, each as it was sent, and the receiver is never made again."""
    receiver, taken, over = GroupReceiver("127.0.0.1:0", timeout_seconds=20), list[Update](), threading.Event()

    def take() -> None:
        while not over.is_set():
            with suppress(MemberMissing):
                taken.append(receiver.update(timeout_seconds=1))

    taking = threading.Thread(target=take)
    variables = {"RECEIVER": receiver.address, "SWITCH_AT": "5", "STEP_SECONDS": "0.1"}
    job = train(nodes="1:3", stage=stage, block=BUDDIES, script=SCRIPT, variables=variables)
    job.coordinator("coordinator")
    taking.start()
    try:
        for node in ("a", "b"):
            job.node(node, is_host=0)
        two = job.settled(2)
        job.wait(lambda: len(taken) > 12, "updates of two")
        job.node("c", is_host=0)
        three = job.settled(3, two.generation)
        before = len(taken)
        job.wait(lambda: len(taken) > before + 8, "updates of three")
        job.kill("b")
        job.settled(2, three.generation)
        job.wait(lambda: len(taken) >= UPDATES, "further updates")
        job.end(ahead=3)
        assert {node: job.code(node) for node in "ac"} == {"a": 0, "c": 0}, job.logs()
    finally:
        over.set()
        taking.join()
        receiver.close()
    versions = [update.version for update in taken]
    assert versions == sorted(set(versions)) and len(versions) >= UPDATES
    sent = {row["version"]: row["digests"] for row in job.rows("sent")}
    assert all(update.digests == sent[update.version] for update in taken if update.version in sent)
    assert len(set(versions) - set(sent)) <= 1, "a version may be shown while the trainer's rank dies"
    assert len(sent) >= UPDATES and any(update.is_delta for update in taken)
    steps = [update.step for update in taken]
    assert sum(earlier >= later for earlier, later in pairwise(steps)) <= 1, "after a death"
