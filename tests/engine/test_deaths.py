"""A member that hangs or dies in a switch: all others come to one decision, within the time-out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as td

from ds_dynatrain.reshard.core import OldState
from ds_dynatrain.reshard.switch import Transaction
from tests.engine import faults, jobs
from tests.engine.pool import Died, RankPool
from tests.sets import one_in

SECONDS = 3.0
LONGER = SECONDS + 1.5
MARGIN = 4.0
ASK_AT = 3


@contextmanager
def befallen(victim: int, method: str, before: bool, dies: bool) -> Iterator[list[float]]:
    """On member `victim` something happens to the process right before or right after a method of the transaction.

    The block's value gets the time at which it goes on.
    """
    own, woken = getattr(Transaction, method), list[float]()

    def happen(switch: Transaction) -> None:
        if dies:
            os._exit(9)
        time.sleep(LONGER)
        woken.append(time.monotonic())

    def wrapped(self: Transaction, *arguments: Any) -> Any:
        if before:
            happen(self)
        result = own(self, *arguments)
        if not before:
            happen(self)
        return result

    if td.get_rank() != victim:
        yield woken
        return
    with patch.object(Transaction, method, wrapped):
        yield woken


@contextmanager
def noting_releases() -> Iterator[list[float]]:
    """Inside the block the times are noted at which this process lets go of the state before a switch."""
    own, released = OldState.release, list[float]()

    def release(self: OldState) -> None:
        released.append(time.monotonic())
        own(self)

    with patch.object(OldState, "release", release):
        yield released


def case(
    start: jobs.Sizes, target: jobs.Sizes, steps: int, fate: tuple[int, str, bool, bool] | None, rest: float = 0.0
) -> dict[str, Any]:
    """Train to `steps`, or leave the loop right after the switch if `steps` is 0; `fate` is what `befallen` takes.

    rest: seconds after each step.
    """
    settings = jobs.config("fp32", start)
    settings["dynatrain"]["timeout_seconds"] = SECONDS
    result: dict[str, Any] = {"record": jobs.Record()}
    happens = befallen(*(fate or (-1, "_move", False, False)))
    with noting_releases() as released, jobs.job(settings) as made, happens as woken:
        result |= {"released": released, "woken": woken}
        engine = made.engine
        try:
            if steps:
                schedule = {ASK_AT: target} if fate else {}
                faults.train(made, steps, schedule, result["record"], lambda made: time.sleep(rest))
            else:
                for batch in made.loader:
                    if engine.last_switch is not None:
                        break
                    jobs.one_micro_batch(engine, batch, result["record"])
                    if engine.global_steps == ASK_AT:
                        jobs.ask(engine, target)
        finally:
            result["event"] = engine.last_switch
    return result


def check_decision(results: list[Any], members: list[int], outcome: str) -> list[Any]:
    events = [results[member]["event"] for member in members]
    assert [event.outcome for event in events] == [outcome] * len(members), events
    assert all(event.pause_ms < 1e3 * (SECONDS + MARGIN) for event in events)
    return events


CHANGES = [
    pytest.param((2, 1), (4, 1), 3, id="waking member", marks=pytest.mark.full),
    pytest.param((4, 3), (2, 0), 2, id="leaving member"),
    pytest.param((2, 1), (4, 1), 1, id="staying member", marks=pytest.mark.full),
]


@pytest.mark.full
@pytest.mark.parametrize(("start", "target", "victim"), CHANGES)
def test_hang_between_vote_and_commit(pool: RankPool, start: jobs.Sizes, target: jobs.Sizes, victim: int) -> None:
    fate = victim, "conclude", True, False
    found = pool.run(case, start=start, target=target, steps=ASK_AT + 5, fate=fate, rest=0.5)
    events = check_decision(found, list(range(4)), "committed")
    assert any(f"no answer from member {victim}" in warning for event in events for warning in event.warnings)
    assert len(jobs.global_losses([each["record"] for each in found])) == ASK_AT + 5
    (woken,) = found[victim]["woken"]
    assert all(woken <= released for each in found for released in each["released"])  # a warning releases nothing
    assert all(len(each["released"]) == 1 for each in found)


@pytest.mark.parametrize(("start", "target", "victim"), CHANGES)
def test_hang_before_the_vote(pool: RankPool, start: jobs.Sizes, target: jobs.Sizes, victim: int) -> None:
    quiet = pool.once(case, start=start, target=target, steps=ASK_AT + 5, fate=None)
    found = pool.run(case, start=start, target=target, steps=ASK_AT + 5, fate=(victim, "_carry", True, False))
    events = check_decision(found, list(range(4)), "rolled_back")
    assert f"no answer from member {victim}" in events[0].reason
    for mine, other in zip(found, quiet, strict=True):
        assert mine["record"].losses == other["record"].losses


@pytest.mark.parametrize(("start", "target", "victim"), CHANGES)
def test_death_between_vote_and_commit(pool: RankPool, start: jobs.Sizes, target: jobs.Sizes, victim: int) -> None:
    fate = (victim, "conclude", True, True)
    found = pool.run(case, start=start, target=target, steps=0, fate=fate, may_die=[victim])
    assert found[victim] == Died(9)
    events = check_decision(found, [member for member in range(4) if member != victim], "committed")
    assert any(f"no answer from member {victim}" in warning for event in events for warning in event.warnings)


@pytest.mark.parametrize(
    "method",
    one_in(5, ["_move", "_verify", "_meet", "_rebuild", "_carry"]),
)
def test_death_of_a_waking_member_before_its_vote(pool: RankPool, method: str) -> None:
    """The others roll back and train on: the dead one had no part in the present world."""
    quiet = pool.once(case, start=(2, 1), target=(3, 1), steps=ASK_AT + 5, fate=None)
    assert quiet[0]["event"] is None
    found = pool.run(
        case, start=(2, 1), target=(4, 1), steps=ASK_AT + 5, fate=(3, method, True, True), may_die=[3], seconds=40
    )
    events = check_decision(found, [0, 1, 2], "rolled_back")
    assert all("member 3" in event.reason for event in events), events[0].reason
    for member in (0, 1):
        assert found[member]["record"].losses == quiet[member]["record"].losses


def test_death_of_a_working_member_before_its_vote(pool: RankPool) -> None:
    fate = (2, "_carry", True, True)
    found = pool.run(case, start=(4, 1), target=(2, 1), steps=0, fate=fate, may_die=[2])
    events = check_decision(found, [0, 1, 3], "rolled_back")
    assert all("member 2" in event.reason for event in events), events[0].reason
