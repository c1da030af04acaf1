"""The coordinator's end of one connection. Reading waits, with a limit of bytes and of time; writing never does."""

from __future__ import annotations

import asyncio
import secrets

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
from ds_dynatrain.elastic.token import is_proved
from ds_dynatrain.elastic.world import LONGEST_TEXT
from ds_dynatrain.errors import MessageError, PeerRefused

MOST_UNREAD = 2 * LARGEST_MESSAGE
"""Bytes that wait for a peer which does not read; above, it is dropped."""


class Peer:
    """One connection; `name` says who it is once that is known."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.name = str(writer.get_extra_info("peername"))

    async def greet(self, token: str | None) -> Hello:
        """Let the peer prove that it knows the token; PeerRefused or MessageError if not."""
        nonce = secrets.token_hex(16)
        self.send(Challenge(version=PROTOCOL, nonce=nonce))
        hello = await self.receive(LARGEST_GREETING)
        if not isinstance(hello, Hello):
            raise MessageError(f"{hello.kind}: a connection begins with hello")
        if hello.version != PROTOCOL:
            raise PeerRefused(f"protocol {hello.version}, here it is {PROTOCOL}: all nodes need the same ds_dynatrain")
        if not is_proved(token, nonce, hello.proof):
            raise PeerRefused("the token is missing or another one (DYNATRAIN_TOKEN_FILE, DYNATRAIN_TOKEN)")
        return hello

    async def receive(self, limit: int = LARGEST_GREETING) -> Message:
        """The next message, of at most `limit` bytes. MessageError, or EOFError and ConnectionError at the end."""
        header = await self._reader.readexactly(HEADER.size)
        return decode(await self._reader.readexactly(body_length(header, limit)))

    def send(self, message: Message) -> None:
        """Send a message some time."""
        self.send_bytes(encode(message))

    def send_bytes(self, wire: bytes) -> None:
        """Send an encoded message some time; a peer that does not read is dropped."""
        if self._writer.is_closing():
            return
        self._writer.write(wire)
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
