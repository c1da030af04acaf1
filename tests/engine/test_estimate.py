"""What `engine.plan` says a switch costs, beside what it has cost."""

from __future__ import annotations

import pytest

from tests.engine import jobs
from tests.engine.pool import RankPool


def planned_case() -> list[float]:
    """(the time of the moves, what a plan of them says at the speed that was measured) on one of four members."""
    found, target = [0.0], {"data": 4, "zero_stage": 3}

    def each(made: jobs.Job) -> None:
        engine = made.engine
        if engine.global_steps == 1:
            cost = engine.plan(**target)
            assert not cost.refusal and cost.bytes_sent > 0
            found[0] = cost.seconds * cost.bytes_per_second  # of the busiest direction of the busiest member
            engine.switch(**target, at=2)
        if engine.global_steps == 3:
            found[:] = [1e-3 * engine.last_switch.phases_ms["move"], found[0] / engine.plan(data=2).bytes_per_second]

    with jobs.job(jobs.config(start=(4, 1))) as made:
        jobs.train(made, 3, each=each)
    return found


def test_a_plan_says_what_the_same_moves_took(pool: RankPool) -> None:
    for took, planned in pool.run(planned_case):
        assert planned == pytest.approx(took), "at the speed of the last switch"
