"""Four ranks that are told to be two nodes: what crosses goes on inside the other node, and the state is the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from ds_dynatrain.plan import MemberPlan, SwitchPlan, plan_switch
from ds_dynatrain.reshard import preparation
from tests.engine import jobs
from tests.engine.pool import RankPool

SCHEDULE: jobs.Schedule = {1: (4, 1), 2: (2, 3), 3: (4, 0)}
"""From one rank. All of the other node needs the weights, or at stage 0 also masters and moments."""
NODES = {member: "ab"[member // 2] for member in range(4)}


def walked(nodes: dict[int, str], late: bool) -> tuple[jobs.Record, list[dict[str, int]]]:
    """A job, and the bytes of this rank's part of each plan: over all exchanges, from other nodes, and relayed."""
    config, seen = jobs.config("bf16" if late else "fp32", start=(1, 1)), list[dict[str, int]]()
    config["dynatrain"]["late"] = late
    own = SwitchPlan.for_member

    def planned(*given: Any, **named: Any) -> SwitchPlan:
        return plan_switch(*given, **{**named, "nodes": nodes})

    def noted(self: SwitchPlan, member: int) -> MemberPlan:
        part = own(self, member)
        far = [each for each in part.exchanges if NODES[each.peer] != NODES[member]]
        seen.append(
            {
                "far": sum(each.receives.nbytes for each in far),
                "relayed": sum(each.sends.nbytes for each in part.relays),
            }
        )
        return part

    with patch.object(preparation, "plan_switch", planned), patch.object(SwitchPlan, "for_member", noted):
        return jobs.run(config, 5, {step: sizes for step, sizes in SCHEDULE.items() if sizes[1] or not late}), seen


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_switch_over_relays(pool: RankPool, late: bool) -> None:
    plain = pool.run(walked, nodes={}, late=late, seconds=120)
    relayed = pool.run(walked, nodes=NODES, late=late, seconds=120)
    assert jobs.global_losses([record for record, _ in relayed]) == jobs.global_losses([record for record, _ in plain])
    far, passed = (
        [sum(sum(each[key] for each in seen) for _, seen in ranks) for ranks in (plain, relayed)]
        for key in ("far", "relayed")
    )
    assert passed[0] == 0 < passed[1] and far[1] < far[0]
    events = [[each for each in ranks[0][0].events if each is not None] for ranks in (plain, relayed)]
    assert events[0]
    for one, other in zip(*events, strict=True):
        assert other.outcome == "committed" and other.bytes_sent == other.bytes_minimum == one.bytes_sent, other
        assert other.certificate == one.certificate
