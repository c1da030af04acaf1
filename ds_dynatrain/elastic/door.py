"""Server side of connections. A peer that does not soon prove that it knows the job's token is disconnected.

A *stranger* is a peer that has not proved that it knows the token. Honest peers do so within milliseconds. While there
are too many strangers, further connections wait in the kernel's queue, so that thousands of workers that connect at
once are served one after another. To make room, the oldest stranger is disconnected once it has had enough time for the
proof. Honest peers therefore get in, however many strangers connect. Reads may wait, but are bounded in bytes and time;
writes never wait.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ds_dynatrain.elastic.address import set_tcp_options
from ds_dynatrain.elastic.connection import NO_TAG, RETRY_SECONDS, TAG_BYTES, Channel, new_nonce
from ds_dynatrain.elastic.generation import LONGEST_TEXT, Generation
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
from ds_dynatrain.errors import MessageError, PeerRefused

MOST_UNREAD = 2 * LARGEST_MESSAGE
"""The maximum number of bytes buffered for a peer that does not read. Beyond this its connection is dropped."""
MOST_STRANGERS = 4096
"""The maximum number of simultaneous connections whose peers have not proved that they know the token. The number is
also limited to a quarter of the files that this process may open."""
STRANGERS_A_SECOND = 4096
"""The rate, per second, at which unauthenticated peers may connect without making others wait. A peer has a fair time
to authenticate: the number of connections allowed at once, divided by this rate."""
ACCEPTED_TOGETHER = 16
"""Maximum number of connections that the coordinator accepts in one turn of its event loop."""
ROOM_SECONDS = 0.005
"""Interval between two checks of whether another connection can be accepted, while too many peers have not
authenticated."""
PROVE_SECONDS = 5.0
"""How long a new connection may take to prove that its peer knows the token."""
LINE_SECONDS = 1.0
"""The shortest time between two log lines about unauthenticated peers."""

logger = logging.getLogger("ds_dynatrain.elastic")


@dataclass(eq=False)
class Peer:
    """Connection of a peer that has proved that it knows the job's token.

    name: identifies the peer in the log.
    told: the last generation that was sent over this connection; None before the first one.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    name: str
    channel: Channel
    told: Generation | None = None

    async def receive(self, limit: int = LARGEST_GREETING) -> Message:
        """Return the next message, of at most `limit` bytes.

        Raises MessageError if the message is malformed, EOFError or ConnectionError at the end of the connection.
        """
        wire, tag = await _next(self.reader, limit)
        self.channel.check(wire, tag)
        return decode(wire[HEADER.size :])

    def send(self, message: Message) -> None:
        """Queue a message for sending; never waits."""
        self.send_bytes(encode(message))

    def send_bytes(self, wire: bytes) -> None:
        """Queue an encoded message for sending. Drops the connection if too many bytes are waiting that the peer has
        not read."""
        if self.writer.is_closing():
            return
        self.writer.write(self.channel.seal(wire))
        if self.writer.transport.get_write_buffer_size() > MOST_UNREAD:
            self.writer.transport.abort()

    def refuse(self, reason: str) -> None:
        """Send the peer the reason why it is refused, and end the connection."""
        self.send(Refused(reason=clipped(reason, LONGEST_TEXT)))
        self.writer.close()

    def abort(self) -> None:
        """End the connection now, without sending queued messages."""
        self.writer.transport.abort()


