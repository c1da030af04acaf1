"""What a switch costs, before it is tried: peak memory of each member, and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from ds_dynatrain.plan.plan import SwitchPlan
from ds_dynatrain.space import ABSENT, HOST_GRAD, STALE_GRAD, Layout, VirtualParameterSpace


@dataclass(frozen=True)
class Cost:
    """An estimate. bytes_sent: over all members. peak_bytes: by member, state of both sides and the budget.

    seconds: of the busiest direction of the busiest member at the bandwidth given.
    """

    bytes_sent: int
    peak_bytes: dict[int, int]
    seconds: float

    @property
    def highest_peak_bytes(self) -> int:
        """Peak of the member with the most."""
        return max(self.peak_bytes.values(), default=0)


def estimate(plan: SwitchPlan, budget_bytes: int, bytes_per_second: float) -> Cost:
    """Cost with at most `budget_bytes` packed in flight on a member, over links of `bytes_per_second` each way."""
    sides = plan.sides
    fresh = {HOST_GRAD, STALE_GRAD} & set(sides.vps.present_kinds(sides.layout))  # made there, if none moves
    kinds = (*plan.kinds, *sorted(fresh - set(plan.kinds)))
    peak = {}
    for member in plan.members:
        busy = sum(plan.traffic[member])
        before = state_bytes(sides.vps, sides.vps.layout, sides.source_rank.get(member, ABSENT), plan.kinds)
        after = state_bytes(sides.vps, sides.layout, sides.target_rank.get(member, ABSENT), kinds)
        peak[member] = before + after + min(budget_bytes, busy)
    return Cost(plan.bytes_sent, peak, plan.bytes_busiest / bytes_per_second)


def state_bytes(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: tuple[str, ...]) -> int:
    """Bytes of the kinds on a rank (none if ABSENT), without padding.

    A weight that has the bytes of its master is counted once where both have the same buffer (stages 0 and 3 in fp32).
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
