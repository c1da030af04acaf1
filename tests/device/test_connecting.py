"""When a switch's communicators are made, and what becomes of the switch where one member cannot make them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as td

from ds_dynatrain.adapters.groups import communicators
from ds_dynatrain.adapters.groups.communicators import go_on
from ds_dynatrain.adapters.groups.device import compute_device
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.worlds import LaunchWorld, launch_store
from ds_dynatrain.engine.switcher import SwitchingEngine
from tests.engine import jobs
from tests.engine.pool import RankPool

ASKED_AT, AGAIN_AT, STEPS = 2, 7, 12
SECONDS = 4
"""That members wait for each other where one of them hangs, which it does to the end of the case."""
WHERE = 1
"""The member that cannot connect."""
REASONS = {"raises": "member 1: RuntimeError: no way there", "hangs": "has not connected ranks"}


@contextmanager
def cannot_connect(how: str) -> Iterator[None]:
    """Inside the block the next communicator of this member fails, or hangs to the end of the block."""
    ended, own, faults = threading.Event(), communicators.make_backend, [how] if how else []

    def backend(*arguments: Any) -> Any:
        if faults:
            if faults.pop() == "hangs":
                ended.wait()
            raise RuntimeError("no way there")
        return own(*arguments)

    with (
        patch.object(communicators, "make_backend", backend),
        patch.object(communicators, "default_pg_timeout", timedelta(seconds=2 * SECONDS)),
    ):
        try:
            yield
        finally:
            ended.set()
            for thread in threading.enumerate():
                if thread.name == "dynatrain-connect":
                    thread.join(4 * SECONDS)


def wait_until_prepared(engine: Any) -> None:
    """So that there is a boundary left before that of the switch, however slow the machine is."""
    preparation, end = engine._parts.preparation, time.monotonic() + engine._parts.settings.timeout_seconds
    while not preparation.proposal.is_prepared(preparation.board) and time.monotonic() < end:
        time.sleep(0.01)


def case(start: jobs.Sizes, target: jobs.Sizes, ahead: int, fault: str = "") -> dict[str, Any]:
    """Train; ask for a switch `ahead` steps before it, and once more after one with a fault.

    Losses, events, and at which steps this member has connected to others ahead.
    """
    config, record, ahead_at = jobs.config("fp32", start), jobs.Record(), []
    config["dynatrain"] |= {"timeout_seconds": SECONDS} if fault == "hangs" else {}
    events, own = dict[int, Any](), SwitchingEngine.connect_ahead

    def connect_ahead(self: SwitchingEngine) -> None:
        ahead_at.append(self.global_steps)
        own(self)

    with jobs.job(config) as made, patch.object(SwitchingEngine, "connect_ahead", connect_ahead):
        engine = made.engine
        with cannot_connect(fault if engine._parts.control.member == WHERE else ""):
            while engine.idle or engine.global_steps < STEPS:
                for batch in made.loader:
                    jobs.one_micro_batch(engine, batch, record)
                    events[engine.global_steps] = engine.last_switch
                    if ahead and engine.global_steps in ((ASKED_AT, AGAIN_AT) if fault else (ASKED_AT,)):
                        engine.switch(data=target[0], zero_stage=target[1], at=engine.global_steps + ahead)
                        wait_until_prepared(engine)
                    if engine.global_steps >= STEPS:
                        break
    return {"record": record, "events": events, "last": engine.last_switch, "ahead": ahead_at}


def losses(found: list[dict[str, Any]]) -> list[float]:
    return jobs.global_losses([each["record"] for each in found])


@pytest.mark.parametrize(
    ("start", "target"),
    [
        pytest.param((2, 1), (4, 1), id="members wake"),
        pytest.param((4, 2), (2, 3), id="members go", marks=pytest.mark.full),
    ],
)
def test_they_are_made_before_the_pause(lab_pool: RankPool, start: jobs.Sizes, target: jobs.Sizes) -> None:
    expected = losses(lab_pool.run(case, start=start, target=target, ahead=0))
    for ahead in (3, 1):
        found = lab_pool.run(case, start=start, target=target, ahead=ahead)
        assert jobs.furthest(losses(found), expected) < 1e-5
        event = found[0]["last"]
        assert event.outcome == "committed", event.reason
        assert event.step == ASKED_AT + ahead and event.communicators_built == 1
        assert event.connect_pause_ms == (0.0 if ahead > 1 else event.connect_ms) and event.connect_ms > 0
        steps = [[ASKED_AT + 1] if each["record"].losses.get(0) else [0] for each in found]  # 0 where it was idle
        assert [each["ahead"] for each in found] == (steps if ahead > 1 else [[]] * 4)
        assert ("before the pause" in event.line()) == (ahead > 1)


def test_a_switch_of_the_stage_alone_connects_nobody(lab_pool: RankPool) -> None:
    found = lab_pool.run(case, start=(4, 1), target=(4, 3), ahead=3)
    assert [each["ahead"] for each in found] == [[]] * 4
    assert found[0]["last"].communicators_built == 0 < found[0]["last"].communicators_kept


@pytest.mark.parametrize(
    ("fault", "ahead"),
    [
        pytest.param("raises", 3, id="raises ahead"),
        pytest.param("hangs", 1, id="hangs in the pause", marks=pytest.mark.full),
        pytest.param("raises", 1, id="raises in the pause", marks=pytest.mark.full),
        pytest.param("hangs", 3, id="hangs ahead", marks=pytest.mark.full),
    ],
)
def test_one_that_cannot_connect_undoes_the_switch(lab_pool: RankPool, fault: str, ahead: int) -> None:
    """Training goes on in the old world, on the one that failed, too; the same switch comes about later."""
    start, target = (2, 1), (4, 1)
    expected = losses(lab_pool.run(case, start=start, target=target, ahead=0))
    begin = time.monotonic()
    found = lab_pool.run(case, start=start, target=target, ahead=ahead, fault=fault)
    assert jobs.furthest(losses(found), expected) < 1e-5 and time.monotonic() - begin < 10 * SECONDS
    for each in found[:2]:
        event = each["events"][AGAIN_AT]
        assert event.outcome == "rolled_back" and REASONS[fault] in event.reason, event.reason
        assert event.step == ASKED_AT + 1, "where they were to connect"
    assert [each["last"].outcome for each in found] == ["committed"] * 4, [each["last"].reason for each in found]


def meeting(size: int, number: int) -> list[float]:
    """What the first `size` processes of the launch add up over a group of theirs that serves the device."""
    launch, found = LaunchWorld.current(), []
    if launch.member < size:
        status, store = GroupStatus(), launch_store()
        group = LaunchWorld.formed(store, f"start {number}", launch.member, size, SECONDS, status)
        for _ in range(2):  # the second time there is one
            group.connect(SECONDS, go_on)
            held = torch.full((3,), 1.0 + launch.member, device=compute_device())
            td.all_reduce(held, group=group.group)
            found.append(float(held.sum()))
        made = [*status.gate.communicators]
        assert len(made) == (size > 1) and not any(each.is_ended for each in made)
        assert "lab" in td.get_backend_config(group.group) or size == 1
        group.retire().join()
        assert all(each.is_ended for each in made)
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_those_that_start_a_job_are_connected_before_there_is_a_world(lab_pool: RankPool, size: int) -> None:
    total = 3.0 * sum(range(1, size + 1))
    assert lab_pool.run(meeting, size=size, number=size)[:size] == [[total, total]] * size
