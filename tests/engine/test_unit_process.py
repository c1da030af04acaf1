"""What is there once in a process: engines, held no longer than they live, and membership."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as td

from ds_dynatrain.adapters.groups.process_groups import make_fake_group, register, unregister
from ds_dynatrain.reshard.process import Process


class Engine:
    """As far as it is asked, where it has the process to itself. group: of the launch."""

    def __init__(self, group: Any = None) -> None:
        self.own, self.launch = None, SimpleNamespace(group=group)


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def launch() -> Iterator[td.ProcessGroup]:
    """A group that torch knows."""
    made = make_fake_group("dynatrain_of_a_test", 0, 1)
    register(*made, (0,))
    yield made[0]
    unregister(made[0])


def test_engines_are_dropped_with_whoever_holds_them(process: Process) -> None:
    engine: Any = Engine()
    process.add(engine)
    assert process.engines == [engine] and not process.is_shared
    del engine
    gc.collect()
    assert process.engines == []


def test_membership_is_asked_for_once_there_is_a_job(process: Process) -> None:
    with pytest.raises(RuntimeError, match="call initialize"):
        _ = process.membership
    membership: Any = object()
    process.membership = membership
    assert process.membership is membership


def test_a_course_is_that_of_the_engines_that_are_open(process: Process, launch: td.ProcessGroup) -> None:
    engine: Any = Engine(launch)
    process.add(engine)
    sync_points = process.sync_points
    process.begin()
    assert process.sync_points is sync_points and process.engines == [engine], "one more engine beside it"
    process.leave(engine)
    assert process.sync_points is not sync_points


def test_engines_without_their_groups_are_not_counted(process: Process, launch: td.ProcessGroup) -> None:
    """The script has called `destroy_process_group`, and makes an engine anew while it holds the old one."""
    old: Any = Engine(launch)
    process.add(old)
    unregister(launch)
    process.begin()
    assert process.engines == []


def test_early_is_found_where_its_group_is_the_present_one(process: Process) -> None:
    early: Any = SimpleNamespace(launch=SimpleNamespace(group=object()))
    process.early = early
    assert process.found_early() is None, "torch.distributed speaks of no group, or of another"
