"""Client side of a connection to the coordinator, for threads that may block, and the tags that authenticate messages.

Both ends choose a random number. A key for each direction is derived from the token and both numbers. The first message
with a valid tag proves that its sender knows the token. A message taken from another connection, direction or position
is rejected. An attacker in the middle can read and delay messages, but cannot change, repeat, add or drop any. The
addresses of the two ends are not part of the key: they differ behind NAT and in containers, and would add no
protection.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import random
import secrets
import socket
import struct
import threading
import time
from collections import deque
from multiprocessing.connection import wait
from typing import Literal, TypeVar

from ds_dynatrain.elastic.address import Address, Endpoint, set_tcp_options
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_MESSAGE,
    PROTOCOL,
    Amended,
    Challenge,
    Changed,
    Dismiss,
    Dismissed,
    Finished,
    Hello,
    Message,
    Query,
    Refused,
    Status,
    Welcome,
    body_length,
    decode,
    encode,
)
from ds_dynatrain.elastic.token import derive
from ds_dynatrain.errors import CoordinatorUnproved, JobFinished, MessageError, PeerRefused

Role = Literal["coordinator", "peer"]

COUNT = struct.Struct(">Q")
TAG_BYTES = 32
"""Size of a tag: one HMAC-SHA256."""
NO_TAG = bytes(TAG_BYTES)
"""Placeholder tag of the first messages, before there is a key."""
READ_BYTES = 1 << 16
SEND_SECONDS = 10.0
"""How long the coordinator may leave bytes unread before the connection counts as broken."""
RETRY_SECONDS = 0.2
"""Mean pause between two attempts to reach a coordinator that does not answer."""
ANSWER_SECONDS = 5.0

logger = logging.getLogger("ds_dynatrain.elastic")
Answer = TypeVar("Answer", bound=Message)


def retry_pause() -> float:
    """Return the number of seconds to wait before the next attempt to reach a coordinator. The number is random, so
    that thousands of peers do not try at the same time."""
    return random.uniform(0.5, 1.5) * RETRY_SECONDS


def new_nonce() -> str:
    """Return a fresh 128-bit random number in hexadecimal."""
    return secrets.token_hex(16)


class Channel:
    """One end of an authenticated connection: computes and verifies the tags of messages. Without a token the tags
    match but prove nothing.

    nonces: the random numbers of the coordinator and of the peer.
    here: the role of this end, "coordinator" or "peer".
    """

    def __init__(self, token: str | None, nonces: tuple[str, str], here: Role) -> None:
        there: Role = "peer" if here == "coordinator" else "coordinator"
        self._keys = {who: derive(token, " ".join([who, *nonces])) for who in (here, there)}
        self._counts = {who: itertools.count() for who in (here, there)}
        self._here, self._there = here, there

    def seal(self, wire: bytes) -> bytes:
        """Return an encoded message with its tag appended. Messages must be sent in the order of these calls."""
        return wire + self._next_tag(self._here, wire)

    def is_next(self, wire: bytes, tag: bytes) -> bool:
        """Return whether `tag` authenticates `wire` as the next message from the other end."""
        return hmac.compare_digest(self._next_tag(self._there, wire), tag)

    def check(self, wire: bytes, tag: bytes) -> None:
        """Raise MessageError unless `tag` authenticates `wire` as the next message from the other end.

        The connection must be closed after this error.
        """
        if not self.is_next(wire, tag):
            raise MessageError(
                "a message was changed on its way, or its sender has not proved the token: its tag is wrong"
            )

    def _next_tag(self, sender: Role, wire: bytes) -> bytes:
        return hmac.digest(self._keys[sender], COUNT.pack(next(self._counts[sender])) + wire, "sha256")


class Connection:
    """Connection to the coordinator that sends and receives messages over one socket.

    welcome: the coordinator's answer when it admitted this process.
    address: the coordinator's address.
    """

    welcome: Welcome
    _channel: Channel

    def __init__(self, address: Address, seconds: float) -> None:
        self.address = address
        self._socket = socket.create_connection((address.host, address.port), timeout=seconds)
        set_tcp_options(self._socket)
        self._socket.settimeout(SEND_SECONDS)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self._told: Generation | None = None
        """The last generation received over this connection."""

    @classmethod
    def open(cls, endpoint: Endpoint, token: str | None, job: str = "", seconds: float = 5.0) -> Connection:
        """Connect, and return the connection once the coordinator has admitted this process.

        seconds: time limit for each answer of the coordinator.

        Raises OSError if nothing answers.
        Raises PeerRefused, with the reason, if the coordinator refuses this process.
        Raises CoordinatorUnproved if the answer does not prove knowledge of the token, or has another protocol version.
        Raises MessageError if the answer is not a valid answer of a coordinator.
        """
        connection = cls(endpoint.locate(is_guarded=token is not None), seconds)
        try:
            connection.welcome = connection._greet(str(endpoint), token, job, seconds)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, address: str, token: str | None, job: str, seconds: float) -> Welcome:
        """Prove to the coordinator that this process knows the token, and verify that the coordinator knows it."""
        challenge = decode(self._next(seconds)[0][HEADER.size :])
        if isinstance(challenge, Refused):
            raise CoordinatorUnproved(f"{address}: {challenge.reason}")
        if not isinstance(challenge, Challenge):
            raise MessageError(f"{address}: got {challenge.kind} in place of a coordinator's challenge")
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
            raise CoordinatorUnproved(
                f"{address}: {answer.reason}; what answers there has not proved that it knows this process's token "
                "either"
                if isinstance(answer, Refused)
                else f"{address}: what answers there does not know this process's token, so it is not this job's "
                "coordinator; name the job's token file in DYNATRAIN_TOKEN_FILE, or give this job's own address"
            )
        _raise_refusal(answer)
        if not isinstance(answer, Welcome):
            raise MessageError(f"{address}: got {answer.kind} in place of a coordinator's welcome")
        return answer

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once the socket is closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the connection is broken; the connection cannot be used after that."""
        wire = encode(message)
        with self._sending:
            self._socket.sendall(self._channel.seal(wire))

    def receive(self, seconds: float) -> Message:
        """Return the next message. A new generation is always returned in full, as `Changed`.

        Raises PeerRefused if the message is a refusal, and JobFinished if it says that the job has finished. Raises
        TimeoutError after `seconds`, and ConnectionError at the end of the connection. Raises MessageError if the
        message is malformed, was not sent by the coordinator, or is a generation that cannot be verified.
        """
        message = self._proved(*self._next(seconds))
        _raise_refusal(message)
        return message

    def read(self) -> None:
        """Read once from the socket; block if no data has arrived yet.

        Raises ConnectionError at the end of the connection, MessageError if a message is longer than the limit.
        """
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
        """Return all messages that have been read from the socket but not yet returned. Raises MessageError under the
        same conditions as `receive`."""
        messages = [self._proved(*frame) for frame in self._frames]
        self._frames.clear()
        return messages

    def close(self) -> None:
        """Close the socket. Calling this twice is harmless."""
        self._socket.close()

    def _next(self, seconds: float) -> tuple[bytes, bytes]:
        """Return the bytes of the next message and its tag."""
        end = time.monotonic() + seconds
        while not self._frames:
            left = end - time.monotonic()
            if left <= 0 or not wait([self._socket], left):
                raise TimeoutError(f"no message within {seconds:g} s")
            self.read()
        return self._frames.popleft()

    def _proved(self, wire: bytes, tag: bytes) -> Message:
        """Check a message's tag and return the message. If the message gives only the difference from the previous
        generation (`Amended`), the whole generation is returned (`Changed`)."""
        self._channel.check(wire, tag)
        message = decode(wire[HEADER.size :])
        if isinstance(message, Amended):
            message = Changed(world=message.change.apply(self._told))
        if isinstance(message, Changed):
            self._told = message.world
        return message


