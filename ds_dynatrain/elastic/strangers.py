"""The coordinator's door: whoever connects has to prove there, soon, that it knows the token; and what the log says.

A stranger costs one message and a place among few, not a task: so honest peers come in however many strangers there
are. A peer that means well has proved itself within milliseconds, and so the one that has waited longest is sent away
where there are too many.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
from ds_dynatrain.elastic.world import LONGEST_TEXT
from ds_dynatrain.errors import MessageError, PeerRefused

MOST_STRANGERS = 512
"""At one time; and at most a quarter of the files that this process may open."""
PROVE_SECONDS = 2.0
"""From the opening of a connection until the peer has proved that it knows the token."""
ACCEPTED_AT_ONCE = 16
"""Then it is others' turn: the members', and that of strangers which have answered."""
LOOK_SECONDS = 0.2
LINE_SECONDS = 1.0
"""Between two lines of the log about strangers, at least."""

logger = logging.getLogger("ds_dynatrain.elastic")


@dataclass(eq=False)
class Stranger:
    """A connection of which nothing is proved."""

    link: socket.socket
    name: str
    nonce: str
    came: float
    said: bytearray = field(default_factory=bytearray)


Admit = Callable[[socket.socket, str, Channel, Hello, bytes], object]
"""What is done with a peer that has proved itself: its socket, its name, the channel, its greeting, what came next."""


class Door:
    """Takes connections from a listening socket in the loop that runs, and lets in those that know the token.

    refusal: what those are told that do not.
    """

    def __init__(self, listener: socket.socket, token: str | None, refusal: str, admit: Admit) -> None:
        self._listener = listener
        self._token = token
        self._refusal = refusal
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._most = min(MOST_STRANGERS, _files() // 4)
        self._waiting: dict[Stranger, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.complaints = Complaints()

    def open(self) -> None:
        """Begin."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        self._look()

    def close(self) -> None:
        """Take nobody any more, and send away those that wait; the listening socket is closed."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        for stranger in list(self._waiting):
            self._send_away(stranger)

    def __len__(self) -> int:
        return len(self._waiting)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                link, there = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, say: those of strangers are the first that can be spared
                self.complaints.say(f"no connection can be accepted: {error}; raise `ulimit -n`")
                self._listen_later()
                return
            link.setblocking(False)
            stranger = Stranger(link, str(there), new_nonce(), time.monotonic())
            self._waiting[stranger] = None
            self._loop.add_reader(link, self._hear, stranger)
            self._say(stranger, encode(Challenge(version=PROTOCOL, nonce=stranger.nonce)))
            if len(self._waiting) > self._most:
                self._send_away(next(iter(self._waiting)))

    def _listen_later(self) -> None:
        """The kernel would say again at once that somebody waits."""
        if self._waiting:
            self._send_away(next(iter(self._waiting)))
            return
        self._loop.remove_reader(self._listener)
        self._loop.call_later(LOOK_SECONDS, self._listen_again)

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _hear(self, stranger: Stranger) -> None:
        try:
            part = stranger.link.recv(LARGEST_GREETING)
            stranger.said += part
            greeting = self._greeting(stranger) if part else None
        except (PeerRefused, MessageError) as error:
            self.complaints.say(f"{stranger.name}: refused: {error}")
            self._say(stranger, encode(Refused(reason=clipped(str(error), LONGEST_TEXT))))
            self._send_away(stranger)
            return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            part, greeting = b"", None
        if not part:
            self._send_away(stranger)
        elif greeting is not None:
            self._forget(stranger)
            self._admit(stranger.link, stranger.name, *greeting)

    def _greeting(self, stranger: Stranger) -> tuple[Channel, Hello, bytes] | None:
        """(the channel, the greeting, what came after it), once all of it is there; PeerRefused or MessageError."""
        said = bytes(stranger.said)
        if len(said) < HEADER.size:
            return None
        end = HEADER.size + body_length(said[: HEADER.size], LARGEST_GREETING)
        if len(said) < end + TAG_BYTES:
            return None
        hello = decode(said[HEADER.size : end])
        if not isinstance(hello, Hello):
            raise MessageError(f"{hello.kind}: a connection begins with hello")
        channel = Channel(self._token, (stranger.nonce, hello.nonce), "coordinator")
        if not channel.is_next(said[:end], said[end : end + TAG_BYTES]):
            raise PeerRefused(self._refusal)
        return channel, hello, said[end + TAG_BYTES :]

    def _say(self, stranger: Stranger, wire: bytes) -> None:
        try:
            stranger.link.send(wire + NO_TAG)  # a new connection has room for it
        except OSError:
            pass  # it has gone; that is heard next

    def _look(self) -> None:
        """Send away those that have had their time."""
        end = time.monotonic() - PROVE_SECONDS
        for stranger in list(self._waiting):
            if stranger.came > end:
                break
            self._send_away(stranger)
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _forget(self, stranger: Stranger) -> None:
        del self._waiting[stranger]
        self._loop.remove_reader(stranger.link)

    def _send_away(self, stranger: Stranger) -> None:
        self._forget(stranger)
        stranger.link.close()


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
