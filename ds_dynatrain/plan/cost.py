"""Costs of a switch: bytes per member, peak memory, and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_dynatrain.plan.picture import held_bytes, memory_of, picture_of
from ds_dynatrain.plan.plan import SwitchPlan
from ds_dynatrain.space import ABSENT


@dataclass(frozen=True)
class Cost:
    """The cost of a switch, or of one member's part in it.

    bytes_sent: the total over all members.
    bytes_busiest: bytes in the busiest direction of the busiest member, for which all others wait.
    highest_peak_bytes: the bytes of a member's state before and after the switch plus its bytes in flight, on the
    member with the most.
    seconds: the time to transfer `bytes_busiest` at the given bandwidth.
    """

    bytes_sent: int = 0
    bytes_busiest: int = 0
    highest_peak_bytes: int = 0
    seconds: float = 0.0


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Return the estimated cost of a plan.

    budget_bytes: the maximum number of bytes in flight per member.
    bytes_per_second: the bandwidth of a member in each direction.
    """
    found = picture_of(plan)
    busiest = int(np.maximum(found.gives, found.takes).max(initial=0))
    peak = int(memory_of(plan, found, budget_bytes).sum(0).max(initial=0))
    return Cost(int(found.gives.sum()), busiest, peak, busiest / bytes_per_second)


def peak_bytes(plan: SwitchPlan, member: int, in_flight_bytes: int) -> int:
    """Return the bytes of a member's state before and after the switch plus its bytes in flight."""
    sides = plan.sides
    before = sides.vps.layout, sides.source_rank.get(member, ABSENT), plan.kinds
    after = sides.layout, sides.target_rank.get(member, ABSENT), plan.kinds_after
    held = (held_bytes(sides.vps, layout, kinds, rank) for layout, rank, kinds in (before, after) if rank != ABSENT)
    return in_flight_bytes + sum(int(each[0]) for each in held)
