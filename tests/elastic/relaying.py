"""A link between peers and a coordinator that a test can break or cut, as boxes of a network do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ds_dynatrain.elastic.address import Address

READ_BYTES = 1 << 16


class Relay:
    """Passes bytes on between peers that connect to `address` and a coordinator."""

    def __init__(self, coordinator: Address) -> None:
        self._coordinator = coordinator
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.drops = 0
        self._passes = threading.Event()
        self._passes.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._take, daemon=True).start()

    def drop(self) -> None:
        """End the peers' ends of all connections; the coordinator's ends stay open, and say nothing any more."""
        self.drops += 1
        for peer, _ in self._pairs:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Let nothing through until `mend`."""
        self._passes.clear()

    def mend(self) -> None:
        """Pass on what was held back, and what follows."""
        self._passes.set()

    def close(self) -> None:
        """End everything."""
        self.mend()
        for end in (self._listener, *(each for pair in self._pairs for each in pair)):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _take(self) -> None:
        while True:
            try:
                peer = self._listener.accept()[0]
            except OSError:
                return
            coordinator = socket.create_connection((self._coordinator.host, self._coordinator.port))
            self._pairs.append((peer, coordinator))
            threading.Thread(target=self._pump, args=(peer, coordinator, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(coordinator, peer, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, ends_target: bool) -> None:
        with suppress(OSError):
            while data := source.recv(READ_BYTES):
                self._passes.wait()
                target.sendall(data)
        if ends_target:
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)


@contextmanager
def relayed(coordinator: Address) -> Iterator[Relay]:
    """A link to a coordinator, until the end of the block."""
    relay = Relay(coordinator)
    try:
        yield relay
    finally:
        relay.close()
