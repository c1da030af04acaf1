"""The executor over an in-memory transport: real plans, small budgets, shared memory, missing members."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.plan import Exchange, MemberPlan, Moves, SwitchPlan, bytes_sent, plan_switch, sides
from ds_dynatrain.space import BufferId, Kind, Layout
from ds_dynatrain.transfer import Buffers, ReadyPlan, TransferStats, Transport, execute
from ds_dynatrain.transfer.stream import messages
from tests.transfer.hub import Hub, all_at_once
from tests.transfer.states import buffers_of, differences, logical_state, space

BUFFER = BufferId("group", 0)
KINDS = (Kind("master", 4), Kind("weight", 2, (), "master"))
SMALL_BUDGET = 64 * 1024


def moves_of(*runs: tuple[int, int, int], source: int = 0, target: int = 0, kind: int = 0, origin: int = 0) -> Moves:
    """Moves (length, source offset, target offset) in one buffer per kind."""
    length, read, written = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    stop = np.array(list(accumulate(length.tolist())), dtype=np.int64)
    same = np.zeros_like(length)
    steps = {"step": same, "source_step": same, "target_step": same}
    return Moves(
        kind=same + kind,
        start=stop - length,
        length=length,
        number=same + 1,
        source=same + source,
        target=same + target,
        source_kind=same + origin,
        source_buffer=same,
        source_offset=read,
        target_buffer=same,
        target_offset=written,
        kinds=KINDS,
        source_buffers=(BUFFER,),
        target_buffers=(BUFFER,),
        **steps,
    )


def local_plan(moves: Moves, derived: Moves | None = None) -> MemberPlan:
    return MemberPlan(0, moves, moves_of() if derived is None else derived, ())


def executed(
    plan: MemberPlan, source: Buffers, target: Buffers, transport: Transport, seconds: float, budget: int
) -> TransferStats:
    return execute(ReadyPlan.of(plan, budget), source, target, transport, seconds)


def run_all(
    plan: SwitchPlan, sources: dict[int, Buffers], targets: dict[int, Buffers], budget: int
) -> dict[int, TransferStats]:
    """Every member of a plan in a thread of its own."""
    hub, stats = Hub(), dict[int, TransferStats]()

    def member(number: int) -> None:
        mine, ends = plan.for_member(number), (sources[number], targets[number])
        stats[number] = executed(mine, *ends, hub.transport(number), 30, budget)

    all_at_once(plan.members, member)
    assert sum(hub.sizes) == bytes_sent(plan)
    return stats


def test_a_transport_is_what_the_executor_takes() -> None:
    transport: Transport = Hub().transport(0)
    assert transport is not None


CHANGES = [
    (1, (0, 1), 1, (0, 1, 2, 3)),
    (1, (0, 1, 2, 3), 1, (0, 2)),
    (3, (0, 1, 2), 1, (0, 1, 2, 3)),
    (2, (0, 1, 2, 3), 3, (2, 0, 1)),
    (0, (0,), 3, (0, 1, 2)),
    (3, (0, 1), 0, (2, 3)),
    (3, (0, 1, 2, 3), 3, (3, 2, 1, 0)),
]


@pytest.mark.parametrize("budget", [SMALL_BUDGET, 1 << 30])
@pytest.mark.parametrize("weight", [2, 4])
@pytest.mark.parametrize(("stage", "members", "next_stage", "next_members"), CHANGES)
def test_real_plans_arrive_bit_for_bit(
    stage: int, members: tuple[int, ...], next_stage: int, next_members: tuple[int, ...], weight: int, budget: int
) -> None:
    layout, target = Layout(zero_stage=stage, data=len(members)), Layout(zero_stage=next_stage, data=len(next_members))
    check(layout, members, target, next_members, weight, budget)


@pytest.mark.parametrize("budget", [SMALL_BUDGET, 1 << 30])
@pytest.mark.parametrize("weight", [2, 4])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(zero_stage=1, tensor=4), Layout(zero_stage=1, tensor=2, data=2)),
        (Layout(zero_stage=3, tensor=2), Layout(zero_stage=1, tensor=3)),
        (Layout(zero_stage=1, data=2, tensor=2), Layout(zero_stage=3, data=2, tensor=2)),
        (Layout(zero_stage=2, data=3), Layout(zero_stage=0, tensor=4)),
    ],
    ids=str,
)
def test_blocks_arrive_bit_for_bit(source: Layout, target: Layout, weight: int, budget: int) -> None:
    members = tuple(range(source.world_size)), tuple(reversed(range(target.world_size)))
    check(source, members[0], target, members[1], weight, budget)


RELAYED = [
    (Layout(zero_stage=1, data=1), Layout(zero_stage=1, data=6)),
    (Layout(zero_stage=3, data=2), Layout(zero_stage=0, data=5)),
    (Layout(zero_stage=1, data=2, tensor=2), Layout(zero_stage=2, data=3, tensor=2)),
    (Layout(zero_stage=0, tensor=3), Layout(zero_stage=0, data=4)),
]


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(RELAYED), st.lists(st.sampled_from("ab"), min_size=6, max_size=6), st.integers(0, 3))
def test_relays_arrive_bit_for_bit(change: tuple[Layout, Layout], names: list[str], seed: int) -> None:
    """Masters too where all ranks hold them; any nodes, parts of any size, and members in any order."""
    source, target = change
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "SMALLEST_SHARE", 2000)
        members = tuple(random.Random(seed).sample(range(6), target.world_size))
        budget = (SMALL_BUDGET, 1 << 30)[seed % 2]
        nodes = dict(enumerate(names))
        check(source, tuple(range(source.world_size)), target, members, 2 + seed // 2 * 2, budget, nodes)


def check(
    layout: Layout,
    members: tuple[int, ...],
    target: Layout,
    next_members: tuple[int, ...],
    weight: int,
    budget: int,
    nodes: dict[int, str] | None = None,
) -> None:
    """Every element arrives, padding and sources stay as they are, and staging keeps to the budget."""
    vps = space(layout, members, weight)
    state, plan = logical_state(vps), plan_switch(vps, target, next_members, nodes=nodes or {})
    sources: dict[int, Buffers] = {member: {} for member in plan.members}
    targets: dict[int, Buffers] = {member: {} for member in plan.members}
    sources |= {member: buffers_of(vps, layout, rank, state) for rank, member in enumerate(members)}
    targets |= {member: buffers_of(vps, target, rank, None) for rank, member in enumerate(next_members)}
    stats = run_all(plan, sources, targets, budget)
    for rank, member in enumerate(members):
        assert differences(vps, layout, rank, state, sources[member]) == []
    for rank, member in enumerate(next_members):
        assert differences(vps, target, rank, state, targets[member]) == []
    for member, done in stats.items():
        mine = plan.for_member(member)
        assert done.bytes_sent == sum(exchange.sends.nbytes for exchange in mine.exchanges)
        assert done.bytes_local + done.bytes_in_place == mine.local.nbytes
        assert done.staging_peak <= budget


def test_in_place_is_not_touched_and_counted() -> None:
    values = torch.arange(10.0)
    stats = executed(
        local_plan(moves_of((10, 0, 0))), {("master", BUFFER): values}, {("master", BUFFER): values}, *NOBODY
    )
    assert (stats.bytes_in_place, stats.bytes_local) == (40, 0)
    assert values.tolist() == list(range(10))


NOBODY = (Hub().transport(0), 5.0, 1 << 20)


@pytest.mark.parametrize("shift", [1, 7])
def test_a_shift_within_one_storage_is_refused(shift: int) -> None:
    values = torch.arange(20.0)
    source, target = {("master", BUFFER): values}, {("master", BUFFER): values[shift:]}
    with pytest.raises(TransferError, match="memory of their own"):
        executed(local_plan(moves_of((10, 0, 0))), source, target, *NOBODY)
    assert values.tolist() == list(range(20))


def test_overwriting_what_is_kept_or_sent_is_refused() -> None:
    values = torch.arange(20.0)
    buffers = {("master", BUFFER): values}
    with pytest.raises(TransferError, match="memory of their own"):
        executed(local_plan(moves_of((5, 0, 0), (5, 10, 4))), buffers, buffers, *NOBODY)
    exchange = Exchange(1, moves_of((5, 0, 0), target=1), moves_of((5, 0, 4), source=1))
    with pytest.raises(TransferError, match="memory of their own"):
        executed(MemberPlan(0, moves_of(), moves_of(), (exchange,)), buffers, buffers, *NOBODY)


def test_derived_moves_cast_last() -> None:
    masters = torch.randn(100)
    target = {("master", BUFFER): torch.zeros(100), ("weight", BUFFER): torch.zeros(100, dtype=torch.bfloat16)}
    derived = moves_of((60, 40, 40), (40, 0, 0), kind=1, origin=0)
    stats = executed(local_plan(moves_of((100, 0, 0)), derived), {("master", BUFFER): masters}, target, *NOBODY)
    assert torch.equal(target["weight", BUFFER], masters.to(torch.bfloat16))
    assert (stats.bytes_local, stats.bytes_in_place) == (400, 0)


@pytest.mark.parametrize(("read", "written"), [(3, 5), (5, 3), (-4, 5), (5, -4), (-3, -5)])
def test_derived_moves_at_equal_steps(read: int, written: int) -> None:
    """Runs of three elements, as a cut dim leaves them; a run of another length and one at another step among them."""
    masters, weights = torch.randn(120), torch.zeros(120, dtype=torch.bfloat16)
    begins = [(60 + read * number, 60 + written * number) for number in range(9)]
    runs = [(3, *pair) for pair in begins] + [(2, 100, 110), (3, 20, 1), (3, 40, 116)]
    target = {("master", BUFFER): torch.zeros(120), ("weight", BUFFER): weights[1:]}
    expected = target["weight", BUFFER].clone()
    for length, source, into in runs:
        expected[into : into + length] = masters[source : source + length].to(torch.bfloat16)
    derived = moves_of(*runs, kind=1, origin=0)
    executed(local_plan(moves_of((120, 0, 0)), derived), {("master", BUFFER): masters}, target, *NOBODY)
    assert torch.equal(target["weight", BUFFER], expected)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ({}, "source buffer .* of master: the plan needs it"),
        ({("master", BUFFER): torch.zeros(9)}, "leave a buffer of 36 bytes"),
        ({("master", BUFFER): torch.zeros(10, dtype=torch.float64)}, "the kind has 4"),
        ({("master", BUFFER): torch.zeros(2, 5)}, "1-D and contiguous"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(source: Buffers, match: str) -> None:
    with pytest.raises(TransferError, match=match):
        executed(local_plan(moves_of((10, 0, 0))), source, {("master", BUFFER): torch.zeros(10)}, *NOBODY)


def test_a_small_budget_is_refused() -> None:
    with pytest.raises(TransferError, match="below the least"):
        executed(local_plan(moves_of()), {}, {}, Hub().transport(0), 1.0, 1000)


@pytest.mark.parametrize("sends", [True, False])
def test_a_peer_that_never_answers_is_named_in_time(in_time: Callable[[float, float], None], sends: bool) -> None:
    some, none = moves_of((10, 0, 0)), moves_of()
    exchange = Exchange(7, some if sends else none, none if sends else some)
    source, target = {("master", BUFFER): torch.zeros(10)}, {("master", BUFFER): torch.zeros(10)}
    begin = time.monotonic()
    with pytest.raises(MemberMissing) as caught:
        executed(MemberPlan(0, none, none, (exchange,)), source, target, Hub().transport(0), 0.2, 1 << 20)
    assert caught.value.members == (7,)
    in_time(time.monotonic() - begin, 1.0)


@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), max_size=20),
    chunk=st.integers(100, 200),
    longest=st.integers(200, 400),
)
def test_messages_cover_every_byte_once_in_order(rows: list[tuple[int, int]], chunk: int, longest: int) -> None:
    found = messages([length for length, _ in rows], [number for _, number in rows], chunk, longest)
    seen: dict[int, list[tuple[int, int]]] = {}
    for parts in found:
        nbytes = sum(part.nbytes for part in parts)
        assert 0 < nbytes <= (longest if len(parts) == parts[0].number == 1 else chunk)
        for part in parts:
            for row in range(part.first, part.first + part.number):
                seen.setdefault(part.move, []).extend((row, at) for at in range(part.start, part.stop))
    every = [[(row, at) for row in range(number) for at in range(length)] for length, number in rows]
    assert seen == {move: expected for move, expected in enumerate(every) if expected}


def test_messages_of_large_moves_are_direct() -> None:
    found = messages([10, 1 << 20, 20, 3 << 20], [1] * 4, 4 << 20, 2 << 20)
    assert [([part.move for part in parts], sum(part.nbytes for part in parts)) for parts in found] == [
        ([1], 1 << 20),
        ([3], 2 << 20),
        ([3], 1 << 20),
        ([0, 2], 30),
    ]
