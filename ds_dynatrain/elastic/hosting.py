"""A coordinator with its store, in the process that asks for it: a thread of an agent, or a command's only work."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable

from ds_dynatrain.elastic.address import Address, listen
from ds_dynatrain.elastic.coordinator import Coordinator, logger
from ds_dynatrain.elastic.membership import Membership
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.store import serve_store

POLL_SECONDS = 0.05


class Host:
    """Holds the listening socket and the store of a coordinator. OSError if the address is taken or not ours,
    ElasticError if it is open to other machines and there is no token."""

    def __init__(
        self, address: Address, settings: Settings, token: str | None = None, job: str = "", store_port: int = 0
    ) -> None:
        self._listener = listen(address, is_guarded=token is not None)
        self.address = Address(address.host, self._listener.getsockname()[1])
        try:
            self._store = serve_store(address.host, store_port, is_guarded=token is not None)
        except BaseException:
            self._listener.close()
            raise
        self._settings = settings
        self._token = token
        self._job = job
        self._thread = threading.Thread(target=self.run, name="dynatrain-coordinator", daemon=True)
        self._stop: Callable[[], object] = lambda: None
        self._is_up = threading.Event()
        self._coordinator: Coordinator | None = None

    def run(self) -> None:
        """Serve until the job has finished; once."""
        asyncio.run(self._serve())

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()
        self._is_up.wait()

    def outlive(self) -> None:
        """After `start`: wait until the job has finished or nobody is connected any more, then `stop`."""
        while self._thread.is_alive() and self._coordinator is not None and self._coordinator.connected:
            self._thread.join(POLL_SECONDS)
        self.stop()

    def stop(self) -> None:
        """After `start`: end the thread, and with it all connections."""
        if self._thread.is_alive():
            self._stop()
        self._thread.join()

    async def _serve(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        membership = Membership(self._settings, secrets.token_hex(4), time.monotonic())
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        self._coordinator = Coordinator(membership, self._store.port, self._token, self._job)
        self._is_up.set()
        settings = self._settings
        logger.info("coordinator at %s, for %d to %d nodes", self.address, settings.min_nodes, settings.max_nodes)
        await self._coordinator.serve(self._listener, stop)
