"""A coordinator on a real socket, in a thread, and peers that speak to it by hand."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.connection import Connection, ask_status
from ds_dynatrain.elastic.coordinator import Coordinator
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import Announce, Changed, Report, Shown, Status
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.token import Reading
from ds_dynatrain.elastic.view import Feed
from ds_dynatrain.monitoring.server import Monitor

SECONDS = 5.0
ANY = Address("127.0.0.1", 0)
QUICK = {"debounce_seconds": 0.02, "beat_seconds": 0.05, "silent_seconds": 30.0, "recovery_seconds": 0.05}


@dataclass
class Served:
    """A coordinator without a store."""

    settings: Settings
    token: str | None = None
    job: str = ""
    listener: socket.socket = field(default_factory=lambda: listen(ANY, is_guarded=False))
    monitor: Monitor | None = None
    term: str = "abc"

    @property
    def address(self) -> Address:
        return self._address

    def start(self) -> None:
        self._address = Address("127.0.0.1", self.listener.getsockname()[1])
        self._is_up = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        self._is_up.wait()

    def _shown(self, member: str) -> Shown:
        return asyncio.run_coroutine_threadsafe(self.coordinator.shown(member), self._loop).result(SECONDS)

    def stop(self) -> None:
        if self.thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        membership = MembershipStateMachine(self.settings, self.term, time.monotonic())
        self.coordinator = coordinator = Coordinator(membership, 1, self.token, self.job)
        if self.monitor is not None:
            self.monitor.start(Feed(coordinator.view, self._loop.call_soon_threadsafe), self._shown)
        self._is_up.set()
        await coordinator.serve(self.listener, self._stop)
        if self.monitor is not None:
            self.monitor.stop()

    @property
    def url(self) -> str:
        """Where it can be watched."""
        assert self.monitor is not None
        return f"http://127.0.0.1:{self.monitor.port}"

    def connect(self, token: str | None = None, job: str = "") -> Connection:
        return Connection.open(self.address, token or self.token, job)

    def status(self) -> Status:
        return ask_status(self.address, self.token, SECONDS)

    def join(self, node: str, local_rank: int = 0, size: int = 1, pid: int = 1) -> Connection:
        """A worker that is ready at once."""
        connection = self.connect()
        connection.send(Announce(node=node, local_rank=local_rank, local_size=size, pid=pid))
        connection.send(Report(ready=True))
        return connection


def told(connection: Connection) -> Generation:
    """The next world that a worker is told of."""
    message = connection.receive(SECONDS)
    assert isinstance(message, Changed), message
    return message.world


def enter(connection: Connection, generation: int) -> None:
    """Say that the worker trains in this generation."""
    connection.send(Report(ready=True, entered=generation))


@contextmanager
def serving(
    least: int = 1,
    most: int = 4,
    token: str | None = None,
    job: str = "",
    address: Address = ANY,
    reading: Reading | None = None,
    term: str = "abc",
    **values: float,
) -> Iterator[Served]:
    """A coordinator with short times. reading: where it can be watched; nowhere by default."""
    monitor = None if reading is None else Monitor(reading)
    settings = Settings(least, most, **{**QUICK, **values})
    served = Served(settings, token, job, listen(address, is_guarded=False), monitor, term)
    served.start()
    try:
        yield served
    finally:
        served.stop()
