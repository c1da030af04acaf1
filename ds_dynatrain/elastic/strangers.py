"""The coordinator's door: a connection has to prove, soon, that it knows the token, or it is closed.

Honest peers prove it within milliseconds. So where too many connections have not, the one that has waited longest is
closed, and honest peers come in however many strangers there are.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable

from ds_dynatrain.elastic.address import tune
from ds_dynatrain.elastic.channel import NO_TAG, TAG_BYTES, Channel, new_nonce
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_GREETING,
    PROTOCOL,
    Challenge,
    Hello,
    Refused,
    body_length,
    clipped,
    decode,
    encode,
)
from ds_dynatrain.elastic.peer import Peer
from ds_dynatrain.elastic.world import LONGEST_TEXT
from ds_dynatrain.errors import MessageError, PeerRefused

MOST_STRANGERS = 512
"""Connections at one time that have proved nothing; and at most a quarter of the files that this process may open."""
PROVE_SECONDS = 2.0
"""From the opening of a connection until the peer has proved that it knows the token."""
RETRY_SECONDS = 0.2
"""Until the next connection is accepted after one could not be."""
LINE_SECONDS = 1.0
"""Between two lines of the log about strangers, at least."""

logger = logging.getLogger("ds_dynatrain.elastic")


class Door:
    """Takes connections from a listening socket, and hands those that prove the token to `attend`.

    refusal: the answer to a peer with another token, or none.
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
        self._most = min(MOST_STRANGERS, _files() // 4)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproved: dict[asyncio.Task[None], None] = {}
        self._complaints = Complaints()

    async def serve(self) -> None:
        """Take connections until this is cancelled; then close the listening socket and all connections."""
        self._listener.setblocking(False)
        try:
            while True:
                await self._accept()
                await asyncio.sleep(0)  # an accept that need not wait gives nobody else a turn
        finally:
            self._listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        try:
            link, there = await asyncio.get_running_loop().sock_accept(self._listener)
        except OSError as error:  # no descriptors, for example; strangers can be spared first
            self._complaints.say(f"no connection can be accepted: {error}; raise `ulimit -n`")
            self._close_oldest()
            await asyncio.sleep(RETRY_SECONDS)
            return
        task = asyncio.create_task(self._take(link, str(there)))
        self._tasks.add(task)
        self._unproved[task] = None
        task.add_done_callback(self._forget)
        if len(self._unproved) > self._most:
            self._close_oldest()

    def _close_oldest(self) -> None:
        if self._unproved:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unproved.pop(task, None)

    async def _take(self, link: socket.socket, name: str) -> None:
        """Attend to one connection, from its beginning to its end."""
        try:
            tune(link)
            reader, writer = await asyncio.open_connection(sock=link)
        except OSError:  # it has gone already
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
        """Return the channel and the greeting of a peer that proves the token; raise PeerRefused or MessageError."""
        nonce = new_nonce()
        writer.write(encode(Challenge(version=PROTOCOL, nonce=nonce)) + NO_TAG)
        header = await reader.readexactly(HEADER.size)
        wire = header + await reader.readexactly(body_length(header, LARGEST_GREETING))
        tag = await reader.readexactly(TAG_BYTES)
        hello = decode(wire[HEADER.size :])
        if not isinstance(hello, Hello):
            raise MessageError(f"{hello.kind}: a connection begins with hello")
        channel = Channel(self._token, (nonce, hello.nonce), "coordinator")
        if not channel.is_next(wire, tag):
            raise PeerRefused(self._refusal)
        return channel, hello


class Complaints:
    """Warnings that any stranger can cause: a line a second, which says how many there were since the one before."""

    def __init__(self) -> None:
        self._next = 0.0
        self._unsaid = 0

    def say(self, text: str) -> None:
        """Log it, or count it."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more like it before)" if self._unsaid else ""
        logger.warning("%s%s", text, more)
        self._next, self._unsaid = now + LINE_SECONDS, 0


def _files() -> int:
    """How many files this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