def _raise_refusal(message: Message) -> None:
    if isinstance(message, Refused):
        raise PeerRefused(message.reason)
    if isinstance(message, Finished):
        raise JobFinished("the job has finished")


def connect(endpoint: Endpoint, token: str | None, job: str, seconds: float) -> Connection:
    """Keep trying to connect, and return the connection once a coordinator answers.

    Raises TimeoutError after `seconds`. Raises PeerRefused or MessageError at once if a coordinator answers and does
    not admit this process.
    """
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
        time.sleep(retry_pause())


def ask_status(endpoint: Endpoint, token: str | None = None, seconds: float = ANSWER_SECONDS) -> Status:
    """Return the job's status.

    Raises OSError if no coordinator answers within `seconds`, and PeerRefused or MessageError if the answer is not a
    status.
    """
    return _ask(endpoint, token, Query(), Status, seconds)


def ask_to_leave(
    endpoint: Endpoint,
    node: str,
    token: str | None = None,
    seconds: float = ANSWER_SECONDS,
    is_spare: bool = False,
) -> tuple[str, ...]:
    """Ask the workers of a node to hand over their state and leave; return the workers that were asked.

    Returns before the workers have left. Raises PeerRefused if the node has no workers, and the same errors as
    `ask_status`.

    is_spare: whether the job itself makes the request, because the node has no work (see `Dismiss.is_spare`).
    """
    return _ask(endpoint, token, Dismiss(node=node, is_spare=is_spare), Dismissed, seconds).members


def _ask(endpoint: Endpoint, token: str | None, question: Message, kind: type[Answer], seconds: float) -> Answer:
    connection = Connection.open(endpoint, token, seconds=seconds)
    try:
        connection.send(question)
        answer = connection.receive(seconds)
    finally:
        connection.close()
    if not isinstance(answer, kind):
        raise MessageError(f"{endpoint}: got {answer.kind} in place of an answer to {question.kind}")
    return answer
