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

from ds_dynatrain.elastic.abort import WorldSockets, gloo_sockets, new_sockets, open_sockets
from ds_dynatrain.elastic.store import connected, serve_store
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
            store = connected(lambda: client(server.port), 5)
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
    """A thread opens some all the time while groups are built: in Python, and over stores, which libraries do in C."""
    sockets, opened, store = WorldSockets(), list[tuple[socket.socket, socket.socket]](), serve_store("127.0.0.1")
    boards, has_built, has_opened = list[TCPStore](), threading.Event(), threading.Semaphore(0)

    def run() -> None:
        while not has_built.wait(0.001):
            opened.extend([tcp_pair(), tcp_pair("127.0.0.2"), socket.socketpair()])
            boards.append(connected(lambda: client(store.port), 5))
            has_opened.release()

    thread = threading.Thread(target=run)
    with sockets.building():
        thread.start()
        ranks = groups(3)
        assert all(has_opened.acquire(timeout=20) for _ in range(2))
        has_built.set()
        thread.join()
        listener = socket.create_server(("127.0.0.1", 0))
    waiting = blocked(ranks[0].allreduce([torch.ones(4)]).wait)
    ended = sockets.abort()
    assert 3 <= ended <= 6, "both ends of three pairs, but those that gloo has closed as the other one was shut"
    with pytest.raises(RuntimeError):
        waiting.result(5)
    for here, there in opened:
        here.send(b"x")
        assert there.recv(1) == b"x"
    for board in boards:
        board.set("it", "answers")
    boards.clear()
    del board  # a store that lives until Python ends may abort the process then
    socket.create_connection(listener.getsockname()).close()
    for each in [*(end for pair in opened for end in pair), listener]:
        each.close()


def test_a_descriptor_that_was_used_again_is_left_alone() -> None:
    sockets, before = WorldSockets(), gloo_sockets()
    with sockets.building():
        ranks = groups(2)
    numbers = set(new_sockets(before, gloo_sockets()))
    assert len(numbers) == 4
    ranks.clear()
    pairs = [tcp_pair() for _ in numbers]
    new = {end.fileno() for pair in pairs for end in pair}
    assert numbers & new, "the system gives the lowest free number"
    assert sockets.abort() == 0
    assert set(open_sockets()) >= new
    for here, there in pairs:
        here.close()
        there.close()


def client(port: int) -> TCPStore:
    """A connection of its own to a store of this machine."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=WAIT)


def tcp_pair(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection."""
    with socket.create_server((host, 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]
