"""An order of tensors in the flat buffers of ZeRO stages 1 and 2 that makes few elements move to another rank.

DeepSpeed cuts a flat buffer into equal parts. With one rank more or less, every border shifts, and most elements move
to another rank. Another order of the tensors avoids this: each remaining rank's tensors lie inside its new part, and
the tensors of other ranks fill the gaps. Borders then cut tensors that have to move anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from ds_dynatrain.plan.slots import Assignment, assign_slots
from ds_dynatrain.space import ABSENT, MASTER, Layout, VirtualParameterSpace, zero
from ds_dynatrain.space.interval import Ints


def nearest(
    vps: VirtualParameterSpace,
    target: Layout,
    candidates: Iterable[int],
    node_of: Mapping[int, str] | None = None,
) -> tuple[Layout, Assignment]:
    """Return the target layout with the order of tensors that moves fewer bytes, and the members at its ranks.

    The candidates are DeepSpeed's order and one that keeps tensors at their ranks (`_by_owners`). DeepSpeed's is used
    on a tie, in ZeRO stages that cannot have another order, and if pipe, expert or tensor axes partition the model. If
    only the members change, the current order is kept.
    """
    members, plain = sorted(candidates), target.replace(order=None)
    is_cut = vps.mesh(vps.layout) is not None or vps.mesh(plain) is not None
    orders: set[tuple[int, ...] | None] = {None}
    if plain == vps.layout.replace(order=None):
        orders = {vps.layout.order}
    elif vps.line.trainable_count and plain.zero_stage in vps.rules.ordered_stages and not is_cut:
        orders.add(_by_owners(vps, plain, members))
    found = [(each, assign_slots(vps, each, members, node_of)) for each in (plain.replace(order=o) for o in orders)]
    return min(found, key=lambda pair: (pair[1].bytes_moved, pair[0].order is not None))


def _by_owners(vps: VirtualParameterSpace, target: Layout, members: Collection[int]) -> tuple[int, ...] | None:
    """Return an order of tensors in which remaining members keep their ranks' tensors, lower ranks first.

    Returns None if this is the default order.
    """
    line, count = vps.line, vps.line.trainable_count
    begin, end = line.bases[:count], line.bases[1 : count + 1]
    row, low, high, rank = vps.sharding(vps.layout, MASTER).owners(begin, end)
    stay = [rank for rank, member in enumerate(vps.members) if member in members][: target.world_size]
    slot_of = np.full(vps.layout.world_size, ABSENT)
    slot_of[stay] = np.arange(len(stay))
    slots, by_share = np.full(count, ABSENT), np.lexsort((-rank, high - low, row))
    slots[row[by_share]] = slot_of[rank[by_share]]  # the last entry counts: the rank with the largest share
    found = list[int]()
    for group in np.unique(line.groups[:count]).tolist():
        tensors, _, _ = zero.flat_order(line, vps.rules, vps.layout, group)
        width = zero.partition_size(line, vps.rules, target, group)
        found += _arranged(tensors, line.numels, slots, width, target.world_size)
    found += np.flatnonzero(line.numels[:count] == 0).tolist()
    numbers = np.array(found)
    opens = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    runs = np.stack([numbers[opens], numbers[np.append(opens[1:], count) - 1] + 1], axis=1)
    return tuple(runs.ravel().tolist()) if len(runs) > 1 else None


def _arranged(tensors: Ints, numels: Ints, slots: Ints, width: int, ranks: int) -> list[int]:
    """Return an order of the tensors in which those of each slot lie within the slot's part as far as they fit.

    Tensors larger than a part stay at the nearer end of the buffer.

    numels: number of elements of each tensor.
    slots: the slot (rank of the target) of each tensor's owner, or ABSENT.
    width: number of elements in the part of a slot.
    ranks: the number of slots.
    """
    sizes = numels[tensors]
    wide, is_late = sizes > width, np.cumsum(sizes) - sizes // 2 > sizes.sum() // 2
    found: list[int] = tensors[wide & ~is_late].tolist()
    last: list[int] = tensors[wide & is_late].tolist()
    at = int(numels[found].sum())
    borders = np.clip(np.arange(ranks + 1) * width, at, int(sizes.sum() - numels[last].sum())).tolist()
    own: list[list[int]] = [[] for _ in range(ranks)]
    filled, spare = [0] * ranks, list[tuple[int, int]]()
    for tensor in tensors[~wide].tolist():
        slot, size = int(slots[tensor]), int(numels[tensor])
        if slot == ABSENT or filled[slot] + size > borders[slot + 1] - borders[slot]:
            spare.append((size, tensor))
        else:
            own[slot].append(tensor)
            filled[slot] += size
    spare.sort()
    for slot in range(ranks):
        begin, latest = borders[slot], borders[slot + 1] - filled[slot]
        while at < begin and spare:
            fitting = bisect_right(spare, latest - at, key=lambda each: each[0])
            if not fitting and at + spare[0][0] - latest > begin - at:  # stopping short is better than going too far
                break
            size, tensor = spare.pop(max(0, fitting - 1))
            found.append(tensor)
            at += size
        found += own[slot]
        at += filled[slot]
    return found + [tensor for _, tensor in spare] + last
