"""What an idle member keeps of those that work: it listens, and whose buddy it is comes and sends its copies.

It decides nothing: those that work agree on whose copies are whole, and say so with the next one. Each ward has a link
and a thread of its own here, so the main thread may do whatever it likes; a ward that goes, or dies, is no concern of
the others. What is kept stays until something newer is whole.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from ds_dynatrain.elastic.address import Address, listen, tune
from ds_dynatrain.engine.buddies.copy import Mark
from ds_dynatrain.engine.buddies.kept import Kept
from ds_dynatrain.engine.buddies.shipping import TO_BUDDY, TO_WARD, Round, Ward
from ds_dynatrain.engine.control import Control
from ds_dynatrain.errors import TransferError
from ds_dynatrain.report import logger
from ds_dynatrain.transfer import Link

HELLO_SECONDS = 10.0
"""How long who connects may take to say who it is."""
FOREVER = float("inf")
LONGEST_WORD = 1 << 16
NOBODY = -1


class Keeping:
    """Of one process, from the first time that it is idle to its end. kept: where the copies are, as `guests`."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self._secret = kept, secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._said_on: Control | None = None
        self._links: dict[int, tuple[Link, threading.Thread]] = {}

    def offer(self, control: Control, host: str) -> None:
        """Say on a board where this member listens: once on each. OSError if it cannot listen."""
        if control is self._said_on:
            return
        if self._listener is None:
            self._listener = listen(Address(host, 0), is_guarded=True)  # by the secret, which is on the board alone
            threading.Thread(target=self._answer, args=(self._listener,), name="dynatrain-keeping", daemon=True).start()
        place = {"host": host, "port": self._listener.getsockname()[1], "secret": self._secret}
        control.post(place_of(control.member), place)
        self._said_on = control

    def _answer(self, listener: socket.socket) -> None:
        """Whoever connects gets a thread of its own."""
        while True:
            try:
                connection = listener.accept()[0]
            except OSError as error:
                logger.warning(
                    "buddies: this idle member keeps no copies of others any more (%s); start its process again to "
                    "have it keep some",
                    error,
                )
                return
            tune(connection)
            threading.Thread(target=self._welcome, args=(connection,), name="dynatrain-ward", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        """Hear who it is, and serve it."""
        link = Link(connection, NOBODY)
        try:
            said = hear(link, TO_BUDDY, time.monotonic() + HELLO_SECONDS)
            member, rank, secret = int(said["member"]), int(said["rank"]), str(said["secret"])
            if not hmac.compare_digest(secret.encode(), self._secret.encode()):
                raise TransferError("who has connected does not know the secret")
            before = self._links.get(member)
            self._links[member] = link, threading.current_thread()
            if before is not None:
                before[0].close()
                before[1].join()
            say(link, TO_WARD, {})
            self._serve(link, member, rank, self._kept.guests.setdefault(member, Kept()))
        except (TransferError, KeyError, TypeError, ValueError) as error:
            logger.debug("buddies: a link of an idle member has ended: %s", error)
        finally:
            link.close()

    def _serve(self, link: Link, member: int, rank: int, kept: Kept) -> None:
        """One copy after the other; TransferError at the end."""
        while True:
            said = hear(link, TO_BUDDY, FOREVER)
            mark = Mark.from_dict(said["mark"])
            if said["whole"] is not None:
                self._is_whole(kept, Mark.from_dict(said["whole"]))
            _, rooms = kept.begin(mark, 1)
            found = Round(mark, None, (), [Ward(member, rank, rooms[0])], link, kept)
            found.run()
            if found.is_broken:
                raise TransferError(found.error)
            if found.error:
                logger.error(
                    "buddies: the copy of member %d of step %d is not here (%s); the one before counts",
                    *(member, mark.step, found.error),
                )

    def _is_whole(self, kept: Kept, mark: Mark) -> None:
        """All members have all copies of a moment: older ones are of no use, but for what is being written."""
        kept.is_whole(mark)
        self._kept.let_go_before(mark, {member for member, (link, _) in self._links.items() if not link.is_over})


def place_of(member: int) -> str:
    """The key under which an idle member says where it listens."""
    return f"keeper/{member}"


def say(link: Link, tag: int, what: Mapping[str, Any]) -> None:
    """Send something in JSON."""
    text = json.dumps(what).encode()
    link.send(torch.tensor([len(text)]), link.member, tag)
    link.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), link.member, tag)


def hear(link: Link, tag: int, deadline: float) -> dict[str, Any]:
    """What the other side says next; TransferError if that is nothing, or nonsense."""
    length = torch.zeros(1, dtype=torch.int64)
    link.receive(length, link.member, tag).wait(deadline)
    if not 0 < int(length) <= LONGEST_WORD:
        raise TransferError(f"{int(length)} bytes were announced where a word was due")
    text = torch.zeros(int(length), dtype=torch.uint8)
    link.receive(text, link.member, tag).wait(deadline)
    with suppress(ValueError):
        found = json.loads(text.numpy().tobytes())
        if isinstance(found, dict):
            return found
    raise TransferError("what was said is no JSON")
