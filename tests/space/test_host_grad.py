"""Gradients that CPU offload keeps lie where the masters do, in stages 1 to 3, and nowhere in stage 0."""

from __future__ import annotations

import numpy as np
import pytest

from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import (
    HOST_GRAD,
    MASTER,
    Layout,
    LogicalTensor,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
)
from tests.plan.simulate import each

TENSORS = [LogicalTensor("a", (7, 5), 0), LogicalTensor("b", (11,), 0), LogicalTensor("c", (3, 3), 1)]
LAYOUTS = [Layout(data=data, zero_stage=stage) for data in (1, 2, 3) for stage in range(4)]


def space(layout: Layout, **gradients: int) -> VirtualParameterSpace:
    kinds = standard_kinds(2, 4, ("exp_avg", "exp_avg_sq"), **gradients)
    return VirtualParameterSpace.of(TENSORS, ZeroRules(sub_group_size=20), kinds, layout, range(layout.data))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_beside_the_masters(layout: Layout) -> None:
    vps = space(layout, host_grad=4)
    assert vps.is_held(layout, HOST_GRAD) == (HOST_GRAD in vps.present_kinds()) == (layout.zero_stage > 0)
    assert HOST_GRAD not in space(layout).present_kinds()
    for rank in range(layout.data):
        held, masters = vps.holding(layout, rank, HOST_GRAD), vps.holding(layout, rank, MASTER)
        if layout.zero_stage == 0:
            assert not len(held)
            continue
        for part in ("start", "stop", "buffer", "offset"):
            assert np.array_equal(getattr(held, part), getattr(masters, part))


@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_moves_to_where_it_is_held_and_is_left_out_at_stage_0(target: Layout) -> None:
    vps = space(Layout(data=2, zero_stage=1), host_grad=4)
    plan = plan_switch(vps, target, tuple(range(target.data)), vps.present_kinds())
    moved = 0
    for member in plan.members:
        mine = plan.for_member(member)
        parts = [mine.local, *(exchange.receives for exchange in mine.rounds)]
        moved += sum(move.stop - move.start for moves in parts for move in each(moves) if move.kind == HOST_GRAD)
    assert moved == (sum(tensor.numel for tensor in TENSORS) if target.zero_stage else 0)
