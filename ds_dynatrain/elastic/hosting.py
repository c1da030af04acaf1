"""A coordinator together with its store, either in a thread of an agent or as the only work of a command.

The coordinator accepts connections before torch is imported, because that import takes seconds on a busy machine and
members should not wait long for a restarted coordinator. The store's socket already listens during the import; its
clients are served afterwards.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ds_dynatrain.descriptors import raise_descriptors
from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.coordinator import SHOW_SECONDS, Coordinator, logger
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import Shown
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.token import Reading
from ds_dynatrain.elastic.view import Feed
from ds_dynatrain.extension import named

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


POLL_SECONDS = 0.05
MONITOR = "ds_dynatrain.monitoring.server:Monitor"
"""Import path of the monitoring server's class. The class is imported only for monitored jobs, because it needs
prometheus_client."""


class CoordinatorHost:
    """Coordinator together with its listening socket and its store, in one process.

    store_port: port of the store; 0 for any free one.
    reading: the port at which the job can be monitored; None for no such port.
    token_file: the file with the token, named in the answer to refused peers; "" if the token is in no file.

    Raises OSError if the address is in use or belongs to another machine.
    Raises ConfigError if a library for monitoring is missing.
    Raises ElasticError if the port for monitoring cannot be opened.
    """

    def __init__(
        self,
        address: Address,
        settings: Settings,
        token: str,
        job: str = "",
        store_port: int = 0,
        reading: Reading | None = None,
        token_file: str = "",
    ) -> None:
        self._listener = listen(address, is_guarded=True)
        self.address = Address(address.host, self._listener.getsockname()[1])
        try:
            self._store_listener = listen(Address(address.host, store_port), is_guarded=True)
            self.monitor: Any = None if reading is None else named(MONITOR)(reading)
        except BaseException:
            self._listener.close()
            raise
        self._store: TCPStore | None = None
        port = self._store_listener.getsockname()[1]
        membership = MembershipStateMachine(settings, secrets.token_hex(4), time.monotonic())
        self.coordinator = Coordinator(membership, port, token, job, token_file)
        self._thread = threading.Thread(target=self.run, name="dynatrain-coordinator", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        self._is_ended = asyncio.Event()

    @property
    def reachable(self) -> Address:
        """Address at which others reach the coordinator: a host in their network, or a loopback address if only this
        machine may connect."""
        place = ipaddress.ip_address(self._listener.getsockname()[0])
        host = socket.gethostname() if place.is_unspecified else str(place) if place.is_loopback else self.address.host
        return Address(host, self.address.port)

    def run(self) -> None:
        """Serve until the job has finished or `end` is called. May be called only once."""
        asyncio.run(self._serve())

    def end(self) -> None:
        """Ask `run` to return soon. May be called from any thread, also before `run`."""
        if self._loop is None:
            self._is_ended.set()
        else:
            with suppress(RuntimeError):  # `run` has returned
                self._loop.call_soon_threadsafe(self._is_ended.set)

    def start(self) -> None:
        """Start a thread that serves. Imports torch first, because importing torch in two threads at once breaks it."""
        from ds_dynatrain.elastic import store  # noqa: F401

        self._thread.start()
        self._is_up.wait()

    def stop_when_finished(self) -> None:
        """Wait until the job has finished or all peers have disconnected, and then stop serving. Called after `start`
        by an agent whose own workers have ended."""
        while self._thread.is_alive() and self.coordinator.connected:
            self._thread.join(POLL_SECONDS)
        self.stop()

    def stop(self) -> None:
        """End the serving thread and all its connections. Called after `start`."""
        self.end()
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, settings = asyncio.get_running_loop(), self.coordinator.membership.settings
        files = raise_descriptors()
        serving = asyncio.create_task(self.coordinator.serve(self._listener, self._is_ended))
        self._is_up.set()
        self._store = await asyncio.to_thread(self._serve_store)
        nodes = f"{settings.min_nodes} to {settings.max_nodes} nodes"
        logger.info("coordinator at %s, for %s; it may open %d files", self.address, nodes, files)
        if self.monitor is not None:
            self.monitor.start(Feed(self.coordinator.view, self._loop.call_soon_threadsafe), self._shown)
        try:
            await serving
        finally:
            if self.monitor is not None:
                await asyncio.to_thread(self.monitor.stop)

    def _shown(self, member: str) -> Shown:
        """Ask a worker what it is doing; see `Coordinator.shown`. Called on threads other than the serving one."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self.coordinator.shown(member), self._loop).result(2 * SHOW_SECONDS)

    def _serve_store(self) -> TCPStore:
        from ds_dynatrain.elastic.store import serve_store  # imports torch

        return serve_store(self.address.host, self._store_listener)
