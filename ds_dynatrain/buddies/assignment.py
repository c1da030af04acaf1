"""The assignment of *buddies*, the ranks that keep copies of a rank's state: on other nodes if there are any.

Nodes of equal size form pairs, whose ranks keep each other's copies. If two of n nodes die, state is lost in 1/(n - 1)
of all cases with pairs, and in 2/(n - 1) with a ring. The remaining nodes form one group, with as many pairs added as
needed so that no node in the group is larger than its other nodes together. The group's ranks are listed node by node,
and each keeps the copy of the rank a fixed number of positions earlier. Every rank therefore keeps one copy. The
exception is one node with more ranks than all others together: the ranks of the other nodes keep several copies each,
and some ranks of the large node keep none.

Further buddies, if more than one is requested, are assigned by the Hungarian method (scipy's `linear_sum_assignment`):
on nodes that have no copy of that rank yet, and not on the rank's own node as long as other nodes have a free rank;
among these, as evenly as possible.

On a single node each rank counts as a node of its own: copies protect against the death of a single process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from ds_dynatrain.plan import is_copied
from ds_dynatrain.space import Layout, VirtualParameterSpace

Node = tuple[int, ...]
"""The ranks on one node."""
MOMENTS = 2
"""Number of copies kept of each rank, so that a whole copy exists while the next one is written."""


def memory_of_copies(
    vps: VirtualParameterSpace,
    layout: Layout,
    nodes: Sequence[str],
    copies: int = 1,
    everything: bool = False,
) -> tuple[int, ...]:
    """Return the bytes of host memory that each rank needs for copies; 0 if there is only one rank.

    A rank keeps `MOMENTS` copies of its own buffers and of those of its wards, the ranks whose copies it keeps.

    nodes: the node of each rank.
    copies: the number of other ranks that keep each copy.
    everything: whether to copy moments and masters even if other ranks hold them; see `is_copied`.
    """
    buddies, own = buddies_of(nodes, copies), list[int]()
    for rank in range(len(nodes)):
        sizes = vps.local(layout, rank).sizes()
        kept = {key: numel for key, numel in sizes.items() if is_copied(vps, layout, *key, everything)}
        own.append(sum(numel * vps.kind(kind).itemsize for (kind, _), numel in kept.items()))
    return tuple(
        MOMENTS * (each + sum(own[ward] for ward in wards_of(buddies, rank))) if buddies else 0
        for rank, each in enumerate(own)
    )


def buddies_of(nodes: Sequence[str], copies: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the buddies of each rank: `copies` other ranks, or all others if there are fewer; () if there is only one
    rank.

    nodes: the node of each rank.
    copies: the number of buddies of each rank. The first one does not depend on this number.
    """
    if len(nodes) < 2:
        return ()
    names = nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]
    found = [_first(names)]
    while len(found) < min(copies, len(nodes) - 1):
        found.append(_further(names, found))
    return tuple(zip(*found, strict=True))


def _first(names: Sequence[str]) -> list[int]:
    """Return the first buddy of each rank, which is the rank that keeps its first copy."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    pairs, group = _grouped(sorted(map(tuple, ranks.values()), key=len, reverse=True))
    found = _around(group)
    for one, other in pairs:
        found.update(zip(one + other, other + one, strict=True))
    return [found[rank] for rank in range(len(names))]


def _further(names: Sequence[str], before: Sequence[Sequence[int]]) -> list[int]:
    """Return one more buddy (a rank that keeps a copy) for each rank.

    names: the nodes of the ranks.
    before: the buddies assigned so far.

    Each rank gets one more copy to keep, or more if this is needed to keep copies off their rank's own node.
    """
    count, ranks = len(names), np.arange(len(names))
    node = np.unique(list(names), return_inverse=True)[1]
    is_own = node[:, None] == node
    is_barred, near = ranks[:, None] == ranks, np.zeros((count, count), np.int64)
    is_barred |= is_own & ((~is_own).sum(axis=1) > len(before))[:, None]
    for buddies in before:
        is_barred[ranks, buddies] = True
        near += node[list(buddies)][:, None] == node
    largest = int(np.bincount(node).max())
    most = -(-largest // (count - largest))
    while True:
        costs = [np.where(is_barred, np.inf, near * (count * most + 1) + n) for n in range(most)]
        try:
            _, places = linear_sum_assignment(np.hstack(costs))
        except ValueError:  # some rank must keep more than `most`
            most += 1
        else:
            return [int(place) % count for place in places]


def wards_of(buddies: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """Return the ranks whose copies a rank keeps, in ascending order."""
    return tuple(ward for ward, keepers in enumerate(buddies) if rank in keepers)


def _grouped(nodes: list[Node]) -> tuple[list[tuple[Node, Node]], list[Node]]:
    """Return the pairs of nodes of equal size, and all other nodes, largest first.

    nodes: the nodes, largest first.
    """
    pairs: list[tuple[Node, Node]] = []
    rest: list[Node] = []
    for node in nodes:
        if rest and len(rest[-1]) == len(node):
            pairs.append((rest.pop(), node))
        else:
            rest.append(node)
    while pairs and rest and 2 * max(map(len, rest)) > sum(map(len, rest)):
        rest += pairs.pop()
    return pairs, sorted(rest, key=len, reverse=True)


def _around(group: list[Node]) -> dict[int, int]:
    """Return a map from each rank to its buddy, the rank that keeps its copy, for nodes that form one group.

    group: the nodes, largest first.
    """
    ranks = [rank for node in group for rank in node]
    shift = len(group[0]) if group else 0
    if 2 * shift <= len(ranks):
        return {rank: ranks[(place + shift) % len(ranks)] for place, rank in enumerate(ranks)}
    large, others = ranks[:shift], ranks[shift:]
    found = {rank: others[place % len(others)] for place, rank in enumerate(large)}
    return found | dict(zip(others, large, strict=False))
