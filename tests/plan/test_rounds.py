"""Rounds for 1 to 64 members: each pair meets once, and nobody waits for ever."""

from __future__ import annotations

import itertools

import pytest

from ds_dynatrain.plan import rounds

SIZES = range(1, 65)


@pytest.mark.parametrize("size", SIZES)
def test_each_pair_meets_exactly_once(size: int) -> None:
    members = [3 * member + 1 for member in range(size)]
    schedule = {member: rounds(reversed(members), member) for member in members}
    assert {len(peers) for peers in schedule.values()} == {size - 1 + size % 2}
    for member, peers in schedule.items():
        assert sorted(peer for peer in peers if peer is not None) == [other for other in members if other != member]
        for number, peer in enumerate(peers):
            assert peer is None or schedule[peer][number] == member


@pytest.mark.parametrize("size", SIZES)
def test_meetings_one_after_another_never_deadlock(size: int) -> None:
    """A member waits at its next meeting until the peer is there; meetings without bytes are left out at both ends."""
    idle = {pair for pair in itertools.combinations(range(size), 2) if sum(pair) % 3 == 0}
    waiting = {
        member: [
            peer
            for peer in rounds(range(size), member)
            if peer is not None and tuple(sorted((member, peer))) not in idle
        ]
        for member in range(size)
    }
    while any(waiting.values()):
        ready = [(a, peers[0]) for a, peers in waiting.items() if peers and waiting[peers[0]][:1] == [a]]
        assert ready, f"nobody can go on: {waiting}"
        for a, b in ready:
            if waiting[a][:1] == [b]:
                waiting[a].pop(0)
                waiting[b].pop(0)


def test_a_stranger_has_no_rounds() -> None:
    with pytest.raises(ValueError, match="member 5"):
        rounds([1, 2], 5)
