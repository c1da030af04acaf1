"""Slots: the assignment of members to the ranks (slots) of the new world that moves the fewest bytes.

If the member at rank 0 stays, it keeps rank 0. All others come to the slots in which they keep the most bytes together
(`matching`), counted in a sparse table (`kept_bytes`). The result is the same on every member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.kept_bytes import KeptBytes, kept_bytes
from ds_dynatrain.plan.matching import Bools, match, most_kept
from ds_dynatrain.plan.plan import plan_switch
from ds_dynatrain.space import ABSENT, Layout, VirtualParameterSpace
from ds_dynatrain.space.interval import Ints


@dataclass(frozen=True)
class Assignment:
    """Who gets which rank of the target, and how many bytes that moves.

    members: the member at each rank.
    bytes_moved: bytes that the members receive.
    bytes_bound: the fewest bytes that any assignment with the same member at rank 0 moves, as proved by prices.
    rank_zero_bytes: how many more bytes are moved because the member at rank 0 keeps it.
    """

    members: tuple[int, ...]
    bytes_moved: int
    bytes_bound: int
    rank_zero_bytes: int


def assign_slots(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    candidates: Iterable[int],
    node_of: Mapping[int, str] | None = None,
    kinds: Iterable[str] | None = None,
) -> Assignment:
    """Return the assignment of members to the ranks (slots) of the target that moves the fewest bytes.

    candidates: the members that may take a slot, working or idle.
    node_of: the node of each candidate.
    kinds: the state kinds that move; None for all that the source holds.

    Ties in bytes moved are broken by: already working; lower current rank; node with more working members; lower member
    number. Among the members that take part, those with lower current ranks get lower slots, such that the sum of the
    squared differences is small (see `match`); idle members get the remaining slots in order. Neither the order of
    `candidates` nor that of `node_of` plays a part. Raises LayoutError if there are fewer candidates than slots.
    """
    node_of, members = node_of or {}, set(candidates)
    slots = target_layout.world_size
    if len(members) < slots:
        raise LayoutError(
            f"{target_layout} has {slots} ranks and only {len(members)} members may take one: {sorted(members)}; "
            f"choose a layout of at most {len(members)} ranks"
        )
    kept = kept_bytes(plan_switch(vps, target_layout, range(slots), kinds).sides)
    working = np.array([member in members for member in vps.members])
    rank_of, most = _matched(kept, working, np.ones(slots, bool))
    rank_zero_bytes = 0
    if working[0] and rank_of[0] != 0:
        free = kept.nbytes_of(rank_of)
        others, rest = working & (np.arange(len(working)) > 0), np.arange(slots) > 0
        rank_of, most = _matched(kept, others, rest)
        rank_of[0] = 0
        most += kept.nbytes_of(rank_of[:1])
        rank_zero_bytes = free - kept.nbytes_of(rank_of)
    wanted = int(kept.wanted.sum())
    busy = Counter(node_of.get(vps.members[rank], "") for rank in np.flatnonzero(working).tolist())
    idle = sorted(
        members.difference(vps.members), key=lambda each: (-busy[node_of.get(each, "")], node_of.get(each, ""), each)
    )
    waiting = iter(idle)
    chosen = tuple(next(waiting) if rank == ABSENT else vps.members[rank] for rank in rank_of.tolist())
    return Assignment(chosen, wanted - kept.nbytes_of(rank_of), wanted - most, rank_zero_bytes)


def _matched(kept: KeptBytes, ranks: Bools, slots: Bools) -> tuple[Ints, int]:
    """Return the source rank at each slot, and the most bytes that any matching keeps, as proved by prices."""
    found = match(kept, ranks, slots)
    return found.rank_of, most_kept(kept, found.prices, ranks, slots)
