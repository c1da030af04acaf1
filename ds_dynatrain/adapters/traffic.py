"""Count of what a member has begun and ended in one group, from which all can tell whether anything is under way in it.

A collective that all members have begun equally often, and that each has seen the end of, has left no message behind;
neither has a message that was sent and received. Whether a world that has lost a member may hand a group on is judged
from what all members of the group say of it, so it is the same on all of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

MESSAGES = ("send", "recv", "recv_anysource")
"""What concerns two ranks alone. The peer is the second argument of the first two."""
Said = dict[str, dict[str, Any]]
"""What members say of groups, by the group's name, in plain JSON: see `Traffic.said`."""


class Traffic:
    """Count of one group on one member. Any thread may call it.

    is_closed: nothing is begun any more. has_failed: messages may have been left behind, or cannot be accounted for.
    """

    def __init__(self, rank: int) -> None:
        self.is_closed = self.has_failed = False
        self._rank, self._lock = rank, threading.Lock()
        self._collectives = self._under_way = 0
        self._messages = Counter[tuple[int, int]]()
        """Those that were sent from one rank to another, less those that were received."""

    def begin(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Count a call of the group's; False, and nothing is to be begun, where it is closed. name: of the method."""
        with self._lock:
            if self.is_closed:
                return False
            self._under_way += 1
            if name == "send" and len(arguments) > 1:
                self._messages[self._rank, arguments[1]] += 1
            elif name == "recv" and len(arguments) > 1:
                self._messages[arguments[1], self._rank] -= 1
            elif name in MESSAGES:  # from or to nobody knows whom
                self.has_failed = True
            else:
                self._collectives += 1
            return True

    def end(self) -> None:
        """One that was begun has ended well."""
        with self._lock:
            self._under_way -= 1

    def fail(self) -> None:
        """One has not, or what the others have of it is not known."""
        self.has_failed = True

    def close(self) -> bool:
        """Let nothing be begun any more; whether nothing is under way, and nothing has failed."""
        with self._lock:
            self.is_closed = True
            return self.is_at_rest

    @property
    def is_at_rest(self) -> bool:
        """Whether all that was begun here has ended well."""
        return not self._under_way and not self.has_failed

    def said(self, size: int, is_lost: bool) -> dict[str, Any]:
        """This member's word on the group, which has so many ranks. is_lost: so has its world on this member."""
        with self._lock:
            messages = [[*pair, count] for pair, count in sorted(self._messages.items()) if count]
            said = {"members": 1, "size": size, "has_failed": self.has_failed, "is_lost": is_lost}
            rests = is_lost and self.is_closed and self.is_at_rest
            return {**said, "collectives": self._collectives if rests else None, "messages": messages}


def joined(one: Said, other: Said) -> Said:
    """Join what some members and what others say. Associative."""
    both = {name: _joined(said, other[name]) for name, said in one.items() if name in other}
    return {**one, **other, **both}


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
    """The groups that have to be built anew, from what all have said.

    Those of which not all members have said something, and those in which something has failed. In a world that is
    lost, which has ended at another place on each member, those too in which something was under way.
    """
    is_lost = any(said["is_lost"] for said in found.values())
    return sorted(
        name
        for name, said in found.items()
        if said["members"] < said["size"]
        or said["has_failed"]
        or (is_lost and (said["collectives"] is None or said["messages"]))
    )
