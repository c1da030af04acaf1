"""Moves by the library of the device's collectives: the same state as by messages over the host, and none of these."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as td

from ds_dynatrain.adapters.groups import communicators
from ds_dynatrain.adapters.groups.communicators import CommunicatorLink
from ds_dynatrain.adapters.groups.device import device_backend
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.reshard.switch import Transaction
from ds_dynatrain.transfer import RoutedTransport, batched
from ds_dynatrain.transfer.batched import BatchedMoves
from ds_dynatrain.transfer.device_memory import PROBE_BYTES
from ds_dynatrain.transfer.executor import TAG
from tests.device.sharing import LabMemory
from tests.device.test_pulling import OFFLOAD, unable
from tests.engine import jobs, oracle
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(4, 1), (3, 2), (4, 3), (4, 0), (2, 3), (2, 1)]
"""Idle members that come in, and leave; a change of the stage alone; every stage."""
SECONDS = 4
"""That members wait for each other, where one of them does not send."""
ASKED_AT, STEPS = (1, 3), 6


@dataclass
class Count:
    """Bytes that this member has sent in batches, has read, and has sent by its plan over the host."""

    batched: int = 0
    read: int = 0
    sent: int = 0
    batches: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    found, exchange, read, send = Count(), CommunicatorLink.exchange, LabMemory.read, RoutedTransport.send

    def exchanging(self: Any, sends: Any, receives: Any) -> None:
        found.batched += sum(tensor.numel() for tensor, _ in sends)
        found.batches += 1
        exchange(self, sends, receives)

    def reading(self: Any, address: int, matrix: Any, into: Any, place: Any) -> None:
        found.read += matrix.nbytes if into.numel() > PROBE_BYTES else 0
        read(self, address, matrix, into, place)

    def sending(self: Any, tensor: Any, member: int, tag: int) -> Any:
        found.sent += tensor.numel() * tensor.element_size() if tag == TAG else 0
        return send(self, tensor, member, tag)

    with ExitStack() as stack:
        stack.enter_context(patch.object(CommunicatorLink, "exchange", exchanging))
        stack.enter_context(patch.object(LabMemory, "read", reading))
        stack.enter_context(patch.object(RoutedTransport, "send", sending))
        stack.enter_context(patch.object(communicators, "GROUPING", (device_backend(),)))  # as NCCL
        yield found


def case(
    way: str,
    path: list[jobs.Sizes],
    zero: dict[str, Any],
    bundle_bytes: int = batched.BUNDLE_BYTES,
    cannot: int | None = None,
) -> tuple[Any, Count, list[Any]]:
    """The state at the end, if this member trains there, what it has sent, and the events."""
    settings = jobs.config("bf16", (2, 1))
    settings["dynatrain"] |= {"transport": way}
    settings["zero_optimization"] |= zero
    state, events = None, list[Any]()
    small = patch.object(batched, "BUNDLE_BYTES", bundle_bytes)
    with small, counted() as count, unable(cannot), jobs.job(settings) as made:
        made.engine.on_switch(events.append)
        jobs.train(made, len(path) + 1, dict(enumerate(path, 1)))
        state = oracle.gather(made.engine)
    return state, count, events


@pytest.mark.parametrize("bundle_bytes", [pytest.param(batched.BUNDLE_BYTES, marks=pytest.mark.full), 300])
def test_all_bytes_go_in_batches(lab_pool: RankPool, bundle_bytes: int) -> None:
    """In one for each switch, or in many."""
    expected = lab_pool.run(case, way="gloo", zero={}, path=PATH)
    found = lab_pool.run(case, way="nccl", zero={}, path=PATH, bundle_bytes=bundle_bytes)
    counts = [count for _, count, _ in found]
    assert sum(count.batched for count in counts) > 0 == sum(count.sent + count.read for count in counts)
    assert not any(count.batched for _, count, _ in expected)
    assert oracle.differences(found[0][0], expected[0][0]) == []
    assert (max(count.batches for count in counts) > 2 * len(PATH)) == (bundle_bytes == 300)


@pytest.mark.full
def test_members_that_cannot_be_read_get_batches(lab_pool: RankPool) -> None:
    path: list[jobs.Sizes] = [(4, 1), (3, 3)]
    expected = lab_pool.run(case, way="gloo", zero={}, path=path)
    found = lab_pool.run(case, way="auto", zero={}, path=path, cannot=1)
    counts = [count for _, count, _ in found]
    assert min(sum(count.batched for count in counts), sum(count.read for count in counts)) > 0
    assert not any(count.sent for count in counts)
    assert oracle.differences(found[0][0], expected[0][0]) == []


def test_nobody_is_connected_for_it_where_all_can_be_read(lab_pool: RankPool) -> None:
    path: list[jobs.Sizes] = [(4, 1), (2, 3)]
    found = lab_pool.run(case, way="auto", zero={}, path=path)
    assert not any(count.batched for _, count, _ in found)
    assert [event.communicators_built for event in found[0][2]] == [1, 1]


@pytest.mark.full
def test_what_is_offloaded_goes_over_the_host(lab_pool: RankPool) -> None:
    path: list[jobs.Sizes] = [(4, 1), (2, 2)]
    expected = lab_pool.run(case, way="gloo", zero=OFFLOAD, path=path)
    found = lab_pool.run(case, way="nccl", zero=OFFLOAD, path=path)
    assert min(sum(count.batched for _, count, _ in found), sum(count.sent for _, count, _ in found)) > 0
    assert oracle.differences(found[0][0], expected[0][0]) == []


# ---- what fails -----------------------------------------------------------------------------------------------------


@contextmanager
def fails(how: str) -> Iterator[None]:
    """Inside the block the next moves of this member do: before their batches, in the middle of them, or never end.

    "first": before anyone has begun; "before": once another one has. "late": it is another one that fails, and goes
    back before this one comes to its moves.
    """
    queue, faults, ended = BatchedMoves._exchange, [how] if how else [], threading.Event()
    move = Transaction._link

    def link(self: Transaction) -> Any:
        fault = faults.pop() if faults and faults[0] in ("first", "before", "late") else ""
        if fault in ("before", "late"):
            self.control.wait({0: f"batches/{self.proposal.generation}"}, "what has begun", is_there=False)
        if fault in ("first", "before"):
            raise RuntimeError("out of memory before the moves")
        return move(self)

    def exchange(self: BatchedMoves, number: int) -> None:
        if faults:
            if faults.pop() == "hangs":
                ended.wait(4 * SECONDS)
            raise RuntimeError("out of memory in the moves")
        queue(self, number)

    with patch.object(Transaction, "_link", link), patch.object(BatchedMoves, "_exchange", exchange):
        try:
            yield
        finally:
            ended.set()
            for thread in threading.enumerate():
                if thread.name == "dynatrain-moves":
                    thread.join(4 * SECONDS)


def broken(
    how: str, start: jobs.Sizes, target: jobs.Sizes, asked_at: tuple[int, ...] = ASKED_AT
) -> tuple[Any, list[str], list[str], int]:
    """A switch whose moves fail on member 1, and the same once more: its outcomes and reasons, the state after, and how
    often a communicator was made anew.
    """
    settings, outcomes, reasons, record = jobs.config("fp32", start), list[str](), list[str](), jobs.Record()
    settings["dynatrain"] |= {"transport": "nccl", "timeout_seconds": SECONDS}
    here, there = (how, "late" if how == "first" else "")
    fault, renew = here if td.get_rank() == 1 else there, Mock(side_effect=World.renew)
    renewing = patch.object(World, "renew", lambda self, *given: renew(self, *given))
    with counted(), renewing, jobs.job(settings) as made, fails(fault):
        engine = made.engine
        for step in range(STEPS):
            jobs.one_micro_batch(engine, next(iter(made.loader)), record)
            if step in asked_at:
                jobs.ask(engine, target)
                engine.boundary()
                outcomes.append(engine.last_switch.outcome)
                reasons.append(engine.last_switch.reason)
        state = oracle.gather(engine)
    return state, outcomes, reasons, renew.call_count


WORDS = {
    "first": "out of memory before the moves",
    "before": "out of memory before the moves",
    "raises": "out of memory in the moves",
    "hangs": "batches between devices",
}


@pytest.mark.parametrize(
    ("how", "start", "target"),
    [
        pytest.param("first", (4, 1), (4, 3), id="gone back before the others begin", marks=pytest.mark.full),
        pytest.param("before", (4, 1), (4, 3), id="before, all stay", marks=pytest.mark.full),
        pytest.param("raises", (4, 1), (4, 3), id="raises, all stay"),
        pytest.param("hangs", (4, 3), (4, 1), id="hangs, all stay", marks=pytest.mark.full),
    ],
)
def test_moves_that_fail_undo_the_switch(lab_pool: RankPool, how: str, start: jobs.Sizes, target: jobs.Sizes) -> None:
    """Training goes on in the old world, over a communicator that is made anew if any member has used it.

    The same switch comes about later.
    """
    expected = lab_pool.run(broken, how="", start=start, target=target, asked_at=ASKED_AT[1:])
    begin = time.monotonic()
    found = lab_pool.run(broken, how=how, start=start, target=target)
    assert time.monotonic() - begin < 20 * SECONDS
    for _, outcomes, reasons, renewed in found:
        assert renewed == (0 if how == "first" else 1)
        assert outcomes == ["rolled_back", "committed"] and WORDS[how] in reasons[0], reasons
    assert oracle.differences(found[0][0], expected[0][0]) == []
