"""A transport to one member over a TCP connection of its own: for who is in no group, and may go at any moment.

`close` ends whatever waits, from any thread. What is sent goes out from a thread, so nobody waits for who is slow.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from contextlib import suppress

import torch

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.transfer.transport import Handle, bytes_of

MOST_BYTES = 1 << 24
"""Of one call to the system, so that others have their turn."""
LONGEST_POLL_SECONDS = 60.0


class Link:
    """See `Transport`: its peer is one member, and messages of all tags arrive in the order in which they were sent.

    connection: a connected socket, which belongs to the link from here on. member: who is at its other end.
    """

    def __init__(self, connection: socket.socket, member: int) -> None:
        self.member = member
        connection.settimeout(None)
        self._socket = connection
        self._outgoing: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._reading, self._is_over = threading.Lock(), threading.Event()
        self._writer = threading.Thread(target=self._write, name="dynatrain-link", daemon=True)
        self._writer.start()

    @property
    def is_over(self) -> bool:
        """Whether nothing travels any more."""
        return self._is_over.is_set()

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Start to send the tensor's bytes; TransferError where the link is over."""
        sending = _Sending(self, bytes_of(tensor).to("cpu"))
        self._outgoing.put(sending)
        if self.is_over:
            sending.fail()
        return sending

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Receive into a tensor on the CPU, during `wait`."""
        return _Receiving(self, bytes_of(tensor))

    def close(self) -> None:
        """Whatever waits raises TransferError, on both sides."""
        self._is_over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)
        if threading.current_thread() is not self._writer:
            self._writer.join()
        with self._reading:
            self._socket.close()

    # ---- both directions ---------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while (sending := self._outgoing.get()) is not None:
            try:
                self._socket.sendall(sending.data)
            except OSError:
                self._is_over.set()
                sending.fail()
            else:
                sending.finish()
        while not self._outgoing.empty():
            if (left := self._outgoing.get()) is not None:
                left.fail()

    def fill(self, data: memoryview, deadline: float) -> None:
        """Receive so many bytes; TimeoutError at the deadline, OSError where the connection has ended."""
        at = 0
        with self._reading:
            if self._socket.fileno() < 0:
                raise ConnectionError("this side has ended it")
            waits = select.poll()
            waits.register(self._socket, select.POLLIN)
            while at < len(data):
                left = deadline - time.monotonic()
                if not waits.poll(1e3 * min(max(left, 0.0), LONGEST_POLL_SECONDS)):
                    if left <= 0:
                        raise TimeoutError
                    continue
                count = self._socket.recv_into(data[at : at + MOST_BYTES])
                if not count:
                    self._is_over.set()
                    raise ConnectionError("the other side has ended it")
                at += count


class _Sending:
    """What is on its way out."""

    def __init__(self, link: Link, tensor: torch.Tensor) -> None:
        self.data = memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that it is a buffer
        self._link, self._since, self._has_failed, self._over = link, time.monotonic(), False, threading.Event()

    def finish(self) -> None:
        self._over.set()

    def fail(self) -> None:
        self._has_failed = True
        self._over.set()

    def wait(self, deadline: float) -> None:
        what, member = f"send of {len(self.data)} bytes", self._link.member
        if not self._over.wait(max(deadline - time.monotonic(), 0.0)):
            raise MemberMissing(what, [member], time.monotonic() - self._since)
        if self._has_failed:
            raise TransferError(f"{what} with member {member} failed: the connection has ended")


class _Receiving:
    """What is to come."""

    def __init__(self, link: Link, tensor: torch.Tensor) -> None:
        self._link, self._since = link, time.monotonic()
        self._data = memoryview(tensor.numpy())  # type: ignore[arg-type]  # as above

    def wait(self, deadline: float) -> None:
        what, member = f"receive of {len(self._data)} bytes", self._link.member
        try:
            self._link.fill(self._data, deadline)
        except TimeoutError as error:
            raise MemberMissing(what, [member], time.monotonic() - self._since) from error
        except OSError as error:
            raise TransferError(f"{what} with member {member} failed: {error}") from error
