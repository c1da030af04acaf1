"""Either end of a connection, spoken by hand: what a hostile program could say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.connection import NO_TAG, TAG_BYTES, Channel, Role, new_nonce
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_MESSAGE,
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    body_length,
    decode,
    encode,
)
from tests.elastic.served import ANY, SECONDS


class End:
    """One end of a connection. Nothing is checked; tags are those that this end can make."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.channel: Channel | None = None

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def send(self, message: Message) -> None:
        self.link.sendall(self.sealed(message))

    def sealed(self, message: Message) -> bytes:
        wire = encode(message)
        return wire + NO_TAG if self.channel is None else self.channel.seal(wire)

    def frame(self) -> bytes:
        """What came next, as it came."""
        header = self._exactly(HEADER.size)
        return header + self._exactly(body_length(header, LARGEST_MESSAGE) + TAG_BYTES)

    def hear(self) -> Message:
        return decode(self.frame()[HEADER.size : -TAG_BYTES])

    def rest(self) -> bytes:
        """All that the other end says until it closes the connection."""
        said = b""
        try:
            while part := self.link.recv(1 << 16):
                said += part
        except ConnectionError:
            pass
        return said

    def agree(self, token: str | None, nonces: tuple[str, str], here: Role) -> None:
        self.channel = Channel(token, nonces, here)

    def _exactly(self, length: int) -> bytes:
        said = b""
        while len(said) < length:
            part = self.link.recv(length - len(said))
            if not part:
                raise ConnectionError("it was closed")
            said += part
        return said


def raw(address: Address) -> End:
    """A peer that has said nothing."""
    return End(socket.create_connection((address.host, address.port), timeout=SECONDS))


def greeted(address: Address, token: str | None = None, job: str = "") -> End:
    """A peer that has said hello."""
    end = raw(address)
    challenge = end.hear()
    assert isinstance(challenge, Challenge), challenge
    nonce = new_nonce()
    end.agree(token, (challenge.nonce, nonce), "peer")
    end.send(Hello(nonce=nonce, job=job))
    return end


@contextmanager
def listening(serve: Callable[[End], None], address: Address = ANY) -> Iterator[Address]:
    """A program that listens where a coordinator could, and does `serve` with whoever connects."""
    with socket.create_server((address.host, address.port)) as listener:
        ends: list[End] = []

        def attend(end: End) -> None:
            try:
                serve(end)
            except OSError:
                pass

        def take() -> None:
            while True:
                try:
                    ends.append(End(listener.accept()[0]))
                except OSError:
                    return
                threading.Thread(target=attend, args=(ends[-1],), daemon=True).start()

        threading.Thread(target=take, daemon=True).start()
        try:
            yield Address(address.host, listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for end in ends:
                end.link.close()


def pretend(end: End, token: str | None, *says: Message) -> None:
    """Be a coordinator with this token, say these things, and hear one answer."""
    coordinate(end, token, *says)
    end.link.recv(1 << 16)


def coordinate(end: End, token: str | None, *says: Message) -> None:
    """Be a coordinator with this token, and say these things."""
    nonce = new_nonce()
    end.send(Challenge(version=PROTOCOL, nonce=nonce))
    hello = end.hear()
    assert isinstance(hello, Hello), hello
    end.agree(token, (nonce, hello.nonce), "coordinator")
    for message in says:
        end.send(message)
