"""The layouts that the tests cover, and walks over ordered pairs of them."""

from __future__ import annotations

import random
from itertools import pairwise, product

from tests.engine.jobs import Sizes

LAYOUTS: tuple[Sizes, ...] = tuple(product((1, 2, 3, 4), (0, 1, 2, 3)))
"""Every (data, zero_stage): 16."""


def circuit(seed: int) -> list[Sizes]:
    """A walk that takes every ordered pair of layouts once, self-pairs too: 256 switches over 257 places.

    Hierholzer's algorithm for an Eulerian circuit; the complete digraph with loops has one.
    """
    draw = random.Random(seed)
    left = {layout: draw.sample(LAYOUTS, len(LAYOUTS)) for layout in LAYOUTS}
    stack, walk = [LAYOUTS[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def part(seed: int, switches: int) -> list[Sizes]:
    """A walk of `switches` different pairs that comes by every layout and stays in place once."""
    draw = random.Random(seed)
    walk = draw.sample(LAYOUTS, len(LAYOUTS))
    walk.append(walk[-1])
    taken = set(pairwise(walk))
    while len(walk) <= switches:
        options = [layout for layout in LAYOUTS if (walk[-1], layout) not in taken]
        walk.append(draw.choice(options))
        taken.add((walk[-2], walk[-1]))
    return walk
