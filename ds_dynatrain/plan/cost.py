"""Costs of a switch: bytes per member, peak memory, and time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from ds_dynatrain.plan.picture import peaks, picture_of
from ds_dynatrain.plan.plan import SwitchPlan
from ds_dynatrain.space import ABSENT, Layout, VirtualParameterSpace


@dataclass(frozen=True)
class Cost:
    """The cost of a switch, or of one member's part in it.

    bytes_sent: the total over all members.
    bytes_busiest: bytes in the busiest direction of the busiest member, for which all others wait.
    highest_peak_bytes: the largest of `peak_bytes`.
    peak_bytes: for each member, the bytes of its state before and after the switch plus its bytes in flight.
    seconds: the time to transfer `bytes_busiest` at the given bandwidth.
    """

    bytes_sent: int = 0
    bytes_busiest: int = 0
    highest_peak_bytes: int = 0
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Return the estimated cost of a plan.

    budget_bytes: the maximum number of bytes in flight per member.
    bytes_per_second: the bandwidth of a member in each direction.
    """
    found = picture_of(plan)
    peak, busiest = peaks(plan, found, budget_bytes), int(np.maximum(found.gives, found.takes).max(initial=0))
    by_member = dict(zip(plan.members, peak.tolist(), strict=True))
    return Cost(int(found.gives.sum()), busiest, int(peak.max(initial=0)), by_member, busiest / bytes_per_second)


def peak_bytes(plan: SwitchPlan, member: int, in_flight_bytes: int) -> int:
    """Return the bytes of a member's state before and after the switch plus its bytes in flight."""
    sides = plan.sides
    source = state_bytes(sides.vps, sides.vps.layout, sides.source_rank.get(member, ABSENT), plan.kinds)
    target = state_bytes(sides.vps, sides.layout, sides.target_rank.get(member, ABSENT), plan.kinds_after)
    return source + target + in_flight_bytes


def state_bytes(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: Collection[str]) -> int:
    """Return the bytes of the given state kinds on a rank (0 if ABSENT), without padding.

    A weight and its master are counted once if they share a buffer (stages 0 and 3 in fp32).
    """
    if rank == ABSENT:
        return 0
    total = 0
    for name in kinds:
        kind = vps.kind(name)
        pieces = vps.holding(layout, rank, name)
        if kind.derived_from in kind.sources and kind.derived_from in kinds and layout.zero_stage in (0, 3):
            shared = vps.holding(layout, rank, str(kind.derived_from))
            pieces = pieces.subtract(shared.start, shared.stop)
        total += pieces.numel * kind.itemsize
    return total
