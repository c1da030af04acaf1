"""State kinds that only some optimizer groups have: who holds them, what moves, how much memory they take."""

from __future__ import annotations

import numpy as np
import pytest

from ds_dynatrain.adapters.zero.state import Memory, provide, reusable, zeros
from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import Kind, Layout, VirtualParameterSpace, standard_kinds
from tests.plan.simulate import play
from tests.plan.test_plan import RULES, TENSORS, WORLDS
from tests.sets import one_in
from tools.minimum import bytes_minimum

MOMENTS = (
    Kind("exp_avg", 4, groups=frozenset({1})),
    Kind("momentum_buffer", 2, groups=frozenset({0})),
    Kind("nowhere", 4, groups=frozenset()),
)


def space(layout: Layout, members: tuple[int, ...], weight: int) -> VirtualParameterSpace:
    return VirtualParameterSpace.of(TENSORS, RULES, standard_kinds(weight, moments=MOMENTS), layout, members)


@pytest.mark.parametrize("weight", [4, 2])
@pytest.mark.parametrize("source", one_in(2, WORLDS[::3]), ids=str)
def test_every_target(source: Layout, weight: int) -> None:
    vps = space(source, tuple(range(source.data)), weight)
    for number, target in enumerate(WORLDS):
        members = tuple(range(number % 3, number % 3 + target.data))
        plan = plan_switch(vps, target, members)
        assert play(plan) == bytes_minimum(vps, target, members)


@pytest.mark.parametrize("layout", WORLDS, ids=str)
def test_owners_tile_the_groups(layout: Layout) -> None:
    vps = space(layout, tuple(range(layout.data)), 2)
    for kind, groups in (("exp_avg", {1}), ("momentum_buffer", {0}), ("nowhere", set()), ("master", {0, 1})):
        owned: list[int] = []
        for rank in range(layout.data):
            for piece in vps.owned(layout, rank, kind):
                owned += range(piece.start, piece.stop)
        wanted = np.flatnonzero(np.isin(vps.line.groups_at(np.arange(len(vps.line))), list(groups))).tolist()
        assert sorted(owned) == wanted


@pytest.mark.parametrize("layout", WORLDS, ids=str)
def test_buffers(layout: Layout) -> None:
    import torch

    vps = space(layout, tuple(range(layout.data)), 2)
    found = vps.local(layout, 0).sizes()
    for rank in range(layout.data):
        for kind in vps.present_kinds():
            pieces = vps.holding(layout, rank, kind)
            for piece in pieces:
                assert piece.offset + piece.stop - piece.start <= found[kind, piece.buffer]
    assert not [kind for kind, _ in found if kind == "nowhere"]
    assert {name for kind, name in found if kind == "exp_avg"} < {name for kind, name in found if kind == "master"}
    types = {4: torch.float32, 2: torch.bfloat16}
    memory = {kind.name: Memory(types[kind.itemsize]) for kind in vps.kinds}
    live = provide(vps.local(layout, 0), memory, set(), {}, zeros)
    assert set(live) == set(found)
    assert reusable(vps, 0, layout, 0, live, memory) == set(found)
