"""Weights by a source, in every layout: equal to the oracle, in few collectives, with little memory."""

from __future__ import annotations

import pytest

from tests.engine import subjects
from tests.engine.pool import RankPool
from tests.engine.transitions import layout
from tests.weights import cases

WALKS = {
    "module": "d2z1 > d4z3 > d3z2 > d2z0",
    "AutoTP": "d2t2z1 > t4z3 > d2t2z3 > d4z2 > t2z0",
    "AutoEP": "d4e2z1 > d4e4z3 > d2z0 > d4e4z2",
    "deepspeed.moe": "d4e2z1 > d2z0 > d4e4z2",
    "PipelineModule": "p2d2z1 > p4z0 > d4z1 > p2z1",
}
FEW = "module", "AutoTP"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in WALKS])
def test_equal_to_the_oracle_before_and_after_switches(pool: RankPool, name: str) -> None:
    path = [layout(short) for short in WALKS[name].split(" > ")]
    found = pool.run(cases.at_each_full, find=subjects.SUBJECTS[name], path=path, seconds=240)
    for rank, places in enumerate(found):
        for place in places or ():
            assert place["wrong"] == [], f"rank {rank}"
            assert place["collectives"] <= place["layers"] + 2
