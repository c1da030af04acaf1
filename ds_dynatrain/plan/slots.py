"""Slots: the assignment of members to the ranks (slots) of the new layout that moves the fewest bytes.

If the member at rank 0 stays, it keeps rank 0. All others get the slots in which they together keep the most bytes
(`matching`), counted in a sparse table (`kept_bytes`). On several nodes, the node of each slot is chosen first
(`placement`), because the bytes are moved only once, but the placement affects every later step. The result is the same
on every member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan.kept_bytes import Bools, KeptBytes, kept_bytes
from ds_dynatrain.plan.matching import match, most_kept
from ds_dynatrain.plan.placement import place_slots
from ds_dynatrain.plan.plan import plan_switch
from ds_dynatrain.space import ABSENT, Layout, VirtualParameterSpace
from ds_dynatrain.space.interval import Ints


@dataclass(frozen=True)
class Assignment:
    """The member at each rank of the target, and the bytes that this assignment moves.

    members: the member at each rank.
    bytes_moved: the bytes that the members receive.
    bytes_bound: a lower bound, proved by prices, for the bytes moved by any assignment in which the member at rank 0
        keeps that rank and each slot has its given node.
    rank_zero_bytes: how many more bytes are moved because the member at rank 0 keeps that rank.
    placement_bytes: how many more bytes are moved because of the rules for nodes (see `place_slots`).
    """

    members: tuple[int, ...]
    bytes_moved: int
    bytes_bound: int
    rank_zero_bytes: int
    placement_bytes: int = 0


def assign_slots(
    vps: VirtualParameterSpace,
    target_layout: Layout,
    candidates: Iterable[int],
    node_of: Mapping[int, str] | None = None,
    kinds: Iterable[str] | None = None,
) -> Assignment:
    """Return the assignment of members to the ranks (slots) of the target that moves the fewest bytes.

    candidates: the members that may get a slot, working or idle.
    node_of: the node of each candidate.
    kinds: the state kinds that move; None for all that the source holds.

    If the members are on several nodes, the rules of `place_slots` take precedence.

    If several members would move equally many bytes, slots go first to members that already work, then to those that
    make fewer bytes cross between nodes (see `_near_senders`), then to lower current ranks, then to nodes with more
    working members, and then to lower member numbers. Among the members that get a slot, those with lower current ranks
    get lower slots, such that the sum of the squared differences is small (see `match`); idle members get the remaining
    slots in order. The order of the arguments does not matter.

    Raises LayoutError if there are fewer candidates than slots.
    """
    node_of, members = node_of or {}, set(candidates)
    slots = target_layout.world_size
    if len(members) < slots:
        raise LayoutError(
            f"{target_layout} has {slots} ranks and only {len(members)} members may take one: {sorted(members)}; "
            f"choose a layout of at most {len(members)} ranks"
        )
    kept = kept_bytes(plan_switch(vps, target_layout, range(slots), kinds).sides)
    working = [member for member in vps.members if member in members]
    node = {member: node_of.get(member, "") for member in members}
    busy = Counter(node[member] for member in working)
    idle = sorted(members.difference(working), key=lambda member: (-busy[node[member]], node[member], member))
    number = {name: index for index, name in enumerate(dict.fromkeys(node[member] for member in working + idle))}
    capacity, has_first = Counter(node.values()), vps.members[0] in members
    takes_part = np.array([member in members for member in vps.members])
    rank_of, most, rank_zero_bytes = _ruled(kept, takes_part)
    free, table, everyone = kept.nbytes_of(rank_of), kept, [*vps.members, *idle]
    at_node = np.array([number[node[each]] if each in members else len(number) for each in everyone])
    zone_of_node = np.zeros(len(number) + 1, np.int64)
    if 1 < len(number) < len(members):
        sizes, counts = [capacity[name] for name in number], [busy[name] for name in number]
        of_rank = at_node[: len(vps.members)]
        zone_of_slot, zone_of_node[:-1] = place_slots(target_layout, sizes, counts, has_first, kept, of_rank)
        zone_of_node[-1] = len(number)
        table = kept.within(zone_of_node[of_rank], zone_of_slot)
        rank_of, most, rank_zero_bytes = _ruled(table, takes_part)
    may_move = np.append(takes_part, np.ones(len(idle), bool))
    may_move[0] &= not has_first
    at_slot = _near_senders(table, rank_of.copy(), at_node, zone_of_node[at_node], may_move)
    wanted, keeps = int(kept.wanted.sum()), kept.nbytes_of(rank_of)
    chosen = tuple(everyone[each] for each in at_slot.tolist())
    return Assignment(chosen, wanted - keeps, wanted - most, rank_zero_bytes, free - keeps)


def _near_senders(kept: KeptBytes, rank_of: Ints, node: Ints, zone: Ints, may_move: Bools) -> Ints:
    """Return the member at each slot such that nodes hold the most bytes of what their members receive.

    Members change places only if the bytes kept stay the same: idle ones of a zone, and ranks of a class that keep no
    more than their class does.

    rank_of: the rank at each slot, or ABSENT for an idle member of the slot's zone.
    node, zone, may_move: of each member; members are the source ranks, and after these the idle members.
    """
    slots, ranks, classes = np.arange(len(rank_of)), len(kept.ranks.of), len(kept.ranks.first)
    groups = np.append(kept.ranks.of, classes + zone[ranks:])
    slot_groups = np.where(rank_of == ABSENT, classes + kept.zones[1], kept.ranks.of[rank_of])
    nodes_of = np.bincount(np.unique(np.stack([groups, node])[:, may_move], axis=1)[0], minlength=slot_groups.max() + 1)
    keeps_more = np.isin(rank_of * len(slots) + slots, kept.rank * len(slots) + kept.slot)
    is_idle, has_choice = rank_of == ABSENT, nodes_of[slot_groups] > 1
    for group in np.unique(slot_groups[is_idle & ~has_choice]).tolist():
        places = np.flatnonzero(is_idle & (slot_groups == group))
        rank_of[places] = np.flatnonzero(may_move & (groups == group))[: len(places)]
    is_open = has_choice & (is_idle | (may_move[rank_of] & ~keeps_more))
    if not is_open.any():
        return rank_of
    may_move = may_move & ~np.isin(np.arange(len(node)), rank_of[~is_open])
    table = kept.by_node(node, is_open).within(groups, slot_groups)
    return np.where(is_open, match(table, may_move, is_open).rank_of, rank_of)


def _ruled(kept: KeptBytes, ranks: Bools) -> tuple[Ints, int, int]:
    """Assign source ranks to slots, such that rank 0 keeps its slot.

    Returns (rank at each slot, upper bound on the bytes kept under this rule, bytes that the rule costs).

    ranks: a mask of the source ranks that take part.
    """
    slots = np.ones(len(kept.wanted), bool)
    rank_of, most = _matched(kept, ranks, slots)
    if not ranks[0] or rank_of[0] == 0:
        return rank_of, most, 0
    free, only = kept.nbytes_of(rank_of), np.arange(len(slots)) == 0
    rank_of, most = _matched(kept, ranks & (np.arange(len(ranks)) > 0), ~only)
    rank_of[0] = 0
    most += kept.nbytes_of(np.where(only, 0, ABSENT))
    return rank_of, most, free - kept.nbytes_of(rank_of)


def _matched(kept: KeptBytes, ranks: Bools, slots: Bools) -> tuple[Ints, int]:
    """Match source ranks to slots. Return (rank at each slot, proved upper bound on the bytes kept)."""
    found = match(kept, ranks, slots)
    return found.rank_of, most_kept(kept, found.prices, ranks, slots)
