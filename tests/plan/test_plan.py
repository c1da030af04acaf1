"""Plans carried out element by element: complete, once each, equal at both ends, and with the fewest bytes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import LayoutError, SwitchRefused
from ds_dynatrain.plan import bytes_sent, estimate, plan_switch, traffic
from ds_dynatrain.space import FROZEN, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from tests.plan.simulate import each, lacking_bytes, play, stays
from tests.sets import examples, one_in
from tests.space.models import layouts, space, tensor_lists, weight_sizes, zero_rules
from tools.minimum import bytes_minimum

TENSORS = [
    LogicalTensor("a", (7, 5)),
    LogicalTensor("b", (7,)),
    LogicalTensor("c", (3, 7)),
    LogicalTensor("d", (3,), 1),
    LogicalTensor("e", (4, 3), 1),
    LogicalTensor("f", (5,), FROZEN),
    LogicalTensor("g", (3, 3), FROZEN),
]
RULES = ZeroRules(sub_group_size=12)
WORLDS = [Layout(zero_stage=stage, data=data) for stage in range(4) for data in range(1, 5)]


def kinds_of(source: Layout, target: Layout, moments: bool = True) -> tuple[str, ...]:
    stale = ("stale_grad",) if source.zero_stage == target.zero_stage == 3 else ()
    return ("weight", "master", *(("exp_avg", "exp_avg_sq") if moments else ()), *stale)


def check(
    vps: VirtualParameterSpace, target: Layout, members: tuple[int, ...], kinds: tuple[str, ...], weight: int
) -> None:
    plan = plan_switch(vps, target, members, kinds)
    crossed = play(plan)
    least = sum(
        lacking_bytes(
            list(vps.tensors),
            vps.rules,
            (vps.layout, vps.members.index(member) if member in vps.members else None),
            (target, rank),
            weight,
            kinds,
        )
        for rank, member in enumerate(members)
    )
    assert crossed == least == bytes_minimum(vps, target, members, kinds)


@pytest.mark.parametrize("weight", [4, 2])
@pytest.mark.parametrize("source", one_in(3, WORLDS), ids=str)
def test_every_pair_of_stages_and_worlds(source: Layout, weight: int) -> None:
    vps = space(TENSORS, RULES, source, tuple(range(10, 10 + source.data)), weight)
    for number, target in enumerate(WORLDS):
        shift = number % 3
        members = tuple(range(10 + shift, 10 + shift + target.data))
        check(vps, target, members, kinds_of(source, target, moments=number % 5 > 0), weight)


@settings(deadline=None, max_examples=examples(120))
@given(tensor_lists(), zero_rules, layouts, layouts, weight_sizes, st.permutations(range(6)))
def test_any_model_rules_and_members(
    tensors: list[LogicalTensor],
    rules: ZeroRules,
    source: Layout,
    target: Layout,
    weight: int,
    order: list[int],
) -> None:
    vps = space(tensors, rules, source, tuple(range(source.data)), weight)
    check(vps, target, tuple(order[: target.data]), kinds_of(source, target), weight)


def test_the_same_layout_moves_nothing() -> None:
    for layout in WORLDS:
        vps = space(TENSORS, RULES, layout, tuple(range(layout.data)))
        plan = plan_switch(vps, layout, vps.members)
        assert bytes_sent(plan) == 0
        for member in plan.members:
            part = plan.for_member(member)
            assert part.rounds == () and len(part.derived) == 0
            assert all(map(stays, each(part.local)))


def test_a_member_on_one_side_only() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=1, data=2), (0, 1))
    plan = plan_switch(vps, Layout(zero_stage=1, data=2), (0, 7))
    leaver, joiner, stranger = (plan.for_member(member) for member in (1, 7, 99))
    assert plan.members == (0, 1, 7)
    sent, received = (
        {part: sum(getattr(exchange, side).nbytes for exchange in part.rounds) for part in (leaver, joiner)}
        for side in ("sends", "receives")
    )
    assert sent[leaver] > 0 == len(leaver.local) == received[leaver]
    assert sent[joiner] == 0 == len(joiner.local) < received[joiner]
    assert stranger.rounds == () and len(stranger.local) == 0


def test_replicas_share_the_sending() -> None:
    for stage in (0, 1, 2):
        tensors = [LogicalTensor("a", (1000,)), LogicalTensor("b", (24,))]
        vps = space(tensors, RULES, Layout(zero_stage=stage, data=4), (0, 1, 2, 3))
        plan = plan_switch(vps, Layout(zero_stage=stage, data=6), (0, 1, 2, 3, 4, 5), ("weight",))
        sent = [traffic(plan)[member][0] for member in vps.members]
        assert max(sent) - min(sent) <= 4 and sum(sent) == 2 * 1024 * 2


def test_a_kind_that_nobody_holds_is_refused() -> None:
    vps = space(TENSORS, RULES, Layout(zero_stage=1, data=2), (0, 1))
    with pytest.raises(SwitchRefused, match="stale_grad is needed under data=2 zero_stage=3"):
        plan_switch(vps, Layout(zero_stage=3, data=2), (0, 1), ("master", "stale_grad"))
    assert plan_switch(vps, Layout(zero_stage=3, data=2), (0, 1)).kinds == ("weight", "master", "exp_avg", "exp_avg_sq")
    with pytest.raises(LayoutError, match="3 ranks and 2 members"):
        plan_switch(vps, Layout(zero_stage=3, data=3), (0, 1))
    with pytest.raises(LayoutError, match="named twice"):
        plan_switch(vps, Layout(zero_stage=3, data=2), (0, 1), ("master", "master"))


def test_a_plan_goes_on_from_the_side_that_another_ends_on() -> None:
    layout = Layout(zero_stage=1, data=1)
    vps = VirtualParameterSpace.of(TENSORS, RULES, standard_kinds(2), layout, (3,))
    plan = plan_switch(vps, Layout(zero_stage=2, data=2), (3, 4))
    assert plan.target_members == (3, 4)
    assert plan_switch(vps.with_layout(plan.sides.layout, plan.target_members), layout, (3,)).target_members == (3,)


def test_the_cost_counts_both_sides_and_the_budget() -> None:
    vps = space([LogicalTensor("a", (1000,))], ZeroRules(), Layout(zero_stage=1, data=1), (0,))
    cost = estimate(plan_switch(vps, Layout(zero_stage=1, data=2), (0, 1)), budget_bytes=100, bytes_per_second=1000.0)
    assert cost.bytes_sent == 500 * 12 + 500 * 2
    assert cost.peak_bytes == {0: 14_000 + 2_000 + 6_000 + 100, 1: 2_000 + 6_000 + 100}
    assert cost.highest_peak_bytes == 22_100 and cost.seconds == 7.0


def test_the_cost_counts_last_gradients_that_only_the_target_has() -> None:
    tensors = [LogicalTensor("a", (1000,))]
    kinds = standard_kinds(2, stale_grad=2)
    source, target = Layout(zero_stage=1, data=2), Layout(zero_stage=3, data=2)
    vps = VirtualParameterSpace.of(tensors, ZeroRules(), kinds, source, (0, 1))
    plan = plan_switch(vps, target, (0, 1), ("weight", "master", "exp_avg", "exp_avg_sq"))
    cost = estimate(plan, budget_bytes=0, bytes_per_second=1.0)
    assert cost.highest_peak_bytes == (2_000 + 6_000) + (1_000 + 6_000) + 1_000


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), [((3, 512), (3, 384)), ((3, 384), (3, 512)), ((1, 512), (3, 512))])
def test_one_rank_of_a_large_world_plans_quickly(source: tuple[int, int], target: tuple[int, int]) -> None:
    tensors = [LogicalTensor(f"t{i}", (1000 + i, 1000) if i % 2 else (1000 + i,)) for i in range(1000)]
    before, after = (Layout(zero_stage=stage, data=data) for stage, data in (source, target))
    # Processor time: it is about work, whatever else the machine does.
    seconds = []
    for _ in range(3):
        vps = space(tensors, ZeroRules(), before, tuple(range(before.data)))
        begun = time.process_time()
        plan_switch(vps, after, tuple(range(after.data)), kinds_of(before, after)).for_member(200)
        seconds.append(time.process_time() - begun)
    assert min(seconds) < 0.2
