"""Collectives that would never end raise when their world's sockets are shut down. Ranks are threads here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import DistError, HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from ds_dynatrain.elastic.abort import WorldSockets, open_sockets
from ds_dynatrain.elastic.store import serve_store
from ds_dynatrain.errors import WorldChanged

WAIT = timedelta(seconds=20)


def groups(size: int) -> list[Any]:
    """One gloo group, an object for each of its ranks."""
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: ProcessGroupGloo(store, rank, size, WAIT), range(size)))


def blocked(call: Callable[[], object]) -> Future[object]:
    """A call in a thread, once it had time to wait for somebody."""
    result: Future[object] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.2)
    assert not result.done()
    return result


def test_a_collective_in_flight_raises_at_once(in_time: Callable[[float, float], None]) -> None:
    sockets = WorldSockets()
    with sockets.building():
        ranks = groups(3)
    waiting = [blocked(lambda rank=rank: rank.allreduce([torch.ones(4)]).wait()) for rank in ranks[:2]]
    begin = time.monotonic()
    assert sockets.abort() > 0
    for each in waiting:
        with pytest.raises(RuntimeError):
            each.result(5)
    in_time(time.monotonic() - begin, 2)
    sockets.forget()
    assert sockets.abort() == 0


def test_a_group_that_is_being_built_raises_too(in_time: Callable[[float, float], None]) -> None:
    server = serve_store("127.0.0.1")
    sockets = WorldSockets()

    def build() -> object:
        with sockets.building():
            store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=WAIT)
            return ProcessGroupGloo(PrefixStore("world/a/1", store), 0, 2, WAIT)

    building = blocked(build)
    begin = time.monotonic()
    sockets.abort()
    with pytest.raises((DistError, RuntimeError)):
        building.result(5)
    in_time(time.monotonic() - begin, 2)


def test_an_abort_that_comes_too_early_is_not_lost() -> None:
    with pytest.raises(WorldChanged), WorldSockets().building(lambda: False):
        raise AssertionError("it must not be built")


def test_other_sockets_are_left_alone() -> None:
    sockets, pairs = WorldSockets(), list[socket.socket]()
    before = tcp_pair()
    with sockets.building():
        world, spared, local = tcp_pair(), tcp_pair(), socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0))
    after = tcp_pair()
    pairs += [*before, *world, *spared, *local, *after, listener]
    assert sockets.abort(spare=frozenset(end.fileno() for end in spared)) == 2
    for here, there in (before, spared, local, after):
        here.send(b"x")
        assert there.recv(1) == b"x"
    assert world[0].recv(1) == b""
    socket.create_connection(listener.getsockname()).close()
    for each in pairs:
        each.close()


def test_a_descriptor_that_was_used_again_is_left_alone() -> None:
    sockets = WorldSockets()
    with sockets.building():
        old = tcp_pair()
    numbers = {end.fileno() for end in old}
    for end in old:
        end.close()
    new = tcp_pair()
    assert numbers & {end.fileno() for end in new}, "the system gives the lowest free number"
    assert sockets.abort() == 0
    assert set(open_sockets()) >= {end.fileno() for end in new}
    for end in new:
        end.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]
