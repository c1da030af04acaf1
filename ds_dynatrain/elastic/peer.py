"""The coordinator's end of one connection. Reading waits, with a limit of bytes and of time; writing never does."""

from __future__ import annotations

import asyncio

from ds_dynatrain.elastic.channel import TAG_BYTES, Channel
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_GREETING,
    LARGEST_MESSAGE,
    Message,
    Refused,
    body_length,
    clipped,
    decode,
    encode,
)
from ds_dynatrain.elastic.world import LONGEST_TEXT

MOST_UNREAD = 2 * LARGEST_MESSAGE
"""Bytes that wait for a peer which does not read; above, it is dropped."""


class Peer:
    """One connection of a peer that has proved that it knows the token; `name` says who it is once that is known."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, channel: Channel) -> None:
        self._reader = reader
        self._writer = writer
        self._channel = channel
        self.name = name

    async def receive(self, limit: int = LARGEST_GREETING) -> Message:
        """The next message, of at most `limit` bytes. MessageError, or EOFError and ConnectionError at the end."""
        wire, tag = await self._next(limit)
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
        self._writer.write(self._channel.seal(wire))
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
