"""Peers that have not said who they are yet, or said it wrong: how many there may be, and what the log says."""

from __future__ import annotations

import logging
import resource
import time
from collections import defaultdict

from ds_dynatrain.elastic.peer import Peer

MOST_STRANGERS = 2048
MOST_OF_ONE_HOST = 512
"""At one time; and at most a quarter, or a sixteenth, of the files that this process may open."""
LINE_SECONDS = 1.0
"""Between two lines of the log about strangers, at least."""

logger = logging.getLogger("ds_dynatrain.elastic")


class Strangers:
    """Where there are too many, whoever has waited longest is sent away, and first of all on its own host.

    A peer that means well has said who it is within milliseconds, so it is others that wait. One host can take no
    places from another one.
    """

    def __init__(self) -> None:
        files = _files()
        self._most, self._most_of_one_host = min(MOST_STRANGERS, files // 4), min(MOST_OF_ONE_HOST, files // 16)
        self._waiting: dict[Peer, str] = {}
        self._by_host: defaultdict[str, dict[Peer, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, peer: Peer, host: str) -> None:
        """Somebody has come."""
        self._waiting[peer] = host
        self._by_host[host][peer] = None
        if len(self._by_host[host]) > self._most_of_one_host:
            self._send_away(next(iter(self._by_host[host])))
        elif len(self._waiting) > self._most:
            self._send_away(next(iter(self._waiting)))

    def remove(self, peer: Peer) -> None:
        """It has said who it is, or has gone; harmless twice."""
        host = self._waiting.pop(peer, None)
        if host is not None:
            del self._by_host[host][peer]
            if not self._by_host[host]:
                del self._by_host[host]

    def _send_away(self, peer: Peer) -> None:
        self.remove(peer)
        peer.abort()


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
