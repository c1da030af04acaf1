"""The adversarial order: without a synchronisation the old bytes are there, each time; with it, the new ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.device import lab

pytestmark = pytest.mark.on_device


def zeros() -> torch.Tensor:
    made = torch.zeros(4, device=lab.NAME)
    lab.synchronize()
    return made


def side() -> torch.Stream:
    stream: torch.Stream = lab.Stream()
    return stream


ORDERS: dict[str, Callable[[torch.Stream], object]] = {
    "the stream is synchronised": lambda stream: stream.synchronize(),
    "the device is synchronised": lambda stream: lab.synchronize(),
    "the present stream waits for the stream": lambda stream: lab.current_stream().wait_stream(stream),
    "the present stream waits for an event": lambda stream: stream.record_event().wait(lab.current_stream()),
    "an event is synchronised": lambda stream: stream.record_event().synchronize(),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("what", ["a copy from pinned memory", "a copy on the device", "an operator", "in place"])
def test_another_stream_is_not_seen_until(name: str, what: str) -> None:
    source, target, stream = torch.ones(4), zeros(), side()
    here, pinned = source.to(lab.NAME), source.pin_memory()
    lab.synchronize()
    with lab.stream(stream):
        if what == "a copy from pinned memory":
            target.copy_(pinned, non_blocking=True)
        elif what == "a copy on the device":
            target.copy_(here)
        elif what == "in place":
            target.add_(1)
        else:
            target = here * 1
    if what == "an operator":
        assert target.isnan().all(), "its memory is there, and what was computed is not"
    else:
        assert target.tolist() == [0, 0, 0, 0]
    ORDERS[name](stream)
    assert target.tolist() == [1, 1, 1, 1]


def test_to_pinned_memory() -> None:
    target = torch.zeros(4).pin_memory()
    target.copy_(torch.ones(4, device=lab.NAME), non_blocking=True)
    assert target.tolist() == [0, 0, 0, 0]
    lab.current_stream().synchronize()
    assert target.tolist() == [1, 1, 1, 1]


def test_pinned_memory_is_read_late_and_other_memory_at_once() -> None:
    for pinned, expected in ((True, 2), (False, 1)):
        source, target = torch.ones(4, pin_memory=pinned), zeros()
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        assert target.tolist() == [expected] * 4


def test_the_present_stream_is_in_order() -> None:
    held = zeros()
    held.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    doubled = held * 2
    held.zero_()
    assert doubled.sum().item() == 8


def test_item_orders_its_own_stream_alone() -> None:
    target, stream = zeros(), side()
    with lab.stream(stream):
        target.fill_(3)
    assert target[0].item() == 0
    with lab.stream(stream):
        assert target[0].item() == 3


def test_an_event_is_a_place_in_its_stream() -> None:
    first, second, stream = zeros(), zeros(), side()
    with lab.stream(stream):
        first.fill_(1)
        event = stream.record_event()
        second.copy_(first)
    lab.current_stream().wait_event(event)
    assert (first.tolist(), second.tolist()) == ([1] * 4, [0] * 4)
    lab.synchronize()
    assert second.tolist() == [1] * 4 and lab.waiting() == 0


def test_who_asks_an_event_again_and_again_gets_there() -> None:
    target, stream = zeros(), side()
    with lab.stream(stream):
        target.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    event = stream.record_event()
    assert not event.query() and event.query() and stream.query()
    assert target.tolist() == [1] * 4


def copying_aside(source: torch.Tensor, target: torch.Tensor) -> torch.Stream:
    """The stream on which a copy is queued."""
    stream = side()
    stream.wait_stream(lab.current_stream())
    with lab.stream(stream):
        target.copy_(source)
    return stream


def test_memory_that_others_still_work_on_is_not_given_away() -> None:
    source, target = torch.ones(4, device=lab.NAME), zeros()
    used = lab.memory_allocated()
    stream = copying_aside(source, target)
    del source
    assert lab.memory_allocated() == used - 16
    with pytest.raises(RuntimeError, match=r"16 bytes of stream 0 were freed while .* and may be given away now"):
        torch.empty(4, device=lab.NAME)
    stream.synchronize()
    assert target.tolist() == [1] * 4, "here they were kept for it all the same"


def test_memory_may_be_freed_behind_a_wait_or_a_record() -> None:
    for way in ("wait", "record"):
        source, target = torch.ones(4, device=lab.NAME), zeros()
        stream = copying_aside(source, target)
        if way == "wait":
            lab.current_stream().wait_stream(stream)
        else:
            source.record_stream(stream)
        del source
        torch.empty(4, device=lab.NAME)
        stream.synchronize()
        assert target.tolist() == [1] * 4
