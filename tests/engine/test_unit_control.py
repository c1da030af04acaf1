"""The board, agreement on it, and who is still there: threads in the place of members, one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as td
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.errors import MemberMissing, OutcomeUnknown, SwitchFailed, SwitchRefused
from ds_dynatrain.membership import agreement, liveness
from ds_dynatrain.membership.control import Control, Seal, pack
from ds_dynatrain.membership.liveness import Heartbeat, Watch, post_end
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session
from ds_dynatrain.records import from_record
from ds_dynatrain.space import Layout


@pytest.fixture
def boards() -> Iterator[Callable[..., Control]]:
    """`boards(member, seconds=1.0)`: a member's board; all are over one store."""
    store = HashStore()
    yield lambda member, seconds=1.0, prefix="job": Control(store, prefix, member, seconds)


def test_post_and_read(boards: Any) -> None:
    one, other = boards(0), boards(1)
    assert other.read("key") is None
    one.post("key", {"a": [1, None, "ä"]})
    assert other.read("key") == {"a": [1, None, "ä"]}
    assert boards(0, prefix="another job").read("key") is None


def test_the_first_decision_counts(boards: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        decided = list(threads.map(lambda member: boards(member).decide("record", {"by": member}), range(8)))
    assert len({each["by"] for each in decided}) == 1
    assert boards(9).decide("record", {"by": 9}) == decided[0]
    assert boards(9).read("record") == decided[0]


def test_count_numbers_the_calls_of_all(boards: Any) -> None:
    assert [boards(member).count("calls") for member in range(3)] == [1, 2, 3]


def test_gather_waits_for_all(boards: Any) -> None:
    late = threading.Timer(0.2, lambda: boards(1).post("here/1", "late"))
    late.start()
    boards(0).post("here/0", "early")
    assert boards(0).gather("here", (1, 0), "all") == {0: "early", 1: "late"}
    late.join()
    assert boards(0).all_posted("here", (0, 1)) and not boards(0).all_posted("here", (0, 1, 2))


def test_gather_names_who_is_missing(boards: Any, in_time: Callable[[float, float], None]) -> None:
    board = boards(0, 0.2)
    board.post("here/0", 1)
    begin = time.monotonic()
    with pytest.raises(MemberMissing, match=r"meeting: no answer from member 2, 3 within 0\.2"):
        board.gather("here", (3, 0, 2), "meeting")
    in_time(time.monotonic() - begin, 2)
    with pytest.raises(MemberMissing) as found:
        board.gather("here", (0, 2), "meeting", deadline=time.monotonic())
    assert found.value.members == (2,)


def test_gather_can_be_stopped(boards: Any) -> None:
    def stop() -> None:
        raise SwitchRefused("given up")

    with pytest.raises(SwitchRefused, match="given up"):
        boards(0).gather("nobody", (0,), "nothing", stop=stop)


# ---- sealed records -------------------------------------------------------------------------------------------------

SECRET = b"of the members of generation 3"


class Sealed:
    """Boards of members that have a secret, and the store as anybody can write it."""

    def __init__(self) -> None:
        self.store = HashStore()

    def board(self, member: int, secret: bytes = SECRET, prefix: str = "board") -> Control:
        return Control(self.store, prefix, member, 1.0, seal=Seal(secret))

    def overwrite(self, key: str, value: bytes) -> None:
        self.store.set(f"board/{key}", value)  # type: ignore[arg-type]

    def held(self, key: str, prefix: str = "board") -> bytes:
        return self.store.get(f"{prefix}/{key}")


@pytest.fixture
def sealed() -> Sealed:
    return Sealed()


def test_members_read_what_members_wrote(sealed: Sealed) -> None:
    value = {"a": [1, None], "many": np.arange(5, dtype=np.uint64)}
    sealed.board(0).post("key/0", value)
    found = (
        sealed.board(1).read("key/0"),
        sealed.board(1).clone().value("key/0"),
        sealed.board(1).gather("key", [0], "it")[0],
    )
    for each in found:
        assert each["a"] == [1, None] and each["many"].tolist() == [0, 1, 2, 3, 4]
    assert sealed.board(1).decide("key/0", 7)["a"] == [1, None]
    assert sealed.board(1).read("nothing") is None


@pytest.mark.parametrize(
    "forge",
    [
        lambda sealed: pack({"commit": True}),
        lambda sealed: sealed.held("record")[:-1] + b"x",
        lambda sealed: sealed.held("another"),
        lambda sealed: sealed.held("record", "board2"),
        lambda sealed: sealed.held("record", "before"),
    ],
    ids=["a stranger's", "changed", "of another key", "of another board", "of another generation"],
)
def test_what_no_member_wrote_under_this_key_is_named(sealed: Sealed, forge: Callable[[Sealed], bytes]) -> None:
    yes = {"commit": True}
    for board, key in (
        (sealed.board(0), "record"),
        (sealed.board(0), "another"),
        (sealed.board(0, prefix="board2"), "record"),
        (sealed.board(0, b"of generation 2", "before"), "record"),
    ):
        board.post(key, yes)
    sealed.overwrite("record", forge(sealed))
    board = sealed.board(1)
    for read in (
        lambda: board.read("record"),
        lambda: board.value("record"),
        lambda: board.wait({0: "record"}, "it"),
        lambda: board.decide("record", {"commit": False}),
    ):
        with pytest.raises(td.DistError, match=r"'board/record'.*was not written by a member"):
            read()


def test_an_emptied_record_is_no_record(sealed: Sealed) -> None:
    sealed.board(0).post("key", None)
    sealed.overwrite("key", b"")
    with pytest.raises(td.DistError, match="was not written by a member"):
        sealed.board(1).read("key")


def test_a_forged_decision_is_unknown(sealed: Sealed) -> None:
    """Others may have read the true one before."""
    session = Session(sealed.board(0), "it", (0,), "doing it")
    sealed.overwrite(session.record, pack({"commit": True, "reason": ""}))
    with pytest.raises(OutcomeUnknown, match="was not written by a member"):
        session.vote(lambda: None)
    with pytest.raises(OutcomeUnknown):
        session.board.raise_if_lost()


# ---- agreement ------------------------------------------------------------------------------------------------------

TWO, FOUR = Layout(data=2, zero_stage=1), Layout(data=4, zero_stage=1)


def proposal(target: Layout = FOUR, at: int | None = None) -> Proposal:
    return Proposal(2, TWO, (0, 1), target, (0, 1, 2, 3), at)


Request = tuple[Proposal, int, tuple[str, str] | None]
"""A proposal, the step at which it is made, and a refusal."""


def request(
    target: Layout = FOUR, at: int | None = None, step: int = 5, refusal: tuple[str, str] | None = None
) -> Request:
    return proposal(target, at), step, refusal


def all_ask(boards: Any, requests: dict[int, Request], seconds: float = 2.0) -> list[Any]:
    """What `agree` returns or raises on members 0 and 1; those without a request do not call it."""

    def ask(member: int) -> Any:
        try:
            return agreement.agree(boards(member, seconds), "step 5", (0, 1), *requests[member])
        except SwitchRefused as refusal:
            return refusal

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, requests))


