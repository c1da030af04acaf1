"""Idle members that keep copies: their listener, the links to it, and who decides that they are buddies. In threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.buddies import kept as kept_module
from ds_dynatrain.engine.buddies.copy import Mark
from ds_dynatrain.engine.buddies.keeping import Keeping
from ds_dynatrain.engine.buddies.kept import Kept
from ds_dynatrain.engine.buddies.links import Links
from ds_dynatrain.engine.buddies.pairing import Pairing
from ds_dynatrain.engine.buddies.shipping import Round
from ds_dynatrain.engine.buddies.shipping import Ward as Own
from ds_dynatrain.engine.buddies.taking import Taken
from ds_dynatrain.engine.context import Candidates
from tests.engine.test_buddies_rounds import MARK, End, FakeTaken, Wire, copy, same

SECONDS = 20.0
IDLE, WARD = 9, 3


@dataclass
class Board:
    """What all share, and who speaks."""

    member: int
    records: dict[str, Any] = field(default_factory=dict)

    def post(self, key: str, value: Any) -> None:
        self.records[key] = value

    def read(self, key: str) -> Any:
        return self.records.get(key)


class Ward:
    """One that works, and its link to the idle one."""

    def __init__(self, idle: Idle, member: int = WARD, rank: int = 0) -> None:
        self.board = Board(member, idle.board.records)
        self.rank, self.kept = rank, Kept()
        self.links = Links(cast(Any, SimpleNamespace(rank=rank, control=self.board)), [IDLE])

    def linked(self) -> Ward:
        """Once it is."""
        wait(lambda: self.links.look() or self.links.are_ready)
        return self

    def ships(self, mark: Mark, whole: Mark | None = None) -> Round:
        """A copy of its own, of that moment; the round, which has ended."""
        self.kept.begin(mark, 0)
        taken = cast(Taken, FakeTaken(copy(self.rank, mark)))
        found = Round(mark, taken, [IDLE], [], self.links.begin(mark, whole, None), self.kept)
        found.run()
        return found


class Idle:
    """The idle one."""

    def __init__(self) -> None:
        self.board, self.kept = Board(IDLE), Kept()
        self.keeping = Keeping(self.kept)
        self.keeping.offer(cast(Any, self.board), "127.0.0.1")

    def has(self) -> list[tuple[int, int]]:
        """(step, rank) of what it keeps, the newest first."""
        return [(one.mark.step, one.rank) for one in self.kept.copies()]


@pytest.fixture
def idle() -> Iterator[Idle]:
    yield Idle()


def wait(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def at(step: int) -> Mark:
    return replace(MARK, step=step)


def test_it_keeps_two_moments_of_each(idle: Idle) -> None:
    """The one that is whole on all is not written over; a copy is there once the ward's round has ended."""
    one, other = Ward(idle).linked(), Ward(idle, member=4, rank=1).linked()
    for ward in (one, other):
        assert ward.ships(at(1)).is_whole and ward.ships(at(2), whole=at(1)).is_whole
    assert idle.has() == [(2, 0), (2, 1), (1, 0), (1, 1)]
    assert all(same(found, copy(found.rank, found.mark)) for found in idle.kept.copies())
    assert one.ships(at(3), whole=at(1)).is_whole
    assert idle.has() == [(3, 0), (2, 1), (1, 0), (1, 1)], "2 was never whole on all"
    assert idle.kept.nbytes == 4 * FakeTaken(copy(0)).memory.numel()


def test_who_has_gone_is_kept_until_something_newer_is_whole(idle: Idle) -> None:
    """Its copy is what is left of it."""
    one, other = Ward(idle).linked(), Ward(idle, member=4, rank=1).linked()
    assert one.ships(at(1)).is_whole and other.ships(at(1)).is_whole
    other.links.close()
    wait(lambda: all(link.is_over for member, (link, _) in idle.keeping._links.items() if member == 4))
    assert one.ships(at(2)).is_whole
    assert (1, 1) in idle.has()
    assert one.ships(at(3), whole=at(2)).is_whole
    assert idle.has() == [(3, 0), (2, 0)]


def test_another_link_takes_over_what_there_is(idle: Idle) -> None:
    """In the next world the ward has another rank."""
    assert Ward(idle).linked().ships(at(1)).is_whole
    again = Ward(idle, rank=1).linked()
    assert idle.has() == [(1, 0)]
    assert again.ships(at(2), whole=at(1)).is_whole
    assert idle.has() == [(2, 1), (1, 0)]


def test_what_a_load_has_replaced(idle: Idle) -> None:
    """Also a copy from before it that comes after the word of it; a world that was formed since is newer."""
    ward = Ward(idle).linked()
    assert ward.ships(at(1)).is_whole
    idle.kept.void_before(replace(MARK, segment=f"{MARK.generation}.2").stretch)
    assert not idle.has()
    assert ward.ships(at(9)).is_whole and not idle.has()
    for step, segment in ((2, f"{MARK.generation}.2"), (1, f"{MARK.generation + 1}.0")):
        mark = Mark(int(segment.split(".")[0]), segment, MARK.registered, step, MARK.layout)
        assert ward.ships(mark).is_whole and idle.has() == [(step, 0)]
    idle.kept.void_before(MARK.stretch)
    assert idle.kept.since == (MARK.generation, 2), "an older word changes nothing"


