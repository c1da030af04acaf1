"""What members say of a group, and which groups have to be built anew."""

from __future__ import annotations

import itertools
from functools import reduce
from typing import Any

import pytest

from ds_dynatrain.adapters.groups.traffic import Said, Traffic, joined, unfit

PAIR = 2
CALLS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "a collective": (("allreduce",), ("allreduce",)),
    "a message": (("send", [], 1, 0), ("recv", [], 0, 0)),
    "another message": (("recv", [], 1, 0), ("send", [], 0, 0)),
}
"""What each of two ranks calls."""


def begin(traffic: Traffic, name: str, *arguments: Any) -> bool:
    return traffic.begin(name, arguments)


def said_by(members: list[Traffic], is_lost: bool = True, size: int = PAIR) -> Said:
    """All that they say of one group."""
    for each in members:
        if is_lost:
            each.close()
    return reduce(joined, [{"group": each.said(size, is_lost)} for each in members])


@pytest.mark.parametrize("calls", [[], *itertools.permutations(CALLS, 1), *itertools.permutations(CALLS, 2)])
def test_a_group_stays_whose_members_have_ended_the_same(calls: tuple[str, ...]) -> None:
    members = [Traffic(0), Traffic(1)]
    for rank, traffic in enumerate(members):
        for call in calls:
            begin(traffic, *CALLS[call][rank])
            traffic.end()
    assert unfit(said_by(members)) == []


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("done", [(1, 0), (0, 1)])
def test_one_member_alone_has_begun(call: str, done: tuple[int, int]) -> None:
    """Ended or not: a message of it may be on its way. A planned change is at a boundary, where nothing is."""
    for ends in (True, False):
        members = [Traffic(0), Traffic(1)]
        for rank in range(PAIR):
            if done[rank]:
                begin(members[rank], *CALLS[call][rank])
                if ends:
                    members[rank].end()
        assert unfit(said_by(members, is_lost=False)) == []
        assert unfit(said_by(members)) == ["group"]


def test_both_have_begun_and_one_has_not_seen_the_end() -> None:
    members = [Traffic(0), Traffic(1)]
    for each in members:
        begin(each, "allreduce")
    members[0].end()
    assert not members[1].is_at_rest and unfit(said_by(members)) == ["group"]


def test_what_has_failed_is_built_anew_in_any_case() -> None:
    members = [Traffic(0), Traffic(1)]
    members[1].fail()
    assert unfit(said_by(members, is_lost=False)) == ["group"]


def test_a_message_from_nobody_knows_whom() -> None:
    members = [Traffic(0), Traffic(1)]
    begin(members[0], "recv_anysource", [], 0)
    members[0].end()
    begin(members[1], "send", [], 0, 0)
    members[1].end()
    assert unfit(said_by(members)) == ["group"]


def test_not_all_members_have_the_group() -> None:
    assert unfit(said_by([Traffic(0)])) == ["group"]
    assert unfit(said_by([Traffic(0)], is_lost=False)) == ["group"]


def test_some_do_not_know_yet_that_the_world_is_lost() -> None:
    """They train on, so what they say is not the last word."""
    one, other = Traffic(0), Traffic(1)
    one.close()
    found = joined({"group": one.said(PAIR, True)}, {"group": other.said(PAIR, False)})
    assert unfit(found) == ["group"]


def test_a_group_whose_members_have_not_heard_beside_one_whose_members_have() -> None:
    lost, other = [Traffic(0), Traffic(1)], [Traffic(0), Traffic(1)]
    found = joined(said_by(lost), {"other": said_by(other, is_lost=False)["group"]})
    assert unfit(found) == ["other"]


def test_nothing_is_begun_in_a_group_that_is_closed() -> None:
    traffic = Traffic(0)
    assert traffic.close() and not begin(traffic, "allreduce") and traffic.is_at_rest
    traffic.is_closed = False
    assert begin(traffic, "allreduce") and not traffic.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_joined_in_any_order(size: int) -> None:
    members = [Traffic(rank) for rank in range(size)]
    for sender, receiver in itertools.permutations(range(size), 2):
        begin(members[sender], "send", [], receiver, 0)
        begin(members[receiver], "recv", [], sender, 0)
    for each in members:
        begin(each, "barrier")
        for _ in range(2 * (size - 1) + 1):
            each.end()
        each.close()
    parts = [{"group": each.said(size, True)} for each in members]
    every = [reduce(joined, order) for order in itertools.permutations(parts)]
    right = [joined(parts[0], reduce(joined, parts[1:]))]
    assert all(found == every[0] for found in every + right) and unfit(every[0]) == []
