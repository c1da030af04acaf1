"""The order in which a member exchanges with its peers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def rounds(members: Iterable[int], me: int) -> list[int | None]:
    """Return the peer of `me` in each round, or None in a round in which `me` has no peer.

    The schedule is a round-robin tournament by the circle method (T. P. Kirkman, 1847): one member is fixed, and the
    others rotate around it. Each pair meets once. All members go through the rounds in the same order and exchange in
    both directions at once, so they cannot deadlock.

    n members need n - 1 rounds if n is even and n if it is odd. All callers must pass the same set, in any order. Raise
    ValueError if `me` is not among `members`.
    """
    circle: list[int | None] = [*sorted(set(members))]
    if me not in circle:
        raise ValueError(f"member {me} is not among {circle}")
    if len(circle) % 2:
        circle.append(None)
    count = len(circle) - 1
    place, numbers = circle.index(me), np.arange(count)
    if place == count:  # the fixed member meets, in round r, the place a with 2a = r modulo count (count is odd)
        opponents = numbers * (count + 1) // 2 % count
    else:  # places a and b meet in round r if a + b = r modulo count; if a = b, a meets the fixed member
        opponents = (numbers - place) % count
        opponents[opponents == place] = count
    return [circle[opponent] for opponent in opponents.tolist()]
