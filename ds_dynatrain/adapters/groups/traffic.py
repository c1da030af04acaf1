"""Counts of the calls that a member has begun and ended in one group, which show whether messages are in flight.

A collective leaves no message behind if all members have begun the same number of collectives and each member has seen
its own end. A message that was both sent and received leaves nothing behind either. After a world has lost a member,
the reports of all members of a group decide whether the group may be reused, so all members decide the same.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

MESSAGES = ("send", "recv", "recv_anysource")
"""Methods that involve only two ranks. The second argument of `send` and `recv` is the peer."""
Said = dict[str, dict[str, Any]]
"""Members' reports on groups, keyed by the group's name, as plain JSON. See `Traffic.said`."""


class Traffic:
    """Counts of one group's calls on one member. Any thread may use them.

    is_closed: whether no further call may begin.
    has_failed: whether messages may have been left behind, or cannot be counted.
    """

    def __init__(self, rank: int) -> None:
        self.is_closed = self.has_failed = False
        self._rank, self._lock = rank, threading.Lock()
        self._collectives = self._under_way = 0
        self._messages = Counter[tuple[int, int]]()
        """A map from (sender, receiver) to the number of messages sent, minus the number received."""

    def begin(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Count a call of the group's method `name`, and return True. Return False if the group is closed.

        If the result is False, the call was not counted and must not begin.
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
        """Record that a call has ended successfully."""
        with self._lock:
            self._under_way -= 1

    def fail(self) -> None:
        """Record that a call has failed, or that its state on other ranks is unknown."""
        self.has_failed = True

    def close(self) -> bool:
        """Forbid further calls. Return whether no call is in progress and none has failed."""
        with self._lock:
            self.is_closed = True
            return self.is_at_rest

    @property
    def is_at_rest(self) -> bool:
        """Whether all calls begun on this member have ended successfully."""
        return not self._under_way and not self.has_failed

    def said(self, size: int, is_lost: bool) -> dict[str, Any]:
        """Return this member's report on the group, which has `size` ranks.

        is_lost: whether the group's world is lost on this member.
        """
        with self._lock:
            messages = [[*pair, count] for pair, count in sorted(self._messages.items()) if count]
            said = {"members": 1, "size": size, "has_failed": self.has_failed, "is_lost": is_lost}
            rests = is_lost and self.is_closed and self.is_at_rest
            return {**said, "collectives": self._collectives if rests else None, "messages": messages}


def joined(one: Said, other: Said) -> Said:
    """Merge the reports of two sets of members. The operation is associative."""
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
    """Return the names of the groups that must be rebuilt, given the merged reports of all members.

    A group must be rebuilt if some of its members have not reported, or if a call has failed in it. If the world is
    lost, its members stopped at different points, so groups with unfinished calls must also be rebuilt.
    """
    is_lost, names = False, list[str]()
    for said in found.values():
        is_lost |= said["is_lost"]
    for name, said in sorted(found.items()):
        is_open = is_lost and (said["collectives"] is None or said["messages"])
        if said["members"] < said["size"] or said["has_failed"] or is_open:
            names.append(name)
    return names
