"""Which members count as slow: those that windows have found slower than the others of their stage for long enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slow:
    """since: member -> the step of the first of the windows in a row that have found it slow."""

    since: Mapping[int, int] = field(default_factory=dict)

    def after(self, members: Sequence[int], speeds: Sequence[float], step: int, ratio: float | None) -> Slow:
        """With one more window. ratio: a member is slow that takes so many times as long as its stage's middle one."""
        if ratio is None:
            return Slow()
        return Slow(
            {
                member: self.since.get(member, step)
                for member, speed in zip(members, speeds, strict=True)
                if speed * ratio < 1
            }
        )

    def counted(self, step: int, steps: int) -> frozenset[int]:
        """The members that have been slow for so many steps."""
        return frozenset(member for member, since in self.since.items() if step - since >= steps)

    def to_json(self) -> list[list[int]]:
        """Plain JSON; `from_json` gives the same."""
        return [[member, since] for member, since in self.since.items()]

    @classmethod
    def from_json(cls, said: Sequence[Sequence[Any]]) -> Slow:
        """The inverse of `to_json`."""
        return cls({int(member): int(since) for member, since in said})
