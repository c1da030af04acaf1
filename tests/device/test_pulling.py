"""Members on one machine read each other's memory on the device: the same state as by messages, and none of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as td

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.executor import MINIMUM_BUDGET_BYTES
from ds_dynatrain.transfer.stream import Stream
from tests.device.sharing import LabMemory
from tests.engine import jobs, oracle
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(4, 1), (3, 2), (4, 3), (2, 3), (2, 0)]
"""Idle members that come in, and leave; every stage."""
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@dataclass
class Count:
    """Bytes that this member has read, that it has sent in messages of a plan, and how many of these from pinned
    memory.
    """

    read: int = 0
    sent: int = 0
    pinned: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    found, read, start = Count(), LabMemory.read, Stream.advance

    def reading(self: Any, address: int, matrix: Any, into: Any, place: Any) -> None:
        found.read += matrix.nbytes
        read(self, address, matrix, into, place)

    def starting(self: Any) -> None:
        before = len(self._under_way)
        start(self)
        for _, parcel, staged in [*self._under_way][before:] if self.is_send else []:
            data = self.regions.view(parcel.matrices[0]) if staged is None else staged
            found.sent += data.numel()
            found.pinned += data.numel() if data.is_pinned() else 0

    with patch.object(LabMemory, "read", reading), patch.object(Stream, "advance", starting):
        yield found


@contextmanager
def unable(member: int | None) -> Iterator[None]:
    """Inside the block nobody can read the device's memory of one member."""
    share, is_here = LabMemory.share, td.get_rank() == member  # before the job, which gives other ranks

    def shared(self: Any, tensor: Any) -> Any:
        if is_here:
            raise TransferError("no handle for such memory")
        return share(self, tensor)

    with patch.object(LabMemory, "share", shared):
        yield


def case(
    way: str, zero: dict[str, Any], path: list[jobs.Sizes], cannot: int | None = None, **block: Any
) -> tuple[Any, Count]:
    """The state at the end, if this member trains there, and what it has read and sent. block: more for ours."""
    settings = jobs.config("bf16", (2, 1))
    settings["dynatrain"] |= {"transport": way, **block}
    settings["zero_optimization"] |= zero
    state = None
    with counted() as count, unable(cannot), jobs.job(settings) as made:
        jobs.train(made, len(path) + 1, dict(enumerate(path, 1)))
        state = oracle.gather(made.engine)
    return state, count


def test_all_bytes_are_read(lab_pool: RankPool) -> None:
    few = {"memory_budget_bytes": MINIMUM_BUDGET_BYTES}  # of staging, so that each slot has several messages
    by_messages = lab_pool.run(case, way="gloo", zero={}, path=PATH, **few)
    found = lab_pool.run(case, way="ipc", zero={}, path=PATH)
    assert sum(count.read for _, count in found) > 0 == sum(count.sent for _, count in found)
    assert not any(count.read for _, count in by_messages)
    assert sum(count.sent for _, count in by_messages) > 0
    assert all(count.pinned == count.sent for _, count in by_messages), "an accelerator copies there by itself"
    assert oracle.differences(found[0][0], by_messages[0][0]) == []


def test_what_is_offloaded_goes_by_messages(lab_pool: RankPool) -> None:
    path: list[jobs.Sizes] = [(4, 1), (2, 2)]
    expected = lab_pool.run(case, way="gloo", zero=OFFLOAD, path=path)
    found = lab_pool.run(case, way="auto", zero=OFFLOAD, path=path)
    assert min(sum(count.read for _, count in found), sum(count.sent for _, count in found)) > 0
    assert oracle.differences(found[0][0], expected[0][0]) == []


@pytest.mark.full
def test_one_member_that_cannot_be_read_gets_messages(lab_pool: RankPool) -> None:
    path: list[jobs.Sizes] = [(4, 1), (3, 3)]
    expected = lab_pool.run(case, way="gloo", zero={}, path=path)
    found = lab_pool.run(case, way="auto", zero={}, path=path, cannot=1)
    assert min(sum(count.read for _, count in found), sum(count.sent for _, count in found)) > 0
    assert oracle.differences(found[0][0], expected[0][0]) == []


def asked_in_vain() -> tuple[str, str]:
    """What becomes of a switch where reading is asked for and one member cannot be read."""
    settings = jobs.config("fp32", (4, 1))
    settings["dynatrain"] |= {"transport": "ipc"}
    with unable(1), jobs.job(settings) as made:
        jobs.train(made, 1)
        jobs.ask(made.engine, (2, 1))
        made.engine.boundary()
        event = made.engine.last_switch
        jobs.one_micro_batch(made.engine, next(iter(made.loader)), jobs.Record())
        return event.outcome, event.reason


def test_no_switch_comes_about_where_reading_is_asked_for_and_not_possible(lab_pool: RankPool) -> None:
    for outcome, reason in lab_pool.run(asked_in_vain):
        assert outcome == "rolled_back" and 'dynatrain.transport is "ipc"' in reason and "cannot read" in reason
