"""The extension between a balancer and an actuator: what begins a search anew, and what a failure costs."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from ds_dynatrain.balance.window import Busy
from ds_dynatrain.clocks.extension import Clocks
from ds_dynatrain.config import split_config
from tools.throttle import Throttle

CURVES = (1.0, 0.5)
"""Seconds of the two ranks at the highest clock; only the second one's depend on a clock here."""


class Member:
    """Rank 1 of two, with a balancer that says what is measured."""

    def __init__(self, actuator: str = "tools.throttle:Throttle") -> None:
        _, block = split_config({"dynatrain": {"clocks": {"actuator": actuator}, "balance": {}}})
        self.extension, self.balancer, self.since = Clocks(block), Mock(busy=None), 0  # type: ignore[arg-type]
        self.extension.check_launch(is_elastic=False)
        self.watcher = Mock(poll=Mock(return_value=None))
        parts: Any = SimpleNamespace(rank=1, global_steps=7, candidates=SimpleNamespace(mine=1))
        with patch("ds_dynatrain.clocks.watcher.start", return_value=self.watcher):
            self.extension.attach(SimpleNamespace(balancer=self.balancer, _parts=parts))

    def window(self, slower: float = 1.0) -> None:
        """End a window in which rank 1 took this many times as long as usual."""
        self.balancer.busy = Busy((CURVES[0], CURVES[1] * slower * Throttle.longer()), self.since)
        self.extension.after_step()
        self.extension.after_step()  # a step without a window changes nothing

    def settle(self) -> float:
        """Search until the clock is known, and return its share of the highest one."""
        for _ in range(9):
            self.window()
        assert self.extension.search is not None and self.extension.search.is_over
        return Throttle.share


@pytest.fixture
def member() -> Any:
    found = Member()
    yield found
    found.extension.on_end()
    assert Throttle.share == 1.0


def test_costs_that_change_begin_a_new_search(member: Member) -> None:
    share = member.settle()
    assert share == 0.45  # 0.2 + 0.8 / 0.45 is just below 2
    asked = member.balancer.expect_new_costs.call_count
    member.window()
    assert Throttle.share == share and member.balancer.expect_new_costs.call_count == asked
    member.since = 50
    member.window(slower=1.5)
    assert Throttle.share == 1.0 and member.extension.search is None
    assert member.balancer.expect_new_costs.call_count == asked + 1
    assert member.settle() == share


def test_a_change_of_members_gives_the_clock_back(member: Member) -> None:
    assert member.settle() < 1
    member.extension.on_change(Mock())
    assert Throttle.share == 1.0 and member.extension.search is None


def test_a_clock_that_cannot_be_set_costs_no_step(member: Member, caplog: pytest.LogCaptureFixture) -> None:
    failing = patch.object(Throttle, "set", side_effect=RuntimeError("zeusd is gone"))
    with failing, caplog.at_level(logging.ERROR, "ds_dynatrain"):
        member.window()
    assert Throttle.share == 1.0 and "member 1 cannot set its clock: zeusd is gone" in caplog.text


def test_without_its_watcher_no_clock_is_lowered(member: Member, caplog: pytest.LogCaptureFixture) -> None:
    member.watcher.poll.return_value = 1
    with caplog.at_level(logging.ERROR, "ds_dynatrain"):
        member.window()
    assert Throttle.share == 1.0 and "the process that would give the clock back has ended" in caplog.text


def test_dry_sets_nothing_and_starts_no_process() -> None:
    member = Member("dry")
    member.window()
    assert member.extension.search is not None and member.extension.search.is_over
    assert member.extension.search.places[1] == 40  # of 10 to 100 %: half of the highest
    member.balancer.expect_new_costs.assert_not_called()
    member.extension.on_end()
    member.watcher.kill.assert_not_called()