def test_equal_requests_are_a_proposal(boards: Any) -> None:
    found = all_ask(boards, {0: request(at=7), 1: request(at=7)})
    assert found == [proposal(at=7)] * 2 and found[0].union == (0, 1, 2, 3)
    assert from_record(Proposal, boards(3).read("proposal/2")) == proposal(at=7)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (request(TWO), "ask for different switches: member 0 for .*data=4.*member 1 for .*data=2"),
        (request(at=9), "at step 9"),
        (request(step=6), "asked at step 6"),
        (request(refusal=("no memory", "buy some")), "member 1: no memory; buy some"),
    ],
)
def test_a_different_request_is_refused_on_all(boards: Any, other: Request, words: str) -> None:
    first, second = all_ask(boards, {0: request(), 1: other})
    assert isinstance(first, SwitchRefused) and str(first) == str(second)
    with pytest.raises(SwitchRefused, match=words):
        raise first
    assert boards(3).read("proposal/2") is None


def test_other_ranks_for_the_same_members_are_refused(boards: Any) -> None:
    def ask(member: int) -> str:
        mine = replace(proposal(), members=(0, 1, 2, 3) if member == 0 else (0, 1, 3, 2))
        with pytest.raises(SwitchRefused) as refused:
            agreement.agree(boards(member, 2.0), "step 5", (0, 1), mine, 5)
        return str(refused.value)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(ask, (0, 1)))
    assert found[0] == found[1] and "do not give its ranks to the same members" in found[0]


