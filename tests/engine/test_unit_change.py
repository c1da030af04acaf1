"""What one member decides about a generation: corners that random events seldom reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.errors import ConfigError, ElasticError
from ds_dynatrain.membership.boundary_machine import (
    IN_THE_PAUSE,
    Action,
    BoundaryMachine,
    Connect,
    EndProcess,
    Enter,
    Fail,
    Follow,
    GiveUpPreparation,
    HeldState,
    Hold,
    Know,
    LetGo,
    Open,
    OwnFacts,
    PassBy,
    Post,
    PostJob,
    Prepare,
    Restore,
    Serve,
    Spend,
    Transact,
    Void,
)
from ds_dynatrain.membership.destinations import Destination, DestinationFacts, Registry
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.survival import Survivor
from ds_dynatrain.membership.whole import Had, Mark, WholeCopies
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space import Layout
from tests.engine.simulated import Board

MEMBERS = ("a/0", "b/0", "c/0")
PRESENT = Layout(data=2, zero_stage=0)
NOW = Generation(term="1", generation=5, change="planned", members=MEMBERS[:2])
ASKED = Proposal(8, PRESENT, (0, 1), PRESENT.replace(data=3), (0, 1, 2), None)
"""A switch that the script has asked for."""


def stay(asked: DestinationFacts) -> list[Destination]:
    """All engines stay where they are."""
    return list(asked.present)


def own(
    member: str = "a/0", *, is_idle: bool = False, is_aborted: bool = False, engines: int = 1, **held: Any
) -> OwnFacts:
    """A member of a job in which a/0 and b/0 train."""
    number = MEMBERS.index(member)
    one = HeldState(
        number, PRESENT, (0, 1), None if is_idle else number, attempt=7, generation=7, step=20, board=Board({})
    )
    return OwnFacts(member, NOW, Registry().extended(NOW.members), is_aborted, (replace(one, **held),) * engines)


def world(*members: str, **given: Any) -> Generation:
    return Generation(**{"term": "1", "generation": 6, "change": "planned", "members": members, **given})


def failure(*members: str, survivors: int, leaving: tuple[str, ...] = ()) -> Generation:
    return world(*members, change="failure", survivors=survivors, leaving=leaving, reason="b/0 lost")


def steps(machine: BoundaryMachine, known: OwnFacts, newest: Generation, board: Board) -> list[Action]:
    """All that follows until the member has to wait; what is posted stands on the board."""
    found: list[Action] = []
    while actions := machine.advance(known, newest, board.of_all(len(known.engines))):
        for action in actions:
            found.append(action)
            if isinstance(action, Post) and action.is_decision:
                board.decide(action.key, action.value)
            elif isinstance(action, Post):
                board.values[action.engine, action.key] = action.value
            elif isinstance(action, Fail | Enter | Restore | Serve):
                return found
    return found


def agree(newest: Generation, board: Board, *machines: tuple[BoundaryMachine, OwnFacts]) -> None:
    """Until all let go of what they hold."""
    waiting = [*machines]
    while waiting:
        machine, known = waiting.pop(0)
        actions = machine.advance(known, newest, board.of_all(len(known.engines)))
        board.values |= {(each.engine, each.key): each.value for each in actions if isinstance(each, Post)}
        if LetGo() not in actions:
            waiting.append((machine, known))


HOLDS_NOTHING = to_record(Survivor(2, None, 7, 20, True, False, PRESENT))


class TestLeftAlone:
    """After a failure, newcomers of whom all that held the state have died or leave."""

    @pytest.mark.parametrize("is_aborted", [False, True])
    def test_without_a_checkpoint_it_is_told_so(self, is_aborted: bool) -> None:
        newest, known = failure("c/0", survivors=0), own("c/0", is_idle=True, is_aborted=is_aborted)
        found = steps(BoundaryMachine(stay), known, newest, Board({}))
        assert isinstance(found[-1], Fail) and isinstance(found[-1].error, ElasticError)
        assert str(found[-1].error).startswith("generation 6: b/0 lost; ")
        assert "there is no checkpoint to go on from" in str(found[-1].error)

    def test_the_first_that_has_an_engine_leads_the_others_to_the_checkpoint(self) -> None:
        """b/0 was in the generation before, and comes to its engine only now."""
        newest, board, machine = failure("b/0", "c/0", survivors=0), Board({}), BoundaryMachine(stay)
        known = replace(own("c/0", is_idle=True, can_restore=True), world=None, registry=Registry())
        assert not any(isinstance(action, LetGo) for action in steps(machine, known, newest, board))
        board.values[0, "survivor/b/0"] = {"holds": [], "released": []}
        assert [type(action) for action in steps(machine, known, newest, board)] == [LetGo, Know, PostJob]
        board.values[0, "built/0"] = True
        found = steps(machine, known, newest, board)
        assert isinstance(found[-1], Restore) and not found[-1].proposals[0].source_members

    def test_what_a_member_said_before_it_had_an_engine_counts(self) -> None:
        """The others went by it, and gave it the engine: with another answer it would lead beside them."""
        said = {"holds": [], "released": []}
        board = Board({(0, "survivor/b/0"): said, (0, "survivor/c/0"): {**said, "holds": [HOLDS_NOTHING]}})
        known = replace(own("b/0", is_idle=True, can_restore=True), world=None, registry=Registry())
        found = steps(BoundaryMachine(stay), known, failure("b/0", "c/0", survivors=0), board)
        assert board.values[0, "survivor/b/0"] is said and not any(isinstance(one, PostJob) for one in found)

    def test_it_gets_the_state_of_one_that_leaves(self) -> None:
        newest, board, machine = failure("c/0", survivors=0, leaving=("a/0",)), Board({}), BoundaryMachine(stay)
        leaver, known = BoundaryMachine(stay), own("c/0", is_idle=True, can_restore=True)
        steps(machine, known, newest, board)
        alone = own("a/0", is_aborted=True, layout=PRESENT.replace(data=1), members=(0,))
        assert [type(action) for action in steps(leaver, alone, newest, board)][2:] == [Post, Hold, Know, PostJob]
        assert not any(isinstance(action, LetGo) for action in steps(machine, known, newest, board))

    def test_what_leaves_with_nobody_to_take_it_has_died(self) -> None:
        """Half of what two members held, who both were told to go."""
        sharded = own("a/0", is_aborted=True, layout=PRESENT.replace(zero_stage=1), can_restore=True)
        found = steps(BoundaryMachine(stay), sharded, failure(survivors=0, leaving=("a/0",)), Board({}))
        assert isinstance(found[-1], Fail) and "no remaining member can restore" in str(found[-1].error)


class TestLeftOut:
    """After a failure, a member of which nobody knows that it holds anything."""

    @pytest.mark.parametrize("survivors", [1, 2])
    def test_a_newcomer_waits_for_those_who_hold_something(self, survivors: int) -> None:
        newest = failure(*MEMBERS[:survivors], "c/0", survivors=survivors)
        found = steps(BoundaryMachine(stay), own("c/0", is_idle=True), newest, BLANK)
        assert found == [GiveUpPreparation("b/0 lost"), Open(newest), LetGo()]

    def test_who_is_in_no_place_of_the_others_goes(self) -> None:
        found = steps(BoundaryMachine(stay), own("a/0", is_aborted=True), failure("c/0", survivors=0), Board({}))
        assert found[found.index(LetGo()) + 1] == EndProcess()

    def test_what_nobody_knows_of_is_given_up(self) -> None:
        newest = failure("a/0", "c/0", survivors=1)
        assert LetGo() in steps(BoundaryMachine(stay), own("c/0", rank=1, is_aborted=True), newest, BLANK)
        assert LetGo() not in steps(BoundaryMachine(stay), own("c/0", rank=1), newest, Board({}))


BLANK = Board({})


class TestCopies:
    """Of a/0, b/0 and c/0 at stage 2, c/0 has died; its buddy is b/0."""

    layout = PRESENT.replace(data=3, zero_stage=2)
    mark = Mark(7, "7.0", 0, 18, layout)
    newest = failure("a/0", "b/0", "d/0", survivors=2)

    def survivor(self, member: str, *ranks: int, **held: Any) -> OwnFacts:
        """Who trained, with the copies of some ranks."""
        copies = tuple(Had(self.mark, rank, rank == MEMBERS.index(member)) for rank in ranks)
        known = {"is_aborted": True, "layout": self.layout, "members": (0, 1, 2), "copies": lambda: copies}
        return own(member, **{**known, **held})

    def job(self, newest: Generation) -> dict[str, Any]:
        """What the leader says for those who build engines."""
        registry = Registry().extended(MEMBERS[:2]).extended(newest.members)
        return {"engines": 1, "registry": to_record(registry)}

    def idle(self, known: OwnFacts) -> OwnFacts:
        return replace(known, engines=tuple(replace(engine, rank=None) for engine in known.engines))

    def test_all_go_back_to_them_with_the_newcomer_in_the_place(self) -> None:
        board, newest, whole = Board({}), self.newest, WholeCopies(self.mark, (0, 1, 1))
        target: list[Destination] = [(self.layout, (0, 1, 2))]
        leader, other, newcomer = (BoundaryMachine(lambda asked: target) for _ in range(3))
        first, second = self.survivor("a/0", 0, 1), self.survivor("b/0", 1, 2)
        alone = replace(own("c/0", is_idle=True), member="d/0", world=None, registry=Registry())
        agree(newest, board, (leader, first), (other, second))
        board.values[0, "job"] = self.job(newest)
        steps(newcomer, alone, newest, board)
        every = (leader, self.idle(first)), (other, self.idle(second)), (newcomer, alone)
        found = [steps(machine, known, newest, board)[-1] for machine, known in every]
        assert [(type(one), getattr(one, "copies", None)) for one in found] == [(Restore, (whole,))] * 3

    def test_who_has_no_place_gives_what_it_has_and_waits(self) -> None:
        board, newest = Board({}), failure("a/0", "b/0", survivors=2)
        smaller: list[Destination] = [(self.layout.replace(data=1), (0,))]
        leader, other = (BoundaryMachine(lambda asked: smaller) for _ in range(2))
        first, second = self.survivor("a/0", 0), self.survivor("b/0", 1, 2)
        agree(newest, board, (leader, first), (other, second))
        board.values[0, "job"] = self.job(newest)
        steps(leader, self.idle(first), newest, board)
        found = steps(other, self.idle(second), newest, board)
        assert isinstance(found[-1], Serve) and [whole.holders for whole in found[-1].copies] == [(0, 1, 1)]
        assert steps(other, self.idle(second), newest, board) == []
        board.decide("record/8", {"commit": True, "reason": ""})
        assert isinstance(steps(other, self.idle(second), newest, board)[-1], Enter)

    def test_a_damaged_copy_is_passed_over_and_no_other_is_read(self) -> None:
        """Of step 19 rank 2's is damaged, so that of step 18 is the newest: each member reads what it would give."""
        read: list[tuple[str, int]] = []
        later = replace(self.mark, step=19)

        def known(member: str, *ranks: int) -> OwnFacts:
            def damaged(whole: WholeCopies) -> tuple[int, ...]:
                read.append((member, whole.mark.step))
                return (2,) if member == "b/0" and whole.mark == later else ()

            copies = tuple(
                Had(mark, rank, rank == MEMBERS.index(member)) for mark in (self.mark, later) for rank in ranks
            )
            return self.survivor(member, copies=lambda: copies, damaged=damaged)

        board, target = Board({}), [(self.layout.replace(data=2), (0, 1))]
        both = [(BoundaryMachine(lambda asked: target), known("a/0", 0)), (BoundaryMachine(stay), known("b/0", 1, 2))]
        agree(failure("a/0", "b/0", survivors=2), board, *both)
        assert sorted(read) == [("a/0", 18), ("a/0", 19), ("b/0", 18), ("b/0", 19)]
        found = steps(both[0][0], self.idle(both[0][1]), failure("a/0", "b/0", survivors=2), board)
        assert isinstance(found[-1], Restore) and found[-1].copies == (WholeCopies(self.mark, (0, 1, 1)),)

    def test_what_was_loaded_since_one_knows_and_tells_all(self) -> None:
        """Copies from before that are whole, and nobody goes on from them."""
        board, newest = Board({}), failure("a/0", "b/0", survivors=2)
        known = self.survivor("a/0", 0), self.survivor("b/0", 1, 2, since=lambda: (7, 1))
        machines = BoundaryMachine(stay), BoundaryMachine(stay)
        steps(machines[0], known[0], newest, board)
        for machine, one in zip(reversed(machines), reversed(known), strict=True):
            found = steps(machine, one, newest, board)
            assert Void((7, 1)) in found and isinstance(found[-1], Fail)
            assert "were taken before a checkpoint was loaded" in str(found[-1].error)

    def test_who_goes_at_once_is_not_counted_on(self) -> None:
        """An idle member that was told to leave has a copy, and is gone before anybody could have it."""
        board, newest = Board({}), failure("a/0", survivors=1, leaving=("b/0",))
        found = steps(BoundaryMachine(stay), self.idle(self.survivor("b/0", 1, 2)), newest, board)
        assert isinstance(found[-1], EndProcess)
        assert [one["copies"] for one in board.values[0, "survivor/b/0"]["holds"]] == [[]]

    @pytest.mark.parametrize("can_restore", [False, True])
    def test_a_joint_loss_is_named(self, can_restore: bool) -> None:
        board, newest = Board({}), failure("a/0", survivors=1)
        machine, known = BoundaryMachine(stay), self.survivor("a/0", 0, 1, can_restore=can_restore)
        known = replace(known, registry=Registry().extended(MEMBERS))
        found = steps(machine, known, newest, board)
        lost = "no sound copy of rank 2 (c/0) at step 18 is left"
        if can_restore:
            assert next(one for one in found if isinstance(one, LetGo)).lost.startswith(lost)
        else:
            assert isinstance(found[-1], Fail) and lost in str(found[-1].error)


