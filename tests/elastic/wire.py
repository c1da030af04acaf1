"""The line between members and their coordinator, which a test can hold up in one direction."""

from __future__ import annotations

import re
import socket
import threading
from dataclasses import dataclass, field
from types import TracebackType

from ds_dynatrain.elastic.address import Address

CHUNK = 1 << 16


@dataclass
class _Line:
    """What one peer has said since the last `hold`."""

    near: socket.socket
    far: socket.socket
    said: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)


class Wire:
    """Passes everything on between its own address and that of a coordinator; peers connect here."""

    def __init__(self, coordinator: Address) -> None:
        self._coordinator = coordinator
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._lines: list[_Line] = []
        self._is_held = False
        self._lock = threading.Lock()

    def __enter__(self) -> Wire:
        threading.Thread(target=self._take, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for line in self._lines:
            _end(line)

    def hold(self) -> None:
        """What peers say does not arrive from here on; what they are told does."""
        with self._lock:
            self._is_held = True
            for line in self._lines:
                line.said.clear()

    def release(self) -> None:
        """It arrives now, and what follows."""
        with self._lock:
            self._is_held = False
            for line in self._lines:
                line.far.sendall(line.waiting)
                line.waiting.clear()

    def count(self, pattern: bytes) -> int:
        """How many of the peers have said something like this since the last `hold`."""
        with self._lock:
            return sum(bool(re.search(pattern, line.said)) for line in self._lines)

    def _take(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                line = _Line(near, socket.create_connection((self._coordinator.host, self._coordinator.port)))
            except OSError:
                return
            self._lines.append(line)
            threading.Thread(target=self._up, args=(line,), daemon=True).start()
            threading.Thread(target=_down, args=(line,), daemon=True).start()

    def _up(self, line: _Line) -> None:
        try:
            while data := line.near.recv(CHUNK):
                with self._lock:
                    line.said += data
                    if self._is_held:
                        line.waiting += data
                    else:
                        line.far.sendall(data)
        except OSError:
            pass
        _end(line)


def _down(line: _Line) -> None:
    try:
        while data := line.far.recv(CHUNK):
            line.near.sendall(data)
    except OSError:
        pass
    _end(line)


def _end(line: _Line) -> None:
    for end in (line.near, line.far):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        end.close()