class Door:
    """Server that accepts connections at a listening socket, and calls `attend` for each peer that proves that it knows
    the job's token.

    refusal: the reason given to a peer that has no token or a wrong one.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str | None,
        refusal: str,
        attend: Callable[[Peer, Hello], Awaitable[None]],
    ) -> None:
        self._listener = listener
        self._token = token
        self._refusal = refusal
        self._attend = attend
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST_STRANGERS if files == resource.RLIM_INFINITY else min(MOST_STRANGERS, files // 4)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fair_seconds = self._most / STRANGERS_A_SECOND
        self._unproved: dict[asyncio.Task[None], float] = {}
        """For each connection whose peer has not authenticated, the time at which it was accepted, oldest first."""
        self._complaints = Complaints()

    async def serve(self) -> None:
        """Accept connections until this task is cancelled; then close the listening socket and all connections."""
        self._listener.setblocking(False)
        try:
            while True:
                for _ in range(ACCEPTED_TOGETHER):
                    await self._make_room()
                    await self._accept()
                await asyncio.sleep(0)  # other tasks run here even if an accept never waits
        finally:
            self._listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _make_room(self) -> None:
        """Wait until another unauthenticated peer can be accepted. If there are too many, disconnect the one that has
        been connected longest, once it has had enough time to authenticate."""
        while len(self._unproved) >= self._most:
            if time.monotonic() - next(iter(self._unproved.values())) >= self._fair_seconds:
                self._close_oldest()
            else:
                await asyncio.sleep(ROOM_SECONDS)

    async def _accept(self) -> None:
        try:
            link, there = await asyncio.get_running_loop().sock_accept(self._listener)
        except OSError as error:  # for example no free descriptor: drop a stranger
            self._complaints.say(f"no connection can be accepted: {error}; raise `ulimit -n`")
            self._close_oldest()
            await asyncio.sleep(RETRY_SECONDS)
            return
        task = asyncio.create_task(self._take(link, str(there)))
        self._tasks.add(task)
        self._unproved[task] = time.monotonic()
        task.add_done_callback(self._forget)

    def _close_oldest(self) -> None:
        if self._unproved:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unproved.pop(task, None)

    async def _take(self, link: socket.socket, name: str) -> None:
        """Handle one connection from beginning to end."""
        try:
            set_tcp_options(link)
            reader, writer = await asyncio.open_connection(sock=link)
        except OSError:  # the peer is already gone
            link.close()
            return
        try:
            channel, hello = await asyncio.wait_for(self._proof(reader, writer), PROVE_SECONDS)
        except (PeerRefused, MessageError) as error:
            self._complaints.say(f"{name}: refused: {error}")
            writer.write(encode(Refused(reason=clipped(str(error), LONGEST_TEXT))) + NO_TAG)
        except (EOFError, OSError, asyncio.TimeoutError):
            pass
        else:
            task = asyncio.current_task()
            if task is not None:
                self._unproved.pop(task, None)
            await self._attend(Peer(reader, writer, name, channel), hello)
        finally:
            writer.close()

    async def _proof(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Channel, Hello]:
        """Return the channel and the greeting of a peer that proves that it knows the token.

        Raises PeerRefused if the token is missing or wrong, MessageError if the greeting is malformed.
        """
        nonce = new_nonce()
        writer.write(encode(Challenge(version=PROTOCOL, nonce=nonce)) + NO_TAG)
        wire, tag = await _next(reader, LARGEST_GREETING)
        hello = decode(wire[HEADER.size :])
        if not isinstance(hello, Hello):
            raise MessageError(f"{hello.kind}: a connection begins with hello")
        channel = Channel(self._token, (nonce, hello.nonce), "coordinator")
        if not channel.is_next(wire, tag):
            raise PeerRefused(self._refusal)
        return channel, hello


class Complaints:
    """Rate limiter for warnings that unauthenticated peers can cause. It logs at most one line a second; the next line
    says how many were suppressed."""

    def __init__(self) -> None:
        self._next = 0.0
        self._unsaid = 0

    def say(self, text: str) -> None:
        """Log the text, or only count it if the previous line was logged less than `LINE_SECONDS` ago."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more like it before)" if self._unsaid else ""
        logger.warning("%s%s", text, more)
        self._next, self._unsaid = now + LINE_SECONDS, 0


async def _next(reader: asyncio.StreamReader, limit: int) -> tuple[bytes, bytes]:
    """Return the next message and its tag. Raises MessageError if the message is longer than `limit` bytes."""
    header = await reader.readexactly(HEADER.size)
    body = await reader.readexactly(body_length(header, limit))
    return header + body, await reader.readexactly(TAG_BYTES)