class TestLeading:
    def test_a_switch_that_was_asked_for_comes_first(self) -> None:
        """Nothing is proposed meanwhile: members find a proposal at different times, and may be in that switch."""
        of_two = replace(ASKED, layout=PRESENT.replace(zero_stage=1), members=(0, 1))
        machine, board, newest = BoundaryMachine(stay), Board({}), world("a/0", "b/0", "c/0")
        assert not steps(machine, own(pending=of_two), newest, board)
        known = [type(action) for action in steps(machine, own(), newest, board)]
        assert known == [GiveUpPreparation, Open, Know, PostJob]
        board.values[0, "built/2"] = True
        assert not steps(machine, own(pending=of_two), newest, board)
        found = steps(machine, own(), newest, board)
        assert isinstance(found[-1], Prepare) and found[-1].proposals[0].generation == 8

    def test_where_nothing_moves_all_step_over_at_the_step_that_rank_0_names(self) -> None:
        board, newest = Board({}), world("a/0", "b/0", "c/0")
        board.values[0, "built/2"] = True
        leader, other = BoundaryMachine(stay), BoundaryMachine(stay)
        steps(leader, own(), newest, board)
        steps(other, own("b/0"), newest, board)
        board.values[0, "prepared/8/all"] = ""
        assert steps(leader, own(), newest, board) == [Post("meet/8", 21, is_decision=True)]
        assert not steps(other, own("b/0"), newest, board)
        both = (leader, own(step=21)), (other, own("b/0", step=21))
        entered = [machine.advance(known, newest, [board]) for machine, known in both]
        assert all(isinstance(actions[-1], Enter) for actions in entered) and entered[0] == entered[1]

    @pytest.mark.parametrize("is_there", [True, False])
    def test_all_that_were_told_to_go_meet_where_they_stand(self, is_there: bool) -> None:
        """Unless one of them has passed that boundary already: who has waited for it trains on, and so do all."""
        board, newest = Board({}), world(leaving=("a/0", "b/0"))
        leader, other = BoundaryMachine(stay), BoundaryMachine(stay)
        first, second = replace(own(), has_waited=False), replace(own("b/0"), has_waited=False)
        assert not any(isinstance(one, Post) and one.is_decision for one in steps(leader, first, newest, board))
        if is_there:
            found = [steps(other, second, newest, board), steps(leader, first, newest, board)]
        else:
            assert steps(leader, own(), newest, board) == [Post("meet/8", 21, is_decision=True)]
            steps(other, second, newest, board)  # it comes to the boundary now, and does not stay alone
            assert other.meets_at == 21
            later = [replace(one, engines=(replace(one.engines[0], step=21),)) for one in (first, second)]
            both = zip((leader, other), later, strict=True)
            found = [steps(machine, known, newest, board) for machine, known in both]
        assert board.values[0, "meet/8"] == (20 if is_there else 21)
        assert all(isinstance(one[-1], Enter) for one in found)

    def test_a_board_that_was_cut_off_does_not_change_what_was_proposed(self) -> None:
        """The leader connects again, and finds its own proposal there."""
        machine, board, newest = BoundaryMachine(stay), Board({}), world("a/0", "b/0")
        steps(machine, own(), newest, board)
        said = board.values[0, "change/1"]
        machine.board_is_lost("cut")
        found = steps(machine, own(attempt=8), newest, board)
        assert board.values[0, "change/1"] is said
        assert found[-1] == Prepare((from_record(Proposal, said[0]),))


