"""Numbers of members: small, for people to read, and never given twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Registry:
    """The number of each member of a job by its id; `following` is the next one to be given.

    Every member that has entered a generation has its registry, so whoever leads the next one gives the same numbers.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    following: int = 0

    def extended(self, members: Iterable[str]) -> Registry:
        """With a number for each of these members, new ones in their order."""
        numbers, following = dict(self.numbers), self.following
        for member in members:
            if member not in numbers:
                numbers[member], following = following, following + 1
        return Registry(numbers, following)

    def only(self, members: Iterable[str]) -> Registry:
        """Without those that have gone, whose numbers are not given again. KeyError for a member without one."""
        return Registry({member: self.numbers[member] for member in members}, self.following)

    def ids_of(self, numbers: Iterable[int]) -> frozenset[str]:
        """The ids of several members."""
        wanted = set(numbers)
        return frozenset(member for member, its in self.numbers.items() if its in wanted)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"numbers": dict(self.numbers), "following": self.following}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Registry:
        """The inverse of `to_json`."""
        return Registry(dict(record["numbers"]), int(record["following"]))
