"""The table of transitions: what it has to have in it, and every pair of it in living ranks."""

from __future__ import annotations

from itertools import chain, pairwise, product

import pytest

from tests.engine import axis_walks
from tests.engine.pool import RankPool
from tests.engine.subjects import SUBJECTS
from tests.engine.test_experts import UNALIGNED
from tests.engine.transitions import RANKS, TABLE, accepted, layout, pairs, path

MIXED = {
    "AutoTP": ("d2t2z3 > d4z1", "t4z1 > d2t2z1"),
    "PipelineModule": ("p2d2z1 > p4z1",),
    "AutoEP": ("d4e4z3 > d4e2z1", "d4e2z1 > d2e2t2z1"),
}
"""Changes of several axes at once that must be there."""


@pytest.mark.full
@pytest.mark.parametrize("kind", TABLE)
def test_walk(pool: RankPool, kind: str) -> None:
    axis_walks.compare(pool, SUBJECTS[kind], path(pairs(TABLE[kind].first)))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.not_on_device(UNALIGNED)) if kind == "AutoEP" else kind for kind in TABLE],
)
def test_all(pool: RankPool, kind: str) -> None:
    rows = TABLE[kind]
    walk = path(pairs(rows.first + rows.others))
    bitwise = axis_walks.compare(pool, SUBJECTS[kind], walk, seconds=600, steps=axis_walks.LONG_STEPS)
    print(f"{kind}: {bitwise} of {len(walk) - 1} continuations are bitwise those of a static run")


# ---- the table ------------------------------------------------------------------------------------------------------


def test_how_many() -> None:
    found = [(kind, pair) for kind, rows in TABLE.items() for pair in pairs(rows.first + rows.others)]
    assert len(found) == len(set(found)) >= 60
    assert {kind for kind, _ in found} == SUBJECTS.keys()
    assert all(source != target for _, (source, target) in found)


@pytest.mark.parametrize("kind", TABLE)
def test_what_the_rules_let_in_occurs(kind: str) -> None:
    """As the side of a pair, or with a reason among what is left out; and nothing else does."""
    rows = TABLE[kind]
    visited = set(chain.from_iterable(pairs(rows.first + rows.others)))
    left_out = set(map(layout, rows.left_out))
    assert visited | left_out == set(accepted(rows)) and not visited & left_out
    assert max(each.world_size for each in visited) == RANKS


@pytest.mark.parametrize("kind", TABLE)
def test_all_directions(kind: str) -> None:
    """Sizes go up and down, also those that keep the other axes, and every stage follows on every other."""
    rows = TABLE[kind]
    found = pairs(rows.first + rows.others)
    for axis in rows.axes:
        signs = {getattr(source, axis) < getattr(target, axis) for source, target in found}
        assert signs == {True, False}, axis
    stages = {each.zero_stage for each in accepted(rows)}
    assert {(source.zero_stage, target.zero_stage) for source, target in found} == set(product(stages, stages))
    assert set(pairs(MIXED.get(kind, ()))) <= set(found)


@pytest.mark.parametrize("kind", TABLE)
def test_a_path_takes_every_pair(kind: str) -> None:
    rows = TABLE[kind]
    for chosen in (rows.first, rows.first + rows.others):
        taken = pairs(chosen)
        hops = list(pairwise(path(taken)))
        assert set(taken) <= set(hops)
        assert len(hops) < len(taken) + len(chosen), "no more hops between than rows"