class TestSwitch:
    """A switch within the generation, in a launch of fixed size: no generation is published."""

    def due(self, machine: BoundaryMachine, known: OwnFacts, board: Board, **held: Any) -> list[Action]:
        """All that a member does at a boundary; what it decides stands on the board."""
        engine, found = replace(known.engines[0], board=board, **held), list[Action]()
        known = replace(known, world=None, engines=(engine,))
        while actions := machine.advance(known, None, ()):
            found += actions
            if not all(isinstance(one, Post) and board.decide(one.key, one.value) is not None for one in actions):
                break
        return found

    def test_all_meet_at_the_step_that_rank_0_names(self) -> None:
        board, first, other = Board({}), BoundaryMachine(stay), BoundaryMachine(stay)
        assert not self.due(other, own("b/0"), board, pending=replace(ASKED, at=21))
        assert self.due(other, own("b/0"), board, pending=replace(ASKED, at=20)) == [Transact(0)]
        assert not self.due(first, own(), board, pending=ASKED)
        board.values[0, "prepared/8/all"] = ""
        assert not self.due(other, own("b/0"), board, pending=ASKED), "rank 0 names it"
        named = Post("meet/8", 21, is_decision=True, is_present=True)
        assert self.due(first, own(), board, pending=ASKED) == [named]
        for machine, known in ((first, own()), (other, own("b/0"))):
            assert not self.due(machine, known, board, pending=ASKED)
            assert self.due(machine, known, board, pending=ASKED, step=21) == [Transact(0)]

    def test_communicators_are_made_at_the_step_before_that_rank_0_names(self) -> None:
        """All prepared, its next one where that is before the switch, and where it lacks a communicator."""
        board, first, other, asked = Board({}), BoundaryMachine(stay), BoundaryMachine(stay), replace(ASKED, at=24)

        def due(machine: BoundaryMachine, known: OwnFacts, step: int, is_needed: bool = True) -> list[Action]:
            return self.due(machine, known, board, pending=asked, step=step, lacks=lambda: is_needed)

        assert not due(first, own(), 20)
        board.values[0, "prepared/8/all"] = ""
        assert not due(other, own("b/0"), 21), "rank 0 names it"
        assert due(first, own(), 21) == [Post("ahead/8/step", 22, is_decision=True, is_present=True)]
        assert due(first, own(), 22) == due(other, own("b/0"), 22) == [Connect(0)]
        for generation, step, is_needed in ((9, 23, True), (10, 21, False)):
            asked, key = replace(asked, generation=generation), f"ahead/{generation}/step"
            board.values[0, f"prepared/{generation}/all"] = ""
            assert due(first, own(), step, is_needed) == [Post(key, IN_THE_PAUSE, is_decision=True, is_present=True)]
            assert due(first, own(), 24) == due(other, own("b/0"), 24) == [Transact(0)]
        asked = replace(asked, generation=11)
        assert due(first, own(), 23)[0] == Post("ahead/11/step", IN_THE_PAUSE, is_decision=True, is_present=True), (
            "not all are prepared, and there is no step left"
        )

    def test_an_idle_member_follows(self) -> None:
        board, machine, idle = Board({}), BoundaryMachine(stay), own("c/0", is_idle=True)
        assert not self.due(machine, idle, board)
        board.values[0, "proposal/8"] = to_record(ASKED)
        assert self.due(machine, idle, board) == [Follow(0, ASKED)]
        assert not self.due(machine, idle, board, pending=ASKED)
        board.values[0, "ahead/8/connecting/0/0"] = None
        assert not self.due(machine, idle, board, pending=ASKED), "it has connected"
        assert self.due(machine, idle, board, pending=ASKED, lacks=lambda: True) == [Connect(0)]
        board.values[0, "switch/8/meet/0/0"] = None
        assert self.due(machine, idle, board, pending=ASKED) == [Transact(0)]

    @pytest.mark.parametrize("is_committed", [True, False])
    def test_an_idle_member_learns_how_a_switch_without_it_ended(self, is_committed: bool) -> None:
        board, machine, idle = Board({}), BoundaryMachine(stay), own("c/0", is_idle=True)
        asked = replace(ASKED, layout=PRESENT, members=(1, 0))
        board.values[0, "proposal/8"] = to_record(asked)
        assert not self.due(machine, idle, board)
        board.values[0, "record/8"] = {"commit": is_committed, "reason": ""}
        assert self.due(machine, idle, board) == [PassBy(0, asked, is_committed)]
        given_up = self.due(machine, idle, board, pending=ASKED)
        assert given_up == ([] if is_committed else [PassBy(0, ASKED, False)]), "before the meeting"

    def test_nothing_is_done_in_the_window_of_a_late_switch(self) -> None:
        asked = replace(ASKED, at=20, late=True)
        assert self.due(BoundaryMachine(stay), own(), Board({}), pending=asked) == [Transact(0)]
        assert not self.due(BoundaryMachine(stay), own(), Board({}), pending=asked, is_in_window=True)

    @pytest.mark.parametrize("late", [True, False])
    def test_below_min_no_switch_is_late(self, late: bool) -> None:
        """Its window would have no step; any other switch meets where all stand."""
        known = own(pending=replace(ASKED, late=late), board=Board({(0, "prepared/8/all"): ""}))
        paused = replace(known, world=NOW.model_copy(update={"paused": True}))
        named = Post("meet/8", 20, is_decision=True, is_present=True)
        assert BoundaryMachine(stay).advance(paused, None, ()) == ([] if late else [named])

    def test_each_engine_switches_at_its_own_boundary(self) -> None:
        """Members come and go at those of the first one alone."""
        first, second = own(), own(pending=replace(ASKED, at=20))
        both = replace(first, engines=(*first.engines, *second.engines))
        assert not BoundaryMachine(stay).advance(both, None, ())
        assert BoundaryMachine(stay).advance(replace(both, at=1), world(*MEMBERS), ()) == [Transact(1)]

    def test_a_switch_is_given_up_with_the_idle_member_that_it_needs(self) -> None:
        """Told to leave, it may go before it has read of it; the planned change would wait for the switch for ever."""
        known = replace(own(pending=ASKED), registry=Registry().extended(MEMBERS))
        said = Post("record/8", {"commit": False, "reason": "c/0 leaves"}, is_decision=True, is_present=True)
        newest = world("a/0", "b/0", reason="c/0 leaves")
        assert BoundaryMachine(stay).advance(known, newest, ()) == [said, GiveUpPreparation("c/0 leaves")]
        assert not BoundaryMachine(stay).advance(known, world(*MEMBERS), ()), "it comes first"
        narrower = replace(ASKED, layout=PRESENT.replace(data=1), members=(0,))
        asked = replace(known, engines=(replace(known.engines[0], pending=narrower),))
        assert not BoundaryMachine(stay).advance(asked, newest, ()), "it needs no other member"

    def test_a_change_that_was_proposed_comes_first(self) -> None:
        machine, board, newest = BoundaryMachine(wider), Board({}), world(*MEMBERS)
        board.values[0, "built/2"] = True
        found = steps(machine, own(), newest, board)
        assert isinstance(found[-1], Prepare)
        assert not machine.advance(own(pending=replace(ASKED, at=20)), newest, [board])