def test_no_room(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ward says so, and the link is of use for the next one."""
    ward = Ward(idle).linked()
    monkeypatch.setattr(kept_module, "available_bytes", lambda: 10)
    found = ward.ships(at(1))
    assert not found.is_whole and "member 9 has no room" in found.error and not idle.has()
    monkeypatch.undo()
    assert ward.ships(at(2)).is_whole


def test_a_link_that_ends_holds_nobody_up(idle: Idle) -> None:
    ward = Ward(idle).linked()
    ward.links.close()
    found = ward.ships(at(1))
    assert not found.is_whole and not found.is_broken and "member 9 has no room" in found.error
    assert not ward.links.are_ready


def test_one_that_dies_in_a_round_holds_nobody_up(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that work, one of which has it as a buddy, both come to the end, and to that of the next round."""
    wire, wards = Wire(), [Ward(idle).linked(), Ward(idle, member=4, rank=1)]
    monkeypatch.setattr(Round, "_take_in", dying(Round._take_in, idle))
    for step, is_whole in ((1, [False, True]), (2, [True, True])):
        rounds = []
        for ward, other in zip(wards, reversed(wards), strict=True):
            mark, mine = at(step), ward.board.member
            here = [IDLE] if step == 1 and ward is wards[0] else [other.board.member]
            its = [other] if step == 2 or ward is wards[0] else []
            _, rooms = ward.kept.begin(mark, len(its))
            kept = [Own(each.board.member, each.rank, room) for each, room in zip(its, rooms, strict=True)]
            group = End(wire, mine)
            way = ward.links.begin(mark, None, group) if step == 1 and ward is wards[0] else group
            rounds.append(Round(mark, cast(Taken, FakeTaken(copy(ward.rank, mark))), here, kept, way, ward.kept))
        threads = [threading.Thread(target=each.run, daemon=True) for each in rounds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert [each.is_over for each in rounds] == [True, True]
        assert [each.is_whole for each in rounds] == is_whole, [each.error for each in rounds]


def dying(own: Any, idle: Idle) -> Any:
    """`_take_in` of a process that dies there."""

    def wrapped(self: Round, *arguments: Any) -> Any:
        if any(self._kept is guest for guest in idle.kept.guests.values()):
            raise ConnectionError("dead")
        return own(self, *arguments)

    return wrapped


@pytest.mark.parametrize("wrong", [{"secret": "another"}, {"port": 9}, {"host": 5}, {}])
def test_who_cannot_be_reached_keeps_nothing(idle: Idle, wrong: dict[str, Any]) -> None:
    """A stranger at that place, nobody at all, nonsense on the board: training goes on, and asks no more."""
    ward = Ward(idle)
    place = idle.board.records[f"keeper/{IDLE}"]
    ward.board.records = {f"keeper/{IDLE}": {**place, **wrong} if wrong else {}}
    ward.links.look()
    time.sleep(0.3)
    ward.links.look()
    assert not ward.links.are_ready and not idle.has()


# ---- who is a buddy --------------------------------------------------------------------------------------------------


def engine(members: str, idle: str = "", mine: int = 0) -> Any:
    """Of one member of those that work; each letter is the node of a member."""
    block = DynatrainConfig.model_validate({"buddies": {"mode": "copy"}})
    nodes = dict(enumerate(members + idle))
    return SimpleNamespace(
        settings=block,
        members=tuple(range(len(members))),
        candidates=Candidates(mine, nodes),
        control=Board(mine),
        rank=mine,
    )


def test_idle_ones_are_buddies_once_all_are_linked() -> None:
    here = engine("ab", "c")
    pairing = Pairing(here)
    pairing.enter(is_needed=True)
    assert pairing.by_member == {0: (1,), 1: (0,)} and pairing.idle == (2,) and not pairing.is_ready
    pairing.take_idle(True)
    assert pairing.by_member == {0: (2,), 1: (0,)}
    pairing.take_idle(False)
    pairing.give_idle_up()
    assert pairing.by_member == {0: (1,), 1: (0,)} and not pairing.is_ready and not pairing.sees_change()
    here.candidates = Candidates(0, {0: "a", 1: "b", 2: "c", 3: "d"})
    assert pairing.sees_change()
    pairing.enter(is_needed=True)
    assert pairing.idle == (2, 3)


def test_one_that_works_alone() -> None:
    pairing = Pairing(engine("a", "a"))
    pairing.enter(is_needed=True)
    assert not pairing.by_member
    pairing.take_idle(True)
    assert pairing.by_member == {0: (1,)}
    alone = Pairing(engine("a"))
    alone.enter(is_needed=True)
    assert not alone.by_member and not alone.is_ready and not alone.sees_change()


def test_who_needs_no_link_is_ready() -> None:
    """Of two that work one has an idle buddy."""
    pairing = Pairing(engine("ab", "c", mine=1))
    pairing.enter(is_needed=True)
    assert pairing.is_ready


def test_those_of_several_engines() -> None:
    """Each has links of its own, and idle members are buddies once all of them are there."""
    first, other = engine("ab", "c"), engine("ab", "c")
    pairing, idle = Pairing(first, lambda: [first, other]), Idle()
    pairing.enter(is_needed=True)
    idle.keeping._secret = "of both"
    place = {**idle.board.records[f"keeper/{IDLE}"], "secret": "of both"}
    first.control.records["keeper/2"] = place
    for _ in range(3):
        pairing.look()
        time.sleep(0.3)
    assert not pairing.is_ready
    other.control.records["keeper/2"] = place
    wait(lambda: pairing.look() or pairing.is_ready)
    pairing.take_idle(True)
    assert pairing.begin(first, MARK, None, None) is not pairing.begin(other, MARK, None, None)
    pairing.close()
    assert not pairing.is_ready
