"""Counts of calls that a member has begun and ended in one group, from which all tell whether messages are under way.

A collective that all members have begun equally often, and whose end each has seen, has left no message behind; neither
has a message that was sent and received. If a world has lost a member, the reports of all members of a group decide
whether it may be handed on, so all of them decide alike.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

MESSAGES = ("send", "recv", "recv_anysource")
"""Methods that concern two ranks only. The peer is the second argument of the first two."""
Said = dict[str, dict[str, Any]]
"""Reports of members on groups, by the group's name, in plain JSON: see `Traffic.said`."""


class Traffic:
    """Counts of one group on one member. Any thread may call it.

    is_closed: whether no further call may begin. has_failed: whether messages may have been left behind, or cannot be
    accounted for.
    """

    def __init__(self, rank: int) -> None:
        self.is_closed = self.has_failed = False
        self._rank, self._lock = rank, threading.Lock()
        self._collectives = self._under_way = 0
        self._messages = Counter[tuple[int, int]]()
        """Messages sent from one rank to another, less those received."""

    def begin(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Count a call of the group's method `name`. Returns False if the group is closed; the call must not begin
        then.
        """
        with self._lock:
            if self.is_closed:
                return False
            self._under_way += 1
            if name == "send" and len(arguments) > 1:
                self._messages[self._rank, arguments[1]] += 1
            elif name == "recv" and len(arguments) > 1:
                self._messages[arguments[1], self._rank] -= 1
            elif name in MESSAGES:  # sender or receiver is unknown
                self.has_failed = True
            else:
                self._collectives += 1
            return True

    def end(self) -> None:
        """Note that a call has ended well."""
        with self._lock:
            self._under_way -= 1

    def fail(self) -> None:
        """Note that a call has not ended well, or that its state on the others is unknown."""
        self.has_failed = True

    def close(self) -> bool:
        """Let no further call begin; return whether no call is under way and none has failed."""
        with self._lock:
            self.is_closed = True
            return self.is_at_rest

    @property
    def is_at_rest(self) -> bool:
        """Return whether all calls begun here have ended well."""
        return not self._under_way and not self.has_failed

    def said(self, size: int, is_lost: bool) -> dict[str, Any]:
        """Return this member's report on the group, which has `size` ranks. is_lost: whether its world is lost on this
        member.
        """
        with self._lock:
            messages = [[*pair, count] for pair, count in sorted(self._messages.items()) if count]
            said = {"members": 1, "size": size, "has_failed": self.has_failed, "is_lost": is_lost}
            rests = is_lost and self.is_closed and self.is_at_rest
            return {**said, "collectives": self._collectives if rests else None, "messages": messages}


def joined(one: Said, other: Said) -> Said:
    """Join the reports of some members and those of others. Associative."""
    found = {**one, **other}
    for name in one.keys() & other.keys():
        found[name] = _joined(one[name], other[name])
    return found


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    messages = Counter[tuple[int, int]]()
    for sender, receiver, count in (*one["messages"], *other["messages"]):
        messages[sender, receiver] += count
    return {
        "members": one["members"] + other["members"],
        "size": one["size"],
        "has_failed": one["has_failed"] or other["has_failed"],
        "is_lost": one["is_lost"] or other["is_lost"],
        "collectives": one["collectives"] if one["collectives"] == other["collectives"] else None,
        "messages": [[*pair, count] for pair, count in sorted(messages.items()) if count],
    }


def unfit(found: Said) -> list[str]:
    """Return the groups that have to be built anew, from the joined reports of all.

    They are the groups on which not all members have reported, and those in which a call has failed. In a lost world,
    which has ended at another place on each member, groups with calls under way are unfit, too.
    """
    is_lost, names = False, list[str]()
    for said in found.values():
        is_lost |= said["is_lost"]
    for name, said in sorted(found.items()):
        is_open = is_lost and (said["collectives"] is None or said["messages"])
        if said["members"] < said["size"] or said["has_failed"] or is_open:
            names.append(name)
    return names
