"""Moments of whole tensors, as Muon keeps them in stages 1 and 2: plans played out, slots, and the verdict on them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.errors import CertificateError
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session
from ds_dynatrain.plan import plan_switch
from ds_dynatrain.reshard.certificate import SideDigests, agreed
from ds_dynatrain.space import Kind, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from tests.plan import test_axes
from tests.plan.dense import received
from tests.plan.simulate import coordinates, play
from tests.plan.test_plan import RULES, TENSORS, WORLDS
from tests.sets import examples, one_in
from tests.space.models import layouts, tensor_lists, weight_sizes, zero_rules
from tools.minimum import bytes_minimum

MOMENTUM = Kind("momentum_buffer", 2, groups=frozenset({0}), whole_tensors=True)
MOMENTS = (MOMENTUM, Kind("exp_avg", 4, groups=frozenset({1})))


def space(
    tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout, weight: int = 2, members: tuple[int, ...] = ()
) -> VirtualParameterSpace:
    kinds = standard_kinds(weight, moments=MOMENTS)
    return VirtualParameterSpace.of(tensors, rules, kinds, layout, members or tuple(range(layout.world_size)))


def momentum_bytes(vps: VirtualParameterSpace, source_rank: int | None, target: Layout, rank: int) -> int:
    """Least bytes of momentum that a member must receive, element by element."""
    had = set() if source_rank is None else coordinates(vps, vps.layout, source_rank, "momentum_buffer")
    return MOMENTUM.itemsize * len(coordinates(vps, target, rank, "momentum_buffer") - had)


def check(vps: VirtualParameterSpace, target: Layout, members: tuple[int, ...]) -> None:
    assert play(plan_switch(vps, target, members)) == bytes_minimum(vps, target, members)
    ranks = {member: rank for rank, member in enumerate(vps.members)}
    least = sum(momentum_bytes(vps, ranks.get(member), target, rank) for rank, member in enumerate(members))
    assert play(plan_switch(vps, target, members, ["momentum_buffer"])) == least


@pytest.mark.parametrize("source", one_in(3, WORLDS), ids=str)
def test_every_pair_of_stages_and_worlds(source: Layout) -> None:
    vps = space(TENSORS, RULES, source, members=tuple(range(10, 10 + source.data)))
    for number, target in enumerate(WORLDS):
        check(vps, target, tuple(range(10 + number % 3, 10 + number % 3 + target.data)))


@settings(deadline=None, max_examples=examples(100))
@given(tensor_lists(), zero_rules, layouts, layouts, weight_sizes, st.permutations(range(6)))
def test_any_model_rules_and_members(
    tensors: list[LogicalTensor], rules: ZeroRules, source: Layout, target: Layout, weight: int, order: list[int]
) -> None:
    vps = space(tensors, rules, source, weight)
    check(vps, target, tuple(order[: target.data]))
    costs = received(vps, target, range(source.data + 1), ["momentum_buffer"])
    ranks: list[int | None] = [*range(source.data), None]
    assert costs.tolist() == [
        [momentum_bytes(vps, rank, target, slot) for slot in range(target.data)] for rank in ranks
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_that_no_axis_cuts(stage: int) -> None:
    vps = VirtualParameterSpace.of(
        test_axes.TENSORS,
        ZeroRules(),
        standard_kinds(2, moments=[Kind("momentum_buffer", 2, groups=frozenset({0, 2}), whole_tensors=True)]),
        Layout(zero_stage=1, data=3),
        range(3),
    )
    target, members = Layout(zero_stage=stage, data=4), (1, 3, 0, 2)
    assert play(plan_switch(vps, target, members)) == bytes_minimum(vps, target, members)


# ---- the certificate -------------------------------------------------------------------------------------------------

MATRICES = [LogicalTensor("first", (3, 3)), LogicalTensor("second", (3, 3)), LogicalTensor("third", (2, 2))]
HELD = [(0,), (0, 1), (1, 2)]
"""Tensors of each of 3 ranks: parts of 8 elements."""


def held(vps: VirtualParameterSpace, change: tuple[int, int] | None = None) -> list[SideDigests]:
    found = []
    for rank, tensors in enumerate(HELD):
        mine = np.zeros(3, np.uint64)
        mine[list(tensors)] = np.array([11, 12, 13], np.uint64)[list(tensors)]
        if change is not None and change[0] == rank:
            mine[change[1]] += np.uint64(1)
        found.append(SideDigests({"momentum_buffer": mine}))
    return found


def judged(vps: VirtualParameterSpace, change: tuple[int, int] | None = None) -> list[int]:
    """What all members come to; CertificateError where they do."""
    found, store = held(vps, change), HashStore()

    def one(rank: int) -> Any:
        session = Session(Control(store, "job", vps.members[rank], 20.0), "it", vps.members, "doing it")
        return agreed(session, "one", vps, vps.layout, rank, found[rank], "source")["momentum_buffer"].tolist()

    with ThreadPoolExecutor(len(HELD)) as threads:
        numbers: list[int] = next(iter(threads.map(one, range(len(HELD)))))
    return numbers


def test_holders_of_a_tensor_agree_and_one_counts() -> None:
    vps = space(MATRICES, ZeroRules(), Layout(zero_stage=2, data=3), members=(5, 7, 9))
    assert [coordinates(vps, vps.layout, rank, "momentum_buffer") for rank in range(3)] == [
        set(range(9)),
        set(range(18)),
        set(range(9, 22)),
    ]
    assert judged(vps) == [11, 12, 13]
    assert judged(vps, (2, 2)) == [11, 12, 14]
    for change, pair in (((1, 0), "5 and 7"), ((2, 1), "7 and 9")):
        words = f"momentum_buffer of '{MATRICES[change[1]].name}' differs between the replicas of members {pair}"
        with pytest.raises(CertificateError, match=words):
            judged(vps, change)
