"""The order in which leaves (micro-batches of fixed size) are added: in pairs, then pairs of pairs, as they arrive.

This is pairwise summation (Higham 1993). Leaves are numbered from 0 and arrive in this order; each is a partial sum of
one leaf. Whenever the two newest partial sums have the same number of leaves, they are added. The sum of 2^k leaves
thus lies on level k, and no level has two sums. At the end the remaining sums are added, the newest first. The result
does not depend on which rank adds, or when, because the pairs follow from the numbers alone.

    leaf           0   1   2   3   4   5        6 leaves: ((0+1)+(2+3)) + (4+5)
    level_of       0   1   0   2   0   1        levels that are left: 2 and 1
"""

from __future__ import annotations

from collections.abc import Sequence


def level_of(leaf: int) -> int:
    """Return the level of the partial sum that a leaf (a micro-batch of fixed size) completes.

    The sum on level k contains 2^k leaves. The leaf is added to the partial sums on all lower levels, starting with
    level 0.
    """
    return ((leaf + 1) & -(leaf + 1)).bit_length() - 1


def rest_of(leaves: int) -> tuple[int, ...]:
    """Return the levels that hold a partial sum after this many leaves (micro-batches of fixed size), newest first."""
    return tuple(level for level in range(leaves.bit_length()) if leaves >> level & 1)


def pairwise_sum(leaves: Sequence[float]) -> float:
    """Return the sum of numbers, added in pairs, then pairs of pairs; 0.0 for no numbers, and never -0.0."""
    partial = [0.0] * len(leaves).bit_length()
    for number, leaf in enumerate(leaves):
        total = leaf
        for level in range(level_of(number)):
            total = partial[level] + total
        partial[level_of(number)] = total
    found: float | None = None
    for level in rest_of(len(leaves)):
        found = partial[level] if found is None else partial[level] + found
    return (found or 0.0) + 0.0
