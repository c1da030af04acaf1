"""The layers of the examples that change while they train: they move to another stage and back, and nothing is lost."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ds_dynatrain.adapters.model.module_state import state_of
from tests.engine import jobs
from tests.engine.pool import ROOT, RankPool

sys.path.append(str(ROOT / "examples"))
from dynamic.model import Sizes
from dynamic.runs import DYNAMISMS, change, gather, job, layers_of

CHANGES = {2: 0.5, 4: 1.0}
"""How far layers have come, by step."""
MOVES = {3: (0, 4, 6), 5: (0, 3, 6), 6: (0, 4, 6)}
"""The third block goes to the first stage, back, and there again; it has changed in the meantime."""
STEPS = 8


def trained(name: str, moves: bool) -> tuple[list[float], list[str], dict[int, str]]:
    """Losses, what was said of changes, and what layers keep besides parameters in the end."""
    losses, said = [], []
    watching = {"mode": "advise", "every_steps": 10**6}
    with job(DYNAMISMS[name], Sizes(blocks=4, width=32, heads=2), STEPS, watching) as engine:
        for step in range(STEPS):
            if step in CHANGES:
                said.append(change(engine, DYNAMISMS[name], CHANGES[step]))
            if moves and step in MOVES:
                engine.switch(boundaries=MOVES[step], at=step)
            losses.append(engine.train_batch().item())
            assert not moves or step not in MOVES or tuple(engine.module.parts) == MOVES[step], engine.last_switch
        kept = gather({number: kept_of(layer) for number, layer in layers_of(engine).items()})
    return losses, said, dict(sorted(kept.items()))


def kept_of(layer: Any) -> str:
    """Buffers and extra state, to be compared."""
    state = state_of(layer)
    return str([{name: held.double().round(decimals=3) for name, held in state["buffers"].items()}, state["extra"]])


@pytest.mark.full
@pytest.mark.parametrize("name", DYNAMISMS)
def test_layers_that_change_move_and_move_back(pool: RankPool, name: str) -> None:
    moved, stayed = (pool.run(trained, name=name, moves=moves, seconds=120) for moves in (True, False))
    losses, said, kept = moved[0]
    assert jobs.furthest(losses, stayed[0][0]) < 5e-7 and (said, kept) == stayed[0][1:]
    assert all(rank[1:] == (said, kept) for rank in moved)
    assert losses[-1] < losses[0]
    assert name == "freezing_by_gradient" or (all(said) and said[0] != said[1])
