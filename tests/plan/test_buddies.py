"""Who keeps whose copies."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.buddies.assignment import buddies_of, memory_of_copies, wards_of
from ds_dynatrain.plan import is_copied, outlives_a_node
from ds_dynatrain.space import WEIGHT, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from ds_dynatrain.space.tensor import FROZEN


def check(nodes: list[str]) -> None:
    """Never itself, never its node if there are two; one copy of each rank; load as even as it can be."""
    buddies, ranks = [buddy for (buddy,) in buddies_of(nodes)], range(len(nodes))
    assert len(buddies) == len(nodes)
    assert all(buddies[rank] != rank for rank in ranks)
    several = len(set(nodes)) > 1
    assert not several or all(nodes[buddies[rank]] != nodes[rank] for rank in ranks)
    assert sorted(ward for rank in ranks for ward in wards_of(buddies_of(nodes), rank)) == list(ranks)
    load = Counter(buddies)
    largest = max(Counter(nodes).values()) if several else 1
    others = len(nodes) - largest
    assert max(load.values()) == max(1, -(-largest // others))
    if 2 * largest <= len(nodes):
        assert all(load[rank] == 1 for rank in ranks), "each keeps one"
    else:
        small = [load[rank] for rank in ranks if Counter(nodes)[nodes[rank]] != largest]
        assert max(small) - min(small) <= 1


@pytest.mark.parametrize("count", [*range(2, 6), pytest.param(6, marks=pytest.mark.full)])
def test_every_way_to_put_so_many_ranks_on_nodes(count: int) -> None:
    for nodes in product("abcdef"[:count], repeat=count):
        check(list(nodes))


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=64))
def test_any_nodes(nodes: list[str]) -> None:
    check(nodes)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=16))
def test_uneven_nodes(sizes: list[int]) -> None:
    check([str(number) for number, size in enumerate(sizes) for _ in range(size)])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 16])
def test_pairs_lose_state_in_the_fewest_double_deaths(count: int) -> None:
    """Of equal nodes; the odd one makes a group of three of the last pair."""
    nodes = [str(number) for number in range(count) for _ in range(2)]
    buddies = buddies_of(nodes)
    lost = sum(
        any({nodes[rank], nodes[buddy]} == {one, other} for rank, (buddy,) in enumerate(buddies))
        for one, other in combinations(sorted(set(nodes)), 2)
    )
    assert lost == count // 2 + 2 * (count % 2)


def test_one_rank_has_nobody() -> None:
    assert buddies_of(["a"]) == ()
    assert wards_of((), 0) == ()


# ---- several copies --------------------------------------------------------------------------------------------------


def check_several(nodes: list[str], copies: int) -> None:
    """Each has so many different ones or all others, on nodes of others as long as there are ranks on these."""
    buddies, ranks = buddies_of(nodes, copies), range(len(nodes))
    names = nodes if len(set(nodes)) > 1 else [str(rank) for rank in ranks]
    assert [each[:1] for each in buddies] == list(buddies_of(nodes))
    for rank in ranks:
        assert len({*buddies[rank]} - {rank}) == len(buddies[rank]) == min(copies, len(nodes) - 1)
        elsewhere = sum(name != names[rank] for name in names)
        assert sum(names[buddy] != names[rank] for buddy in buddies[rank]) == min(len(buddies[rank]), elsewhere)
    load = [len(wards_of(buddies, rank)) for rank in ranks]
    assert sum(load) == len(nodes) * min(copies, len(nodes) - 1)
    sizes = Counter(names).values()
    if len(set(sizes)) == 1 and copies < len(sizes):
        assert set(load) == {copies}, "each keeps as many"
    elif 2 * max(sizes) <= len(nodes):
        assert max(load) <= 2 * copies


@pytest.mark.parametrize("count", range(2, 6))
@pytest.mark.parametrize("copies", [2, 3])
def test_several_copies_on_every_way_to_put_so_many_ranks_on_nodes(count: int, copies: int) -> None:
    for nodes in product("abcdef"[:count], repeat=count):
        check_several(list(nodes), copies)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=32), st.integers(2, 5))
def test_several_copies_on_any_nodes(nodes: list[str], copies: int) -> None:
    check_several(nodes, copies)


@pytest.mark.parametrize("count", [3, 4, 7, 8])
@pytest.mark.parametrize("copies", [2, 3])
def test_as_many_nodes_may_die_as_there_are_copies(count: int, copies: int) -> None:
    """Of equal ones, if there are more nodes than copies: somebody lives who has the state of each rank."""
    nodes = [str(number) for number in range(count) for _ in range(2)]
    buddies = buddies_of(nodes, copies)
    for dead in combinations(sorted(set(nodes)), min(copies, count - 1)):
        assert all({nodes[each] for each in (rank, *buddies[rank])} - {*dead} for rank in range(len(nodes)))


# ---- what is copied --------------------------------------------------------------------------------------------------


def space(layout: Layout) -> VirtualParameterSpace:
    """Two groups and a frozen tensor, in bf16 with Adam and the gradients that stage 3 and offload keep."""
    tensors = [LogicalTensor("a", (7, 3), 0), LogicalTensor("b", (5,), 1), LogicalTensor("f", (4, 2), FROZEN)]
    kinds = standard_kinds(2, stale_grad=4, host_grad=4)
    return VirtualParameterSpace.of(tensors, ZeroRules(), kinds, layout, range(layout.world_size))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("data", [1, 2, 3, 4])
def test_every_element_with_one_holder_is_in_a_copy(stage: int, data: int) -> None:
    """By counting who holds each element: of trained weights alone there may be none, which are cast from masters."""
    layout = Layout(data=data, zero_stage=stage)
    vps = space(layout)
    for kind in vps.present_kinds():
        holders, held = Counter[int](), set()
        for rank in range(data):
            for piece in vps.holding(layout, rank, kind):
                holders.update(range(piece.start, piece.stop))
                if is_copied(vps, layout, kind, piece.buffer):
                    held |= {*range(piece.start, piece.stop)}
        alone = {element for element, count in holders.items() if count == 1}
        trained = {*range(int(vps.bases[2]))} if kind == WEIGHT else set()
        assert alone - trained <= held, f"{kind}: some have one holder and no copy"
        assert held <= alone, f"{kind}: some are copied that others have"


def test_memory_of_copies() -> None:
    """Of stage 1 on two ranks: 13 masters with two moments and the gradient of offload, own and ward's, twice."""
    layout = Layout(data=2, zero_stage=1)
    vps, parts = space(layout), [0, 0]
    for rank in range(2):
        sizes = vps.local(layout, rank).sizes()
        parts[rank] = 4 * sum(numel for (kind, _), numel in sizes.items() if kind != WEIGHT)
    assert memory_of_copies(vps, layout, ["a", "b"]) == (2 * sum(parts), 2 * sum(parts))
    wide = Layout(data=3, zero_stage=1)
    one, two, three = (memory_of_copies(space(wide), wide, "abc", copies) for copies in (1, 2, 3))
    assert len(set(two)) == 1 and two == three and sum(two) * 2 == sum(one) * 3
    alone = Layout(data=1, zero_stage=1)
    assert memory_of_copies(space(alone), alone, ["a"]) == (0,)


def test_a_node_may_hold_what_many_ranks_hold() -> None:
    """Two ranks of one stage on one node spare each other, and not their node; so it is with one process a node."""
    layout = Layout(data=2, pipe=2, zero_stage=0)
    assert not outlives_a_node(layout, "aabb") and outlives_a_node(layout, "abab") and outlives_a_node(layout, "abcd")
    assert outlives_a_node(layout, "aaaa"), "on a single node each process counts as a node"
    assert outlives_a_node(Layout(data=2, zero_stage=0), "ab")
    assert not outlives_a_node(Layout(data=2, zero_stage=1), "ab")