def wider(asked: DestinationFacts) -> list[Destination]:
    """With all three."""
    return [(PRESENT.replace(data=3), (0, 1, 2))]


class TestWindow:
    """A third member joins a/0 and b/0, by a late switch."""

    newest = world(*MEMBERS, survivors=2)

    def entered(self, known: OwnFacts, board: Board) -> tuple[BoundaryMachine, list[Action]]:
        """A leader, and what it does at the meeting."""
        machine = BoundaryMachine(wider)
        board.values[0, "built/2"] = True
        found = steps(machine, known, self.newest, board)
        board.values[0, "prepared/8/all"] = ""
        found += steps(machine, known, self.newest, board)
        later = replace(known, engines=(replace(known.engines[0], step=21),))
        return machine, [*found, *machine.advance(later, self.newest, [board])]

    def test_nothing_is_done_before_the_record(self) -> None:
        known = own(goes_late=lambda layout: True)
        machine, found = self.entered(known, Board({}))
        prepared = next(one for one in found if isinstance(one, Prepare))
        assert prepared.proposals[0].late and found[-1] == Transact()
        after = failure("a/0", "c/0", survivors=1).model_copy(update={"generation": 7})
        for newest in (self.newest, after):
            assert machine.advance(known, newest, [Board({})]) == []
        assert machine.transacted(known, True, "") == [Enter(self.newest, ANY, prepared.proposals)]

    def test_after_a_roll_back_the_next_attempt_is_not_late(self) -> None:
        board, known = Board({}), own(goes_late=lambda layout: True)
        machine, found = self.entered(known, board)
        assert isinstance(machine.transacted(known, False, "a bit flipped")[0], Spend)
        board.decide("record/8", {"commit": False, "reason": "a bit flipped"})
        again = replace(known, engines=(replace(known.engines[0], attempt=8),))
        found = steps(machine, again, self.newest, board)
        assert isinstance(found[-1], Prepare) and not found[-1].proposals[0].late

    @pytest.mark.parametrize("is_paused", [False, True])
    def test_where_no_step_is_made_nothing_is_late(self, is_paused: bool) -> None:
        """After a failure, or below MIN."""
        known = own(goes_late=lambda layout: True)
        before = replace(known, world=NOW.model_copy(update={"paused": is_paused}), is_aborted=not is_paused)
        machine = BoundaryMachine(wider)
        newest = world(*MEMBERS, survivors=2, change="planned" if is_paused else "failure")
        board = Board({(0, "built/2"): True, (0, "survivor/b/0"): {"holds": [], "released": []}})
        held = replace(before, engines=(replace(before.engines[0], layout=PRESENT.replace(data=1), members=(0,)),))
        found = steps(machine, before if is_paused else held, newest, board)
        assert isinstance(found[-1], Prepare) and not found[-1].proposals[0].late


