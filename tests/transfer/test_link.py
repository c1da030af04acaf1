"""A transport to one member over a connection of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.transfer import Link

SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = socket.socketpair()
    links = Link(one, 5), Link(other, 3)
    yield links
    for link in links:
        link.close()


def soon(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def test_messages_come_in_their_order_both_ways(ends: tuple[Link, Link]) -> None:
    """Larger than what the system keeps, and none that is empty is lost."""
    one, other = ends
    sent = [torch.arange(3), torch.empty(0), torch.arange(5_000_000, dtype=torch.float32), torch.tensor([7])]
    for link in ends:
        under_way = [link.send(each, 0, 1) for each in sent]
        assert len(under_way) == len(sent), "nothing waits"
    for link in ends:
        for each in sent:
            found = torch.zeros_like(each)
            link.receive(found, 0, 2).wait(soon())
            assert torch.equal(found, each)
    assert not one.is_over and not other.is_over


def test_who_is_late_is_named(ends: tuple[Link, Link]) -> None:
    with pytest.raises(MemberMissing, match="5"):
        ends[0].receive(torch.zeros(1), 5, 1).wait(soon(0.05))
    stuck = ends[0].send(torch.zeros(50_000_000), 5, 1)
    with pytest.raises(MemberMissing, match="send of 200000000 bytes"):
        stuck.wait(soon(0.05))


@pytest.mark.parametrize("closing", [0, 1], ids=["here", "there"])
def test_the_end_of_a_link_ends_what_waits(ends: tuple[Link, Link], closing: int) -> None:
    """From another thread, on whichever side."""
    arriving, leaving = ends[0].receive(torch.zeros(9), 5, 1), ends[0].send(torch.zeros(50_000_000), 5, 1)
    threading.Timer(0.1, ends[closing].close).start()
    for waits in (arriving, leaving):
        with pytest.raises(TransferError, match="member 5 failed"):
            waits.wait(soon())
    assert ends[0].is_over
    with pytest.raises(TransferError):
        ends[0].send(torch.zeros(1), 5, 1).wait(soon())
    with pytest.raises(TransferError):
        ends[0].receive(torch.zeros(1), 5, 1).wait(soon())
