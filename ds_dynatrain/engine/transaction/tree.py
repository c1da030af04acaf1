"""Who hears whom: a tree over the members, so that nobody reads what all say, however many they are."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 64
"""So many members one leads, itself among them: their reports take milliseconds to read."""


@dataclass(frozen=True)
class Tree:
    """The first of every `width` members leads them, the first of every `width` leaders leads these, and so on.

    members: in any order that is the same on all; the first one is the root.
    """

    members: tuple[int, ...]
    width: int = WIDTH

    def heard_by(self, member: int) -> list[tuple[int, ...]]:
        """On each level, from the leaves, the members that `member` hears; an empty list for who leads nobody."""
        index, step, levels = self.members.index(member), 1, list[tuple[int, ...]]()
        while step < len(self.members) and index % (step * self.width) == 0:
            levels.append(self.members[index + step : index + step * self.width : step])
            step *= self.width
        return levels