def test_who_is_waited_for_is_named() -> None:
    machine, board, newest = BoundaryMachine(stay), Board({}), failure("a/0", "b/0", "c/0", survivors=2)
    assert machine.waits_for([]) == "the coordinator to publish a generation"
    steps(machine, own(is_aborted=True), newest, board)
    assert machine.waits_for([]) == "the board of generation 6"
    assert machine.waits_for([board]) == "generation 6: b/0 to say what they hold"
    board.values[0, "survivor/b/0"] = {"holds": [], "released": []}
    steps(machine, own(is_aborted=True, layout=PRESENT.replace(data=1), members=(0,)), newest, board)
    assert machine.waits_for([board]) == "generation 6: c/0 to come to their loops, and a layout for all"


def test_a_process_with_other_engines_than_the_job_has_cannot_join() -> None:
    board = Board({(0, "job"): {"engines": 2, "registry": to_record(Registry().extended(MEMBERS))}})
    found = steps(BoundaryMachine(stay), own("c/0", is_idle=True), world(*MEMBERS, survivors=2), board)
    assert isinstance(found[-1], Fail) and isinstance(found[-1].error, ConfigError)
    assert "it has made 1 engines, and the job's processes 2" in str(found[-1].error)


def test_a_process_whose_job_is_over_cannot_begin_anew() -> None:
    """It came late, and all who held the state have left meanwhile: nobody says what the job is doing."""
    found = steps(BoundaryMachine(stay), own("c/0", is_idle=True), world(*MEMBERS), Board({}))
    assert isinstance(found[-1], Fail) and "is over; start it again" in str(found[-1].error)


def test_who_is_passed_over_waits_and_leaves_when_it_is_told_to() -> None:
    machine, me = BoundaryMachine(stay), own("c/0", is_idle=True)
    without = world("a/0", "b/0", change="failure", survivors=2)
    assert not any(isinstance(action, EndProcess) for action in machine.advance(me, without, []))
    assert machine.advance(me, without, []) == []
    assert machine.advance(replace(me, is_leaving=True), without, []) == [EndProcess()]


def test_who_holds_what_nobody_asks_for_goes() -> None:
    """It is of a job that was begun by mistake, or missed that the others had let it go."""
    found = BoundaryMachine(stay).advance(own("b/0"), world("a/0", survivors=1), [])
    assert found[-2:] == [LetGo(), EndProcess()]


def test_a_leaver_whose_state_nobody_took_goes() -> None:
    """The others have formed a world from a checkpoint, and then a planned one: they wait for nobody outside of it."""
    newest = world("a/0", leaving=("b/0",), survivors=1)
    found = BoundaryMachine(stay).advance(own("b/0", is_aborted=True), newest, [])
    assert found[-2:] == [LetGo(), EndProcess()]
