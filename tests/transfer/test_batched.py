"""Moves in batches, over a link in memory: real plans, small bundles, some of the members, members that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.plan import Exchange, MemberPlan, SwitchPlan, plan_switch
from ds_dynatrain.space import Layout
from ds_dynatrain.transfer import Batching, Buffers, DeviceLink, ReadyPlan, TransferStats, execute
from ds_dynatrain.transfer.batched import READY, bundled
from ds_dynatrain.transfer.series import Matrix
from ds_dynatrain.transfer.stream import Parcel
from tests.transfer.hub import Hub, all_at_once
from tests.transfer.states import buffers_of, differences, logical_state, space
from tests.transfer.test_executor import BUFFER, CHANGES, moves_of
from tools.minimum import bytes_sent

SECONDS = 30.0
HOST = 1 << 20
"""Budget of those without batches."""


@dataclass
class HubLink:
    """A device's library in memory: a batch ends when each of its messages has met its other half."""

    hub: Hub
    me: int
    batches: list[int] = field(default_factory=list)

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        transport, under_way = self.hub.transport(self.me), []
        self.batches.append(sum(tensor.numel() for tensor, _ in sends))
        for begin, messages in ((transport.send, sends), (transport.receive, receives)):
            under_way += [begin(tensor, member, 0) for tensor, member in messages]
        for each in under_way:
            each.wait(time.monotonic() + SECONDS)

    def run(self, work: Callable[[], None], deadline: float, what: str, members: Sequence[int]) -> None:
        work()


def run_all(
    plan: SwitchPlan, sources: dict[int, Buffers], targets: dict[int, Buffers], far: Callable[[int], Batching]
) -> tuple[dict[int, TransferStats], Hub, dict[int, HubLink]]:
    """Every member of a plan in a thread of its own: what each has done, and what went over the host."""
    over, between, stats = Hub(), Hub(), dict[int, TransferStats]()
    links = {member: HubLink(between, member) for member in plan.members}

    def member(number: int) -> None:
        ready = ReadyPlan.of(plan.for_member(number), HOST, batching=far(number))
        ends = sources[number], targets[number]
        stats[number] = execute(ready, *ends, over.transport(number), SECONDS, links[number])

    all_at_once(plan.members, member)
    return stats, over, links


@pytest.mark.parametrize("kinds", [{"master", "weight", "exp_avg", "exp_avg_sq"}, {"master"}], ids=["all", "masters"])
@pytest.mark.parametrize("near", [set(), {0, 1}], ids=["nobody reads", "two read each other"])
@pytest.mark.parametrize("budget", [1 << 30, 900])
@pytest.mark.parametrize(("stage", "members", "next_stage", "next_members"), CHANGES)
def test_real_plans_arrive_bit_for_bit(
    stage: int,
    members: tuple[int, ...],
    next_stage: int,
    next_members: tuple[int, ...],
    budget: int,
    near: set[int],
    kinds: set[str],
) -> None:
    layout, target = Layout(zero_stage=stage, data=len(members)), Layout(zero_stage=next_stage, data=len(next_members))
    vps = space(layout, members, 2)
    state, plan = logical_state(vps), plan_switch(vps, target, next_members)
    sources: dict[int, Buffers] = {member: {} for member in plan.members}
    targets: dict[int, Buffers] = {member: {} for member in plan.members}
    sources |= {member: buffers_of(vps, layout, rank, state) for rank, member in enumerate(members)}
    targets |= {member: buffers_of(vps, target, rank, None) for rank, member in enumerate(next_members)}

    def far(member: int) -> Batching:
        others = frozenset(plan.members) - {member} - (near if member in near else set())
        return Batching(others, frozenset(kinds), len(plan.members) - 1, budget)

    stats, over, links = run_all(plan, sources, targets, far)
    for rank, member in enumerate(next_members):
        assert differences(vps, target, rank, state, targets[member]) == []
    batched = sum(sum(link.batches) for link in links.values())
    assert batched == sum(
        bytes_between(plan, number, near if number in near else set(), kinds) for number in plan.members
    )
    assert batched + sum(size for size in over.sizes if size > 1) == bytes_sent(plan)
    assert max(done.staging_peak for done in stats.values()) <= HOST + budget
    assert budget > 900 or max(max(link.batches, default=0) for link in links.values()) <= budget


def bytes_between(plan: SwitchPlan, member: int, near: set[int], kinds: set[str]) -> int:
    """What a member should send in batches."""
    is_there = np.array([kind.name in kinds for kind in plan.sides.kinds])
    moves = [each.sends for each in plan.for_member(member).rounds if each.peer not in near]
    return sum(each.select(np.flatnonzero(is_there[each.kind] & is_there[each.source_kind])).nbytes for each in moves)


@given(sizes=st.lists(st.integers(1, 100), max_size=30))
def test_bundles_are_full_and_in_order(sizes: list[int]) -> None:
    parcels = [Parcel(size, (Matrix(0, 0, 0, 1, size),)) for size in sizes]
    found = bundled(parcels, 100)
    assert [*chain.from_iterable(found)] == parcels
    totals = [sum(parcel.nbytes for parcel in bundle) for bundle in found]
    assert all(total <= 100 for total in totals)
    assert all(total + bundle[0].nbytes > 100 for total, bundle in zip(totals, found[1:], strict=False))


ONE_PEER = Batching(frozenset({7}), frozenset({"master"}), 1, HOST)


def ready(sends: bool) -> ReadyPlan:
    some, none = moves_of((10, 0, 0)), moves_of()
    exchange = Exchange(7, some if sends else none, none if sends else some)
    return ReadyPlan.of(MemberPlan(0, none, none, (exchange,)), HOST, batching=ONE_PEER)


@pytest.mark.parametrize("sends", [True, False])
def test_a_peer_that_does_not_come_is_named_before_anything_is_queued(
    in_time: Callable[[float, float], None], sends: bool
) -> None:
    source, target = {("master", BUFFER): torch.zeros(10)}, {("master", BUFFER): torch.zeros(10)}
    hub, begin = Hub(), time.monotonic()
    link = HubLink(hub, 0)
    with pytest.raises(MemberMissing) as caught:
        execute(ready(sends), source, target, Hub().transport(0), 0.2, link)
    assert caught.value.members == (7,) and not link.batches
    in_time(time.monotonic() - begin, 1.0)


def test_who_has_come_is_waited_for_by_the_link() -> None:
    """Its error comes through, and it was told who its peers are."""
    hub, source, target = Hub(), {("master", BUFFER): torch.zeros(10)}, {("master", BUFFER): torch.zeros(10)}
    peer = hub.transport(7)
    peer.receive(torch.zeros(1, dtype=torch.uint8), 0, READY)
    peer.send(torch.zeros(1, dtype=torch.uint8), 0, READY)

    class Lost(HubLink):
        def run(self, work: Callable[[], None], deadline: float, what: str, members: Sequence[int]) -> None:
            raise TransferError(f"{what}: {list(members)}")

    with pytest.raises(TransferError, match=r"1 batches between devices: \[7\]"):
        execute(ready(True), source, target, hub.transport(0), 1.0, Lost(Hub(), 0))


def test_a_plan_with_batches_needs_a_link() -> None:
    source, target = {("master", BUFFER): torch.zeros(10)}, {("master", BUFFER): torch.zeros(10)}
    with pytest.raises(TransferError, match=r"members \[7\] go by a link between devices, and there is none"):
        execute(ready(True), source, target, Hub().transport(0), 1.0)


def test_a_link_is_what_the_executor_takes() -> None:
    link: DeviceLink = HubLink(Hub(), 0)
    assert link is not None
