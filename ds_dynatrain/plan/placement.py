"""The node of each slot (rank of the target). It determines the speed of communication in every later step, and not
only that of the switch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array

from ds_dynatrain.plan.kept_bytes import Classes, KeptBytes
from ds_dynatrain.plan.matching import match
from ds_dynatrain.space import Layout
from ds_dynatrain.space.interval import Ints


def place_slots(
    layout: Layout,
    capacity: Sequence[int],
    working: Sequence[int],
    has_first: bool,
    kept: KeptBytes,
    node_of_rank: Ints,
) -> tuple[Ints, Ints]:
    """Return the zone of each slot, and the zone of each node. Members may only get slots in their node's zone.

    A zone is one node, or several nodes if a group of slots has these nodes for itself. If there are no groups, all
    nodes in use are one zone.

    The rules, the most important first:
    1. A tensor group lies inside a node if all groups fit this way, and one of them begins with the first slot.
    2. A sequence group, and an expert group, lies on the fewest nodes. Both are consecutive slots, like tensor groups.
    3. As few nodes as possible are used, so that leaving members free whole nodes. Nodes with working members come
    first, and larger nodes come before smaller ones.
    4. Members keep the most bytes. For this, nodes of equal size exchange their parts of the slots.

    Slots are assigned to nodes group by group. A group takes the largest nodes that are left, and for its remainder the
    smallest node that suffices. A node takes slots in whole units; the unit is the largest group size at which all
    groups fit inside nodes.

    capacity: how many members of each node may get a slot; nodes are in the order of their lowest ranks.
    working: how many members of each node work.
    has_first: whether the first slot must lie on the first node.
    kept: the bytes that source ranks keep in slots.
    node_of_rank: the node of each source rank, or the number of nodes for a rank that gets no slot.
    """
    slots, sizes = layout.world_size, np.array(capacity, np.int64)
    unit, group = _sizes(layout, sizes, int(sizes[0]) if has_first else layout.world_size)
    order = sorted(
        range(len(sizes)), key=lambda node: (not has_first or node > 0, working[node] == 0, -sizes[node], node)
    )
    room: dict[int, int] = {}
    for node in order:
        if sum(room.values()) < slots:
            room[node] = int(sizes[node]) // unit * unit
    if group == unit or ({*room.values()} == {sizes[0]} and group % sizes[0] == 0):
        node_of_slot = np.repeat(list(room), list(room.values()))[:slots]
    else:
        node_of_slot = np.empty(slots, np.int64)
        for start in range(0, slots, group):
            taken = _taken(room, group, 0 if has_first and start == 0 else None)
            node_of_slot[start : start + group] = np.repeat(list(taken), list(taken.values()))
            for node, count in taken.items():
                room[node] -= count
    found = _exchanged(node_of_slot, sizes, has_first, kept, node_of_rank)
    if group == 1:
        return np.zeros_like(found), 1 - np.isin(np.arange(len(sizes)), found)
    zone = np.arange(len(sizes))
    if unit == 1:
        nodes_of = [np.unique(row) for row in found.reshape(-1, group)]
        users = np.bincount(np.concatenate(nodes_of), minlength=len(zone))
        for nodes in nodes_of:
            if (users[nodes] == 1).all():  # no other group uses any of these nodes
                zone[nodes] = nodes[0]
    return zone[found], zone


def _sizes(layout: Layout, capacity: Ints, most: int) -> tuple[int, int]:
    """Return (how many slots a node takes at once, how many slots are assigned together). Both are sizes of groups.

    capacity: how many members of each node may get a slot.
    most: the upper limit of the first number.
    """
    found = [1]
    for size in sorted({layout.tensor, layout.tensor * layout.sequence, layout.expert}):
        if size % found[-1] == 0:
            found.append(size)
    unit = max(size for size in found if size <= most and (capacity // size * size).sum() >= layout.world_size)
    return unit, max(found)


def _taken(room: dict[int, int], count: int, first: int | None) -> dict[int, int]:
    """Return a map from node to the number of a group's slots that it takes. As few nodes as possible are used.

    room: the free slots of each node.
    count: the number of slots in the group.
    first: a node that must take the first slot, or None.
    """
    taken: dict[int, int] = {}
    # the sort is stable, so nodes stay in the order of preference
    nodes = sorted(room, key=lambda node: (node != first, -room[node]))
    for node in nodes:
        if room[node] >= count and node != first:
            node = min((each for each in nodes if room[each] >= count and each not in taken), key=room.__getitem__)
        taken[node] = min(count, room[node])
        count -= taken[node]
        if not count:
            break
    return taken


def _exchanged(node_of_slot: Ints, capacity: Ints, has_first: bool, kept: KeptBytes, node_of_rank: Ints) -> Ints:
    """Exchange slots between nodes of equal capacity such that members keep the most bytes; return the node of each
    slot.
    """
    nodes = len(capacity)
    rank_node = node_of_rank[kept.rank]
    some = rank_node < nodes
    # for each node and part: the bytes that the node's best rank keeps in a slot, summed over the part's slots
    key, at = np.unique(rank_node[some] * len(node_of_slot) + kept.slot[some], return_inverse=True)
    most = np.zeros(len(key), np.int64)
    np.maximum.at(most, at, kept.nbytes[some])
    node, slot = np.divmod(key, len(node_of_slot))
    pair, at = np.unique(node * nodes + node_of_slot[slot], return_inverse=True)
    nbytes = np.zeros(len(pair), np.int64)
    np.add.at(nbytes, at, most)
    node, part = np.divmod(pair, nodes)
    one = Classes(np.zeros(nodes, np.int64), np.zeros(1, np.int64))
    zone = np.unique(capacity, return_inverse=True)[1]
    if has_first:
        zone[0] = zone.max() + 1
    nothing = csr_array((1, 1), dtype=np.int64)
    table = KeptBytes(one, one, nothing, node, part, nbytes, np.zeros(nodes, np.int64), (zone, zone))
    parts = np.isin(np.arange(nodes), node_of_slot)
    found = match(table.within(zone, zone), np.ones(nodes, bool), parts)
    return found.rank_of[node_of_slot]
