"""Engines in every layout send to receivers that cut tensors in 1, 2 and 3, and live through switches and deaths."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from tests.engine import subjects
from tests.engine.pool import CaseFailed, RankPool
from tests.engine.transitions import layout
from tests.weights import cases, fakes, sending
from tests.weights.test_group import equal, updates

WALKS = {
    "module": "d4z3 > d2z1 > d3z2 > d4z0",
    "AutoTP": "d2t2z1 > d4z3 > t4z0 > d2t2z3",
    "PipelineModule": "p2d2z1 > d4z1 > p4z0",
    "AutoEP": "d4e2z1 > d4e4z3 > d2z0",
}
FEW = "module", "AutoTP"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in WALKS])
def test_receivers_hold_the_weights_before_and_after_switches(pool: RankPool, name: str) -> None:
    path = [layout(short) for short in WALKS[name].split(" > ")]
    find = subjects.SUBJECTS[name]
    model = find().build().named_parameters() if name in FEW else ()  # others are built where there is a world
    cuts = {key: number % 2 for number, key in enumerate(key for key, each in model if each.dim() > 1)}
    with ExitStack() as stack:
        all_rollouts = [stack.enter_context(fakes.rollouts(size, cuts, 30)) for size in (1, 2, 3)]
        addresses = [each.address for each in all_rollouts]
        found = pool.run(sending.on_a_walk, find=find, path=path, addresses=addresses, seconds=240)[0]
        for rollouts in all_rollouts:
            rollouts.wait(len(path))
    assert len(found) == len(path)
    for place, (records, wanted) in enumerate(found):
        for rollouts, update in zip(all_rollouts, records, strict=True):
            assert cases.differing(rollouts.whole(place), wanted) == [], f"{path[place]} to {len(rollouts.receivers)}"
            own = sum(each.nbytes for weights in rollouts.weights for each in weights[place].values())
            assert update.nbytes == own
            assert update.version == rollouts.updates[place].version == place + 1
            assert update.digests == rollouts.updates[place].digests
            assert update.collectives == 2


def test_deltas_at_a_small_learning_rate(pool: RankPool) -> None:
    find = partial(subjects.language_model, "llama of 4 kv")
    with fakes.rollouts(2, {}) as rollouts:
        address = rollouts.address
        found = pool.run(sending.with_deltas, find=find, layout=layout("d4z3"), address=address, steps=4, rate=3e-6)[0]
        rollouts.wait(4)
    assert [each.is_delta for each in found] == [False, True, True, True]
    assert all(each.nbytes <= 0.05 * found[0].nbytes for each in found[1:]), [each.nbytes for each in found]


def test_a_trainer_that_dies_in_the_middle(pool: RankPool) -> None:
    with fakes.rollouts(2) as rollouts:
        with pytest.raises(CaseFailed):
            pool.run(sending.killed_in_the_middle, address=rollouts.address, rank=2, may_die=[2])
        assert [each.version for each in rollouts.updates] == [1]
        pool.run(updates, address=rollouts.address, steps=[3, 4])
        rollouts.wait(3)
        assert [each.version for each in rollouts.updates] == [1, 3, 4]
        for number, step in enumerate([1, 3, 4]):
            assert equal(rollouts.whole(number), fakes.values(step))
