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
from ds_dynatrain.elastic.announcement import Endpoint
from ds_dynatrain.elastic.channel import NO_TAG, TAG_BYTES, Channel, new_nonce
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
from ds_dynatrain.errors import CoordinatorUnproved, JobFinished, MessageError, PeerRefused

READ_BYTES = 1 << 16
SEND_SECONDS = 10.0
"""How long the coordinator may leave bytes unread before the connection counts as broken."""
RETRY_SECONDS = 0.2
"""Between two tries to reach a coordinator that is not there."""

logger = logging.getLogger("ds_dynatrain.elastic")


class Connection:
    """Messages over one socket. `welcome` is what the coordinator said when it let us in, `address` where it was."""

    welcome: Welcome

    def __init__(self, address: Address, seconds: float) -> None:
        self.address = address
        self._socket = socket.create_connection((address.host, address.port), timeout=seconds)
        tune(self._socket)
        self._socket.settimeout(SEND_SECONDS)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._channel: Channel | None = None
        self._frames: deque[tuple[bytes, bytes]] = deque()

    @classmethod
    def open(cls, endpoint: Endpoint, token: str | None, job: str = "", seconds: float = 5.0) -> Connection:
        """Connect and be let in, within `seconds` for each answer.

        OSError if nobody is there or answers, PeerRefused with the coordinator's reason, CoordinatorUnproved or
        MessageError if what answers is no coordinator of this version that knows the token.
        """
        connection = cls(endpoint.locate(is_guarded=token is not None), seconds)
        try:
            connection.welcome = connection._greet(str(endpoint), token, job, seconds)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, address: str, token: str | None, job: str, seconds: float) -> Welcome:
        """Prove that the token is known here, and let the coordinator prove it."""
        challenge = decode(self._next(seconds)[0][HEADER.size :])
        if isinstance(challenge, Refused):
            raise CoordinatorUnproved(f"{address}: {challenge.reason}")
        if not isinstance(challenge, Challenge):
            raise MessageError(f"{address}: {challenge.kind} came where a coordinator says challenge")
        if challenge.version != PROTOCOL:
            raise CoordinatorUnproved(
                f"{address}: the coordinator speaks protocol {challenge.version}, this is {PROTOCOL}; install the "
                "same version of ds-dynatrain on all nodes"
            )
        nonce = new_nonce()
        self._channel = Channel(token, (challenge.nonce, nonce), "peer")
        self.send(Hello(nonce=nonce, job=job))
        wire, tag = self._next(seconds)
        answer = decode(wire[HEADER.size :])
        if not self._channel.is_next(wire, tag):
            raise CoordinatorUnproved(f"{address}: {_unproved(answer)}")
        _raise_refusal(answer)
        if not isinstance(answer, Welcome):
            raise MessageError(f"{address}: {answer.kind} came where a coordinator says welcome")
        return answer

    def fileno(self) -> int:
        """The descriptor of its socket; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message; OSError if the connection is broken, which it then stays."""
        wire = encode(message)
        with self._sending:
            self._socket.sendall(wire + NO_TAG if self._channel is None else self._channel.seal(wire))

    def receive(self, seconds: float) -> Message:
        """The next message; TimeoutError after `seconds`, ConnectionError at the end, MessageError for nonsense and for
        what the coordinator has not said."""
        return self._proved(*self._next(seconds))

    def expect(self, seconds: float) -> Message:
        """As `receive`; PeerRefused or JobFinished if that is what the message says."""
        message = self.receive(seconds)
        _raise_refusal(message)
        return message

    def read(self) -> None:
        """Take what has come, once; waits if nothing has. ConnectionError at the end, MessageError for nonsense."""
        part = self._socket.recv(READ_BYTES)
        if not part:
            raise ConnectionError("the coordinator has closed the connection")
        self._buffer += part
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + body_length(bytes(self._buffer[: HEADER.size]), LARGEST_MESSAGE)
            if len(self._buffer) < end + TAG_BYTES:
                return
            self._frames.append((bytes(self._buffer[:end]), bytes(self._buffer[end : end + TAG_BYTES])))
            del self._buffer[: end + TAG_BYTES]

    def messages(self) -> list[Message]:
        """All that was read and not received yet; MessageError as of `receive`."""
        messages = [self._proved(*frame) for frame in self._frames]
        self._frames.clear()
        return messages

    def close(self) -> None:
        """End it; harmless twice."""
        self._socket.close()

    def _next(self, seconds: float) -> tuple[bytes, bytes]:
        """What came next, and its tag."""
        end = time.monotonic() + seconds
        while not self._frames:
            left = end - time.monotonic()
            if left <= 0 or not readable([self.fileno()], left):
                raise TimeoutError(f"no message within {seconds:g} s")
            self.read()
        return self._frames.popleft()

    def _proved(self, wire: bytes, tag: bytes) -> Message:
        if self._channel is None:
            raise RuntimeError("nobody has been greeted on this connection")
        self._channel.check(wire, tag)
        return decode(wire[HEADER.size :])


def _raise_refusal(message: Message) -> None:
    if isinstance(message, Refused):
        raise PeerRefused(message.reason)
    if isinstance(message, Finished):
        raise JobFinished("the job has finished")


def _unproved(answer: Message) -> str:
    """What is wrong with an answer whose tag is not right."""
    if isinstance(answer, Refused):
        return f"{answer.reason}; what answers there has not proved that it knows this process's token either"
    return (
        "what answers there does not know this process's token, so it is not this job's coordinator; name the job's "
        "token file in DYNATRAIN_TOKEN_FILE, or give this job's own address"
    )


def readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Those of the descriptors that can be read, or have ended, as soon as there is one; none after `seconds`."""
    poll = select.poll()  # select itself takes no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}


def connect(endpoint: Endpoint, token: str | None, job: str, seconds: float) -> Connection:
    """A connection as soon as there is a coordinator. TimeoutError after `seconds`, PeerRefused or MessageError at once
    if there is one that does not let us in."""
    end = time.monotonic() + seconds
    warned = False
    while True:
        try:
            return Connection.open(endpoint, token, job)
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"no coordinator answers at {endpoint} within {seconds:g} s ({error})") from error
            if not warned:
                logger.warning(
                    "waiting for the coordinator at %s (%s); start `ds-dynatrain coordinator` if none runs",
                    endpoint,
                    error,
                )
            warned = True
        time.sleep(RETRY_SECONDS)
