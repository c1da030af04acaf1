"""Attempts to connect to other hosts, with real sockets."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.messages import Probed
from ds_dynatrain.elastic.reach import REACH_SECONDS, Reach, group_host, reached_of
from tools.nodes import free_port


@pytest.fixture
def silent() -> Iterator[str]:
    """An address whose host answers nothing: a queue of connections that is full drops what comes."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            each = stack.enter_context(socket.socket())
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_who_listens_and_who_refuses_is_reached(silent: str) -> None:
    refuses = f"127.0.0.1:{free_port()}"
    other = Reach(lambda *_: None)
    listens = other.listen()
    begin = time.monotonic()
    assert reached_of([listens, refuses, silent], 1.0) == Probed(reached=(listens, refuses), unreached=(silent,))
    assert 1.0 <= time.monotonic() - begin < REACH_SECONDS
    other.close()


def test_one_that_is_asked_tells() -> None:
    told: queue.Queue[Probed] = queue.Queue()
    one = Reach(told.put)
    address = one.listen()
    for _ in range(2):
        one.ask([address])
        assert told.get(timeout=10) == Probed(reached=(address,))
    one.answer()
    one.close()


def test_it_listens_where_process_groups_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert Address(group_host(), 1).host in ("127.0.0.1", "::1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert group_host() == "" and Reach(lambda *_: None).listen() == ""
