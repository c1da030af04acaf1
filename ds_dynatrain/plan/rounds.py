"""Rounds: in which order members meet, so that each pair meets once and nobody waits in a circle.

The round-robin tournament by the circle method (T. P. Kirkman, 1847): one member stands still, the others step around
it. In each round a member has one peer or rests, and so do all in the same round, so an exchange in both directions
at once never deadlocks, for any number of members.
"""

from __future__ import annotations

from collections.abc import Iterable


def rounds(members: Iterable[int], me: int) -> tuple[int | None, ...]:
    """The peer of `me` in every round, None where it rests.

    n members need n - 1 rounds if n is even and n if it is odd; `members` in any order, all callers with the same set.
    ValueError if `me` is none of them.
    """
    circle: list[int | None] = [*sorted(set(members))]
    if me not in circle:
        raise ValueError(f"member {me} is not among {circle}")
    if len(circle) % 2:
        circle.append(None)
    count = len(circle) - 1
    place = circle.index(me)
    if place == count:
        return tuple(circle[_opposite_fixed(round_number, count)] for round_number in range(count))
    return tuple(circle[_opponent(place, round_number, count)] for round_number in range(count))


def _opponent(place: int, round_number: int, count: int) -> int:
    """In round r, moving places a and b meet if a + b = r modulo count; a = b meets the one that stands still."""
    other = (round_number - place) % count
    return count if other == place else other


def _opposite_fixed(round_number: int, count: int) -> int:
    """The place a with 2a = r modulo count (count is odd)."""
    return round_number * (count + 1) // 2 % count
