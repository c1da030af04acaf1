"""What members do together: threads in their place, one store; however a step ends, it ends alike on all."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.errors import (
    CheckpointDamaged,
    CheckpointError,
    MemberMissing,
    OutcomeUnknown,
    SwitchFailed,
    SwitchRefused,
)
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session, VoteResult, ask_for_different_things

MEMBERS = (2, 5, 7)


def together(work: Callable[[Session], Any], members: tuple[int, ...] = MEMBERS, seconds: float = 5.0) -> list[Any]:
    """What `work` returns or raises on each of `members`, which are some of MEMBERS."""
    store = HashStore()

    def one(member: int) -> Any:
        try:
            return work(Session(Control(store, "job", member, seconds), "it", MEMBERS, "doing it"))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(one, members))


def mine(session: Session) -> int:
    return session.board.member


def hear(session: Session) -> None:
    session.all("done", 1)


def alike(found: list[Any], kind: type[BaseException], *words: str) -> None:
    assert {(type(each), str(each)) for each in found} == {(kind, str(found[0]))}
    for word in words:
        assert word in str(found[0])


def ask(session: Session, asked: dict[str, int], refusal: tuple[str, str] | None = None) -> Any:
    return session.agree(asked, SwitchRefused, ask_for_different_things, refusal, {"by": "all"})


def test_equal_requests_are_agreed_to() -> None:
    assert together(lambda session: ask(session, {"step": 3})) == [{"by": "all"}] * 3


def test_another_request_is_refused_on_all() -> None:
    found = together(lambda session: ask(session, {"step": 3 + (mine(session) == 7)}))
    alike(found, SwitchRefused, "members 2 and 7", "{'step': 4}")


def test_a_refusal_is_that_of_all() -> None:
    refusals = {5: ("no memory", "buy some")}
    found = together(lambda session: ask(session, {"step": 3}, refusals.get(mine(session))))
    alike(found, SwitchRefused, "member 5: no memory; buy some")


def test_who_does_not_ask_is_named() -> None:
    alike(together(lambda session: ask(session, {}), (2, 7), 0.3), SwitchRefused, "member 5", "doing it")


def test_the_first_one_computes() -> None:
    calls = []

    def compute() -> str:
        calls.append(threading.get_ident())
        return "a tag"

    assert together(lambda session: session.first("tag", compute, "naming")) == ["a tag"] * 3
    assert len(calls) == 1


@pytest.mark.parametrize("error", [OSError(28, "disk full"), CheckpointError("disk full")])
def test_the_first_ones_error_is_that_of_all(error: Exception) -> None:
    def compute() -> None:
        raise error

    alike(together(lambda session: session.first("tag", compute, "naming")), CheckpointError, "disk full")


def test_an_interrupt_of_the_first_one_keeps_nobody_waiting() -> None:
    def compute() -> None:
        raise KeyboardInterrupt

    first, *others = together(lambda session: session.first("tag", compute, "naming"))
    assert isinstance(first, KeyboardInterrupt)
    alike(others, CheckpointError, "member 2: KeyboardInterrupt")


def test_all_hear_all() -> None:
    assert together(lambda session: session.all("count", 10 * mine(session))) == [{2: 20, 5: 50, 7: 70}] * 3


def test_what_all_say_is_joined_and_judged_once() -> None:
    judged = []

    def judge(found: list[int]) -> str:
        judged.append(found)
        return f"{sum(found)} of {len(found)}"

    found = together(lambda session: session.reduce("sum", [mine(session)], lambda one, other: one + other, judge))
    assert found == ["14 of 3"] * 3 and judged == [[2, 5, 7]]


def test_a_judge_that_fails_keeps_nobody_waiting() -> None:
    def judge(found: int) -> int:
        return found // 0

    found = together(lambda session: session.reduce("sum", 1, lambda one, other: one + other, judge), seconds=60.0)
    alike(found, CheckpointError, "member 2: ZeroDivisionError")


def test_who_says_nothing_is_named_on_all() -> None:
    found = together(lambda session: session.reduce("sum", 1, lambda one, other: one + other), (2, 7), 0.3)
    assert {type(each) for each in found} == {MemberMissing} and {each.members for each in found} == {(5,)}
    found = together(lambda session: session.reduce("sum", 1, lambda one, other: one + other), (5, 7), 0.3)
    assert {each.members for each in found} == {(2,)}


def counted(session: Session, stop: Callable[[], None]) -> int:
    """How many there are; member 5 may give up while it waits."""
    if mine(session) == 5:
        session._stop = stop
    elif session.is_first:
        time.sleep(0.3)
    found: int = session.reduce("count", 1, operator.add)
    return found


def test_who_gives_up_before_there_is_an_answer_gives_up_for_all() -> None:
    def give_up() -> None:
        raise SwitchFailed("given up")

    alike(together(lambda session: counted(session, give_up), seconds=60.0), SwitchFailed, "given up")


def test_who_gives_up_after_the_answer_goes_by_it() -> None:
    """The others count on this member: in the building of groups they would wait for it until their time-out."""

    def work(session: Session) -> int:
        def give_up_late() -> None:
            session.board.wait({2: "it/count/answer"}, "the answer")
            raise SwitchFailed("given up")

        return counted(session, give_up_late)

    assert together(work) == [3] * 3


def test_a_vote_of_all_is_a_commit() -> None:
    found = together(lambda session: session.vote(lambda: hear(session)))
    assert found == [VoteResult(True)] * 3


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("bad"), CheckpointError), (CheckpointDamaged("a bit"), CheckpointDamaged)]
)
def test_one_failure_is_that_of_all_and_nobody_waits(error: Exception, kind: type[CheckpointError]) -> None:
    """One never comes to the step that the others wait in: they leave with its reason, long before the time-out."""

    def work(session: Session) -> VoteResult:
        def part() -> None:
            if mine(session) == 5:
                raise error
            session.all("done", 1)

        return session.vote(part)

    found = together(work, seconds=60.0)
    assert len({(each.commit, each.reason) for each in found}) == 1
    assert not found[0].commit and str(error) in found[0].reason
    assert {each.checkpoint_error for each in found} == {kind}


def test_an_interrupt_is_raised_once_all_is_decided() -> None:
    def work(session: Session) -> VoteResult:
        def part() -> None:
            if mine(session) == 5:
                raise SystemExit(3)
            session.all("done", 1)

        return session.vote(part)

    first, second, third = together(work)
    first.raise_interrupt()
    third.raise_interrupt()
    with pytest.raises(SystemExit):
        second.raise_interrupt()


def test_who_dies_in_a_vote_is_named() -> None:
    found = together(lambda session: session.vote(lambda: hear(session)), (2, 7), 0.3)
    assert not found[0].commit and found[0] == found[1] and "member 5" in found[0].reason


def test_an_unread_decision_is_nobodys_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(board: Control, key: str, value: Any) -> Any:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(Control, "decide", fails)
    boards = []

    def work(session: Session) -> VoteResult:
        boards.append(session.board)
        return session.vote(lambda: None)

    for error in together(work, seconds=1.0):
        assert isinstance(error, OutcomeUnknown) and "doing it" in str(error) and "the store is gone" in str(error)
    for board in boards:
        with pytest.raises(OutcomeUnknown):
            board.raise_if_lost()


def test_waiting_ends_for_a_reason_of_the_callers() -> None:
    def over() -> None:
        raise MemberMissing("the world", (5,), 1.0)

    store = HashStore()
    session = Session(Control(store, "job", 2, 60.0), "it", MEMBERS, "doing it", stop=over)
    with pytest.raises(MemberMissing, match="member 5"):
        session.all("done", 1)


def test_what_is_forgotten_is_off_the_board() -> None:
    def work(session: Session) -> Any:
        first = session.reduce("one", mine(session), operator.add)
        session.forget("one")
        second = session.reduce("two", mine(session), operator.add)
        session.forget_answer("one")
        board = session.board
        said = board.read(f"{session.key}/one/0/{mine(session)}")
        hear(session)
        return first, second, said, board.read(f"{session.key}/one/answer")

    assert together(work) == [(14, 14, None, None)] * 3
