"""Who keeps whose copies."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.plan import buddies_of, wards_of


def check(nodes: list[str]) -> None:
    """Never itself, never its node if there are two; one copy of each rank; load as even as it can be."""
    buddies, ranks = buddies_of(nodes), range(len(nodes))
    assert len(buddies) == len(nodes)
    assert all(buddies[rank] != rank for rank in ranks)
    several = len(set(nodes)) > 1
    assert not several or all(nodes[buddies[rank]] != nodes[rank] for rank in ranks)
    assert sorted(ward for rank in ranks for ward in wards_of(buddies, rank)) == list(ranks)
    load = Counter(buddies)
    largest = max(Counter(nodes).values()) if several else 1
    others = len(nodes) - largest
    assert max(load.values()) == max(1, -(-largest // others))
    if 2 * largest <= len(nodes):
        assert all(load[rank] == 1 for rank in ranks), "each keeps one"
    else:
        small = [load[rank] for rank in ranks if Counter(nodes)[nodes[rank]] != largest]
        assert max(small) - min(small) <= 1


@pytest.mark.parametrize("count", range(2, 7))
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
        any({nodes[rank], nodes[buddy]} == {one, other} for rank, buddy in enumerate(buddies))
        for one, other in combinations(sorted(set(nodes)), 2)
    )
    assert lost == count // 2 + 2 * (count % 2)


def test_one_rank_has_nobody() -> None:
    assert buddies_of(["a"]) == ()
    assert wards_of((), 0) == ()
