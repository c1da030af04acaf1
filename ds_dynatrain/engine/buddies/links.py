"""A working member's links to the idle ones that keep its copies.

They are made beside training, as soon as an idle member says where it listens; nobody waits for one that does not, and
nothing is lost with a link that ends.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.device import start_thread
from ds_dynatrain.elastic.address import tune
from ds_dynatrain.engine.buddies.copy import Mark
from ds_dynatrain.engine.buddies.keeping import hear, place_of, say
from ds_dynatrain.engine.buddies.shipping import TO_BUDDY, TO_WARD
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import DynatrainError, TransferError
from ds_dynatrain.report import logger
from ds_dynatrain.transfer import Handle, Link, Transport

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.2
"""Between two looks at the board."""


class Links:
    """Of one member, in one world. keepers: the idle members that it wants to be linked to."""

    def __init__(self, engine: EngineCore, keepers: Sequence[int]) -> None:
        self.engine, self._rank, self._keepers = engine, engine.rank, tuple(keepers)
        self._links: dict[int, Link] = {}
        self._asked: set[int] = set()
        self._next, self._is_closed = 0.0, False

    @property
    def are_ready(self) -> bool:
        """Whether there is one to each of them."""
        return all(member in self._links and not self._links[member].is_over for member in self._keepers)

    def look(self) -> None:
        """Connect to those that say where they are; cheap to call often."""
        missing = [member for member in self._keepers if member not in self._asked]
        if not missing or self._is_closed or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        for member in missing:
            with suppress(td.DistError):  # the board is gone for now
                place = self.engine.control.read(place_of(member))
                if place is not None:
                    self._asked.add(member)
                    start_thread(partial(self._connect, member, place), "dynatrain-keeper")

    def _connect(self, member: int, place: dict[str, Any]) -> None:
        """In a thread."""
        try:
            connection = socket.create_connection((place["host"], place["port"]), timeout=CONNECT_SECONDS)
            tune(connection)
            link = Link(connection, member)
            try:
                mine = self.engine.control.member
                say(link, TO_BUDDY, {"member": mine, "rank": self._rank, "secret": place["secret"]})
                hear(link, TO_WARD, time.monotonic() + CONNECT_SECONDS)
            except BaseException:
                link.close()
                raise
        except (OSError, KeyError, TypeError, DynatrainError) as error:
            logger.info("buddies: idle member %d keeps no copies, as it cannot be reached: %s", member, error)
            return
        self._links[member] = link
        if self._is_closed:
            link.close()

    def begin(self, mark: Mark, whole: Mark | None, group: Transport | None) -> Transport:
        """Tell them that a copy of this moment comes next; the way to them, and over the group to all others.

        whole: the newest moment that is whole on all. group: None where nobody else is.
        """
        for member in self._keepers:
            what = {"mark": mark.to_dict(), "whole": None if whole is None else whole.to_dict()}
            say(self._links[member], TO_BUDDY, what)
        return _Routed(self._links, group)

    def close(self) -> None:
        """Whatever waits for them ends at once."""
        self._is_closed = True
        for link in list(self._links.values()):
            link.close()


class _Routed:
    """Over the link to a member, if there is one. What fails on a link is the affair of its two ends: all others are in
    the midst of a round, and come to its end."""

    def __init__(self, links: dict[int, Link], group: Transport | None) -> None:
        self._links, self._group = links, group

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self._way(member).send(tensor, member, tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self._way(member).receive(tensor, member, tag)

    def _way(self, member: int) -> Transport:
        if member in self._links:
            return _Forgiving(self._links[member])
        if self._group is None:
            raise TransferError(f"there is no way to member {member}")
        return self._group


class _Forgiving:
    """A link over which nothing fails: what is not sent is lost, and what does not come stays as it was, which is no
    for an answer."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return _Tried(self._link, self._link.send(tensor, member, tag))

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return _Tried(self._link, self._link.receive(tensor, member, tag))


class _Tried:
    """Something under way."""

    def __init__(self, link: Link, handle: Handle) -> None:
        self._link, self._handle = link, handle

    def wait(self, deadline: float) -> None:
        try:
            self._handle.wait(deadline)
        except DynatrainError as error:
            logger.info("buddies: idle member %d is out of reach: %s", self._link.member, error)
            self._link.close()
