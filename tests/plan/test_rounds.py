"""Rounds: each pair meets once, nobody waits for ever, and pairs that can work at the same time do."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.plan import rounds

Pair = tuple[int, int]


def lists(pairs: Iterable[Pair], nodes: Mapping[int, str]) -> dict[int, list[int]]:
    """The order of each member."""
    peers: defaultdict[int, set[int]] = defaultdict(set)
    for a, b in pairs:
        peers[a].add(b)
        peers[b].add(a)
    return {member: rounds(sorted(others, reverse=True), member, nodes) for member, others in peers.items()}


def steps(order: dict[int, list[int]], windows: Mapping[int, int]) -> list[set[Pair]]:
    """The pairs that exchange in each step. A member begins as many as its window has and finishes them in order."""
    left, found = {member: [*peers] for member, peers in order.items()}, list[set[Pair]]()
    while any(left.values()):
        begun = {(a, b) for a, peers in left.items() for b in peers[: windows.get(a, 1)]}
        ready = {(a, b) for a, b in begun if a < b and (b, a) in begun and (left[a][0] == b or left[b][0] == a)}
        assert ready, f"nobody can go on: {left}"
        for a, b in ready:
            left[a].remove(b)
            left[b].remove(a)
        found.append(ready)
    return found


members = st.integers(0, 40)
graphs = st.sets(st.tuples(members, members).filter(lambda pair: pair[0] < pair[1]), max_size=120)


@given(graphs, st.dictionaries(members, st.sampled_from("abc")), st.dictionaries(members, st.integers(1, 4)))
def test_no_graph_deadlocks(pairs: set[Pair], nodes: dict[int, str], windows: dict[int, int]) -> None:
    """Each pair meets once, with any nodes and any window of at least one exchange."""
    found = steps(lists(pairs, nodes), windows)
    assert sorted(itertools.chain.from_iterable(found)) == sorted(pairs)


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_all_with_all_take_the_fewest_rounds(size: int) -> None:
    found = steps(lists(itertools.combinations(range(size), 2), {}), {})
    assert [len(pairs) for pairs in found] == [size // 2] * (size - 1)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12, 23])
def test_other_numbers_of_members_take_less_than_twice_as_many(size: int) -> None:
    assert len(steps(lists(itertools.combinations(range(size), 2), {}), {})) < 2 * size


def test_neighbors_do_not_wait_for_a_whole_chain() -> None:
    assert len(steps(lists(itertools.pairwise(range(1000)), {}), {})) == 2


def test_pairs_between_nodes_come_first_and_use_every_card() -> None:
    nodes = {member: f"node-{member // 8}" for member in range(32)}
    found = steps(lists(itertools.combinations(range(32), 2), nodes), {})
    assert len(found) == 31
    for number, pairs in enumerate(found):
        between = [pair for pair in pairs if nodes[pair[0]] != nodes[pair[1]]]
        assert len(between) == (16 if number < 24 else 0)  # all members at once


def test_a_member_of_many_looks_at_its_peers_alone() -> None:
    nodes = {member: f"node-{member // 8}" for member in range(16_384)}
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        assert len(rounds(range(0, 16_384, 128), 5, nodes)) == 128
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.01
