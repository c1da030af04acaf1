"""The coordinator's end of one connection. Reading waits, with a limit of bytes and of time; writing never does."""

from __future__ import annotations

import asyncio
import socket

from ds_dynatrain.elastic.channel import NO_TAG, TAG_BYTES, Channel, new_nonce
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_GREETING,
    LARGEST_MESSAGE,
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    Refused,
    body_length,
    clipped,
    decode,
    encode,
)
from ds_dynatrain.elastic.world import LONGEST_TEXT
from ds_dynatrain.errors import MessageError, PeerRefused


def _where(token_file: str) -> str:
    """What somebody has to do who has not got the token."""
    return (
        f"of {token_file} on {socket.gethostname()}: copy this file to its machine, with mode 600, and name it in "
        "DYNATRAIN_TOKEN_FILE"
    )


MOST_UNREAD = 2 * LARGEST_MESSAGE
"""Bytes that wait for a peer which does not read; above, it is dropped."""


class Peer:
    """One connection; `name` says who it is once that is known."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._channel: Channel | None = None
        self.name = str(writer.get_extra_info("peername"))

    async def greet(self, token: str | None, token_file: str = "") -> Hello:
        """Let the peer prove that it knows the token; PeerRefused or MessageError if not. Every message to it does so,
        too, from then on.

        token_file: where it finds the token on this machine, if that is in a file.
        """
        nonce = new_nonce()
        self.send(Challenge(version=PROTOCOL, nonce=nonce))
        wire, tag = await self._next(LARGEST_GREETING)
        hello = decode(wire[HEADER.size :])
        if not isinstance(hello, Hello):
            raise MessageError(f"{hello.kind}: a connection begins with hello")
        channel = Channel(token, (nonce, hello.nonce), "coordinator")
        if not channel.is_next(wire, tag):
            raise PeerRefused(
                "the token is missing or another one (DYNATRAIN_TOKEN_FILE, DYNATRAIN_TOKEN); give this process that "
                + (_where(token_file) if token_file else "of the coordinator")
            )
        self._channel = channel
        return hello

    @property
    def is_proved(self) -> bool:
        """Whether the peer has proved that it knows the token."""
        return self._channel is not None

    async def receive(self, limit: int = LARGEST_GREETING) -> Message:
        """After `greet`: the next message, of at most `limit` bytes. MessageError, or EOFError and ConnectionError at
        the end."""
        wire, tag = await self._next(limit)
        if self._channel is None:
            raise RuntimeError(f"{self.name} has not been greeted")
        self._channel.check(wire, tag)
        return decode(wire[HEADER.size :])

    async def _next(self, limit: int) -> tuple[bytes, bytes]:
        """What came next, and its tag."""
        header = await self._reader.readexactly(HEADER.size)
        body = await self._reader.readexactly(body_length(header, limit))
        return header + body, await self._reader.readexactly(TAG_BYTES)

    def send(self, message: Message) -> None:
        """Send a message some time."""
        self.send_bytes(encode(message))

    def send_bytes(self, wire: bytes) -> None:
        """Send an encoded message some time; a peer that does not read is dropped."""
        if self._writer.is_closing():
            return
        self._writer.write(wire + NO_TAG if self._channel is None else self._channel.seal(wire))
        if self._writer.transport.get_write_buffer_size() > MOST_UNREAD:
            self._writer.transport.abort()

    def refuse(self, reason: str) -> None:
        """Tell the peer why, and end the connection."""
        self.send(Refused(reason=clipped(reason, LONGEST_TEXT)))
        self.close()

    def close(self) -> None:
        """End the connection after what was sent."""
        self._writer.close()

    def abort(self) -> None:
        """End the connection now."""
        self._writer.transport.abort()
