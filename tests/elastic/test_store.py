"""Stores for process groups: a connection that nobody answers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as td

from ds_dynatrain.elastic import store as store_module
from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.store import answered, connected, open_store, serve_store

WORLD = Generation(term="1", generation=1, change="planned", members=("a/0",))


def test_whoever_accepts_and_never_answers_is_not_waited_for() -> None:
    """As a process does that hangs: the kernel has accepted for it."""
    with listen(Address("127.0.0.1", 0), is_guarded=False) as silent:
        begin = time.monotonic()
        with pytest.raises(td.DistNetworkError, match="not answered for 1 s"):
            open_store("127.0.0.1", silent.getsockname()[1], WORLD.prefix, 0.5)
        assert time.monotonic() - begin < 10


def test_nobody_there_is_said_as_torch_says_it() -> None:
    with listen(Address("127.0.0.1", 0), is_guarded=False) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(td.DistError):
        open_store("127.0.0.1", port, WORLD.prefix, 0.5)


def serve(pipe: Connection) -> None:
    """A store of another process, which can hang."""
    store = serve_store("127.0.0.1")
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture(scope="module")
def hanging() -> Iterator[tuple[int, int]]:
    """The port of a store, and its process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    yield here.recv(), int(process.pid or 0)
    process.kill()
    process.join()


def stand_still(process: int) -> None:
    """Stop a process; on a busy machine the signal takes a while, in which it would answer."""
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + 10
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end, "the process was told to stop and runs on"
        time.sleep(0.01)


def test_a_store_that_hangs_is_not_waited_for(hanging: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own time-out is for keys that are not there; every call of ours has an end, also of a clone."""
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 1.0)
    port, process = hanging
    first = open_store("127.0.0.1", port, WORLD.prefix, 30.0)
    stores = [first, connected(first.clone, 30.0)]  # type: ignore[attr-defined]  # torch leaves it out of its stubs
    for store in stores:
        store.set("there", "yes")
        assert store.check(["there"])
    stand_still(process)
    begin = time.monotonic()
    with pytest.raises(td.DistError, match="has not answered for"):
        answered(lambda: stores[0].check(["there"]), 0.1)
    for store in stores:
        with pytest.raises(td.DistError):
            store.check(["there"])
    assert time.monotonic() - begin < 10
    os.kill(process, signal.SIGCONT)


def test_waiting_for_a_key_may_take_longer(hanging: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 1.0)
    store, begin = open_store("127.0.0.1", hanging[0], WORLD.prefix, 2.5), time.monotonic()
    with pytest.raises(td.DistError, match="timeout after 2500ms"):
        store.get("never")
    assert time.monotonic() - begin > 2.4
