"""A peer's end of a connection to the coordinator, for threads that wait.

Sending is safe from several threads; receiving is one thread's business.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from ds_dynatrain.elastic.address import Address, tune
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_MESSAGE,
    PROTOCOL,
    Challenge,
    Finished,
    Hello,
    Message,
    Refused,
    Welcome,
    body_length,
    decode,
    encode,
)
from ds_dynatrain.elastic.token import prove
from ds_dynatrain.errors import JobFinished, MessageError, PeerRefused

READ_BYTES = 1 << 16
SEND_SECONDS = 10.0
"""How long the coordinator may leave bytes unread before the connection counts as broken."""
RETRY_SECONDS = 0.2
"""Between two tries to reach a coordinator that is not there."""

logger = logging.getLogger("ds_dynatrain.elastic")


class Connection:
    """Messages over one socket. `welcome` is what the coordinator said when it let us in."""

    welcome: Welcome

    def __init__(self, address: Address, seconds: float) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=seconds)
        tune(self._socket)
        self._socket.settimeout(SEND_SECONDS)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._messages: deque[Message] = deque()

    @classmethod
    def open(cls, address: Address, token: str | None, job: str = "", seconds: float = 5.0) -> Connection:
        """Connect and be let in, within `seconds` for each answer.

        OSError if nobody is there or answers, PeerRefused with the coordinator's reason, MessageError if what answers
        is no coordinator of this version.
        """
        connection = cls(address, seconds)
        try:
            challenge = connection.expect(seconds)
            if not isinstance(challenge, Challenge):
                raise MessageError(f"{address}: {challenge.kind} came where a coordinator says challenge")
            if challenge.version != PROTOCOL:
                raise PeerRefused(f"{address}: the coordinator speaks protocol {challenge.version}, this is {PROTOCOL}")
            connection.send(Hello(version=PROTOCOL, proof=prove(token, challenge.nonce), job=job))
            welcome = connection.expect(seconds)
            if not isinstance(welcome, Welcome):
                raise MessageError(f"{address}: {welcome.kind} came where a coordinator says welcome")
        except BaseException:
            connection.close()
            raise
        connection.welcome = welcome
        return connection

    def fileno(self) -> int:
        """The descriptor of its socket; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message; OSError if the connection is broken, which it then stays."""
        wire = encode(message)
        with self._sending:
            self._socket.sendall(wire)

    def receive(self, seconds: float) -> Message:
        """The next message; TimeoutError after `seconds`, ConnectionError at the end, MessageError for nonsense."""
        end = time.monotonic() + seconds
        while not self._messages:
            left = end - time.monotonic()
            if left <= 0 or not readable([self.fileno()], left):
                raise TimeoutError(f"no message within {seconds:g} s")
            self.read()
        return self._messages.popleft()

    def expect(self, seconds: float) -> Message:
        """As `receive`; PeerRefused or JobFinished if that is what the message says."""
        message = self.receive(seconds)
        if isinstance(message, Refused):
            raise PeerRefused(message.reason)
        if isinstance(message, Finished):
            raise JobFinished("the job has finished")
        return message

    def read(self) -> None:
        """Take what has come, once; waits if nothing has. ConnectionError at the end, MessageError for nonsense."""
        part = self._socket.recv(READ_BYTES)
        if not part:
            raise ConnectionError("the coordinator has closed the connection")
        self._buffer += part
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + body_length(bytes(self._buffer[: HEADER.size]), LARGEST_MESSAGE)
            if len(self._buffer) < end:
                return
            self._messages.append(decode(bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]

    def messages(self) -> list[Message]:
        """All that was read and not received yet."""
        read = list(self._messages)
        self._messages.clear()
        return read

    def close(self) -> None:
        """End it; harmless twice."""
        self._socket.close()


def readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Those of the descriptors that can be read, or have ended, as soon as there is one; none after `seconds`."""
    poll = select.poll()  # select itself takes no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}


def connect(address: Address, token: str | None, job: str, seconds: float) -> Connection:
    """A connection as soon as there is a coordinator. TimeoutError after `seconds`, PeerRefused or MessageError at once
    if there is one that does not let us in."""
    end = time.monotonic() + seconds
    warned = False
    while True:
        try:
            return Connection.open(address, token, job)
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"no coordinator answers at {address} within {seconds:g} s ({error})") from error
            if not warned:
                logger.warning("waiting for the coordinator at %s (%s)", address, error)
            warned = True
        time.sleep(RETRY_SECONDS)