def test_a_number_that_one_has_used_up_is_that_of_the_first(boards: Any) -> None:
    def ask(member: int) -> Proposal:
        mine = replace(proposal(), generation=2 + member)
        return agreement.agree(boards(member, 2.0), "step 5", (0, 1), mine, 5)

    with ThreadPoolExecutor(2) as threads:
        assert [each.generation for each in threads.map(ask, (0, 1))] == [2, 2]


def test_a_member_that_does_not_ask_is_named(boards: Any) -> None:
    (refusal,) = all_ask(boards, {0: request()}, 0.3)
    assert "member 1" in refusal.reason and "every working member has to ask" in refusal.reason
    (late,) = all_ask(boards, {1: request()}, 0.3)
    assert str(late) == str(refusal), "one that asks late reads what was decided"


def test_who_cannot_be_prepared_is_told_to_all(boards: Any) -> None:
    for member in range(4):
        agreement.say_prepared(boards(member), proposal(), "no memory" if member == 2 else None)
    with pytest.raises(SwitchFailed, match="could not be prepared on member 2: no memory"):
        agreement.wait_until_prepared(boards(1), proposal(), lambda: None)


def test_who_is_never_prepared_is_named(boards: Any) -> None:
    for member in (0, 3):
        agreement.say_prepared(boards(member), proposal())
    with pytest.raises(MemberMissing, match="preparing the switch: no answer from member 1, 2"):
        agreement.wait_until_prepared(boards(0, 0.2), proposal(), lambda: None)


@pytest.mark.parametrize(
    ("step", "place", "words"),
    [(5, "train", None), (6, "train", "stands at step 6, rank 0 at step 5"), (5, "other", "waits in 'other'")],
)
def test_all_stand_at_one_step_in_one_loader(boards: Any, step: int, place: str, words: str | None) -> None:
    places = {0: (5, "train"), 1: (step, place), 2: (0, "train"), 3: (0, "train")}

    def stand(member: int) -> str | None:
        try:
            session = Session(boards(member), "switch/2", (0, 1, 2, 3), "switch")
            agreement.meet(session, proposal(), *places[member])
        except SwitchRefused as refusal:
            return str(refusal)
        return None

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(stand, range(4)))
    assert len(set(found)) == 1
    assert found[0] is None if words is None else words in str(found[0])


# ---- liveness -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_beating_member_is_alive_and_a_silent_one_is_named(boards: Any) -> None:
    heart = Heartbeat(boards(0))
    watch = Watch(boards(2, 0.5))
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        assert not watch.look((0,))
        time.sleep(0.02)
    heart.stop()
    assert not any(thread.name == "dynatrain-heartbeat" for thread in threading.enumerate())
    with pytest.raises(MemberMissing, match="no heartbeat: no answer from member 0"):
        while time.monotonic() < end + 10:
            watch.look((0,))
            time.sleep(0.02)


@pytest.mark.usefixtures("quick")
def test_the_end_of_all_scripts(boards: Any) -> None:
    watch = Watch(boards(2))
    post_end(boards(0))
    assert not watch.look((0, 1))
    post_end(boards(1))
    time.sleep(0.05)
    assert watch.look((0, 1))


@pytest.mark.usefixtures("quick")
def test_a_script_that_ended_with_an_error_is_named(
    boards: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.last_value", ValueError("x"), raising=False)
    post_end(boards(1))
    with pytest.raises(SystemExit) as end:
        Watch(boards(2)).look((0, 1))
    assert end.value.code == 1 and "script of member [1] ended with an error" in caplog.text


def test_what_any_board_of_a_process_takes_down_is_waited_for(boards: Any) -> None:
    """A leaver whose newest board was opened by another thread ended while that one's group was half gone."""
    one = boards(0)
    done = threading.Event()
    slow = threading.Thread(target=done.wait, args=(0.2,))
    slow.start()
    one.clone().teardowns.add(slow)
    one.teardowns.finish(one.timeout_seconds)
    assert not slow.is_alive()
