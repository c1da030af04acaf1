"""Is the whole state still there? Ranks of small layouts die, in all the ways that differ."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ds_dynatrain.membership.survival import Survivor, WholeState, joint_loss, whole_copies, whole_state
from ds_dynatrain.membership.whole import Frozen, Had, Mark, WholeCopies, newest_whole
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space import Layout


def alive(
    layout: Layout, ranks: dict[int, int], dirty: tuple[int, ...] = (), generation: int = 3
) -> dict[str, Survivor]:
    """Survivors of a world whose rank r is held by member 10 + r. ranks: the step at which each one stands."""
    return {
        f"n{rank}/0": Survivor(10 + rank, rank, generation, step, rank not in dirty, True, layout)
        for rank, step in ranks.items()
    }


def steps(*ranks: int, at: int = 5) -> dict[int, int]:
    return dict.fromkeys(ranks, at)


class TestWithoutZero:
    layout = Layout(data=3, zero_stage=0)

    def test_any_one_that_lives_has_it_all(self) -> None:
        for rank in range(3):
            found = whole_state(alive(self.layout, steps(rank)))
            assert found == WholeState(Layout(data=1, zero_stage=0), (10 + rank,), 5)

    def test_all_that_live_keep_their_order(self) -> None:
        assert whole_state(alive(self.layout, steps(0, 2))) == WholeState(Layout(data=2, zero_stage=0), (10, 12), 5)

    def test_those_that_are_behind_come_as_newcomers(self) -> None:
        assert whole_state(alive(self.layout, {0: 5, 1: 6})) == WholeState(Layout(data=1, zero_stage=0), (11,), 6)

    def test_who_died_inside_of_its_step_holds_nothing(self) -> None:
        assert whole_state(alive(self.layout, {0: 5, 1: 5}, dirty=(1,))) == WholeState(Layout(zero_stage=0), (10,), 5)
        assert whole_state(alive(self.layout, {1: 5}, dirty=(1,))) is None

    def test_a_newer_world_counts(self) -> None:
        old, new = alive(self.layout, steps(0)), alive(Layout(data=2, zero_stage=0), steps(1), generation=4)
        assert whole_state({**old, **new}) == WholeState(Layout(zero_stage=0), (11,), 5)

    def test_ranks_of_different_layouts_are_not_put_together(self) -> None:
        """After two losses in a row some have taken what was left of the first one, and others not yet."""
        wide, narrow = Layout(data=3, zero_stage=0), Layout(data=2, zero_stage=0)
        said = {
            "a/0": Survivor(1, 0, 3, 5, True, True, narrow),
            "b/0": Survivor(2, None, 3, 4, True, True, Layout(data=1, zero_stage=0)),
            "c/0": Survivor(3, 2, 3, 5, True, True, wide),
        }
        assert whole_state(said) == WholeState(Layout(data=1, zero_stage=0), (1,), 5)

    def test_a_member_that_missed_a_generation_is_behind(self) -> None:
        """Worlds of different generations of the job may have one number, and other steps."""
        layout = Layout(data=2, zero_stage=1)
        said = {
            name: Survivor(number, rank, 3, step, True, True, layout, entered=entered)
            for name, number, rank, step, entered in (("a", 1, 0, 9, 4), ("b", 2, 0, 7, 5), ("c", 3, 1, 7, 5))
        }
        assert whole_state(said) == WholeState(layout, (2, 3), 7)

    def test_idle_members_hold_nothing(self) -> None:
        assert whole_state({"a/0": Survivor(1, None, 3, 5, True, True, self.layout)}) is None


class TestColumns:
    layout = Layout(data=3, pipe=2, zero_stage=0)

    def test_a_column_needs_all_its_stages(self) -> None:
        for gone in range(6):
            left = [rank for rank in range(6) if rank != gone]
            found = whole_state(alive(self.layout, steps(*left)))
            assert found is not None and found.layout == self.layout.replace(data=2)
            places = [self.layout.coordinate(member - 10) for member in found.members]
            assert [place["pipe"] for place in places] == [0, 0, 1, 1]
            assert places[0]["data"] == places[2]["data"] != places[1]["data"] == places[3]["data"]
            assert self.layout.coordinate(gone)["data"] not in {place["data"] for place in places}

    def test_no_column_is_complete(self) -> None:
        for kept in itertools.product((0, 3), (1, 4), (2, 5)):
            assert whole_state(alive(self.layout, steps(*kept))) is None

    def test_an_older_step_that_is_complete(self) -> None:
        """One stage of every column is ahead: the step before is whole nowhere but where both stages stand."""
        assert whole_state(alive(self.layout, {0: 6, 3: 5, 1: 5, 4: 5})) == WholeState(
            Layout(data=1, pipe=2, zero_stage=0), (11, 14), 5
        )

    def test_experts_ask_for_blocks(self) -> None:
        layout = Layout(data=4, expert=2, zero_stage=0)
        assert whole_state(alive(layout, steps(0, 1, 2))) == WholeState(layout.replace(data=2), (10, 11), 5)
        assert whole_state(alive(layout, steps(0, 2))) is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_zero_a_death_takes_state_with_it(stage: int) -> None:
    layout = Layout(data=2, zero_stage=stage)
    assert whole_state(alive(layout, steps(0))) is None
    assert whole_state(alive(layout, steps(0, 1))) == WholeState(layout, (10, 11), 5)
    assert whole_state(alive(layout, {0: 5, 1: 6})) is None


class TestCopies:
    """Four ranks in pairs: each copy has two holders, of two moments."""

    layout = Layout(data=4, zero_stage=2)
    buddy = (1, 0, 3, 2)

    def mark(self, step: int, generation: int = 3, segment: int = 0) -> Mark:
        return Mark(generation, f"{generation}.{segment}", 0, step, self.layout)

    def had(self, *living: int, steps: tuple[int, ...] = (4, 5)) -> dict[int, list[Had]]:
        """What members 10 + rank have: their own, and those of whom they are the buddy."""
        return {
            10 + rank: [Had(self.mark(step), one, one == rank) for step in steps for one in (rank, self.buddy[rank])]
            for rank in living
        }

    @pytest.mark.parametrize("dead", range(4))
    def test_one_death(self, dead: int) -> None:
        (found,) = newest_whole([self.had(*(rank for rank in range(4) if rank != dead))])
        holders = tuple(10 + (self.buddy[dead] if rank == dead else rank) for rank in range(4))
        assert found == WholeCopies(self.mark(5), holders)
        assert from_record(WholeCopies, to_record(found)) == found

    def test_two_deaths(self) -> None:
        """All is there unless they are each other's buddies."""
        for dead in itertools.combinations(range(4), 2):
            found = newest_whole([self.had(*(rank for rank in range(4) if rank not in dead))])
            assert (not found) == (self.buddy[dead[0]] == dead[1])

    def test_an_older_moment_that_is_whole(self) -> None:
        """The death came while copies of step 6 travelled: rank 0 has its own alone."""
        had = self.had(0, 1, 2)
        had[10].append(Had(self.mark(6), 0, is_own=True))
        assert newest_whole([had]) == (WholeCopies(self.mark(5), (10, 11, 12, 12)),)
        had[12] = [one for one in had[12] if one != Had(self.mark(5), 3)]  # damaged, so not said
        assert newest_whole([had]) == (WholeCopies(self.mark(4), (10, 11, 12, 12)),)

    def test_the_age_of_a_moment_is_not_its_step_alone(self) -> None:
        had = {10: [Had(self.mark(9), rank) for rank in range(4)]}
        had[11] = [Had(self.mark(2, generation=4), rank) for rank in range(4)]
        assert newest_whole([had]) == (WholeCopies(self.mark(2, generation=4), (11,) * 4),)

    def test_all_holders_give_about_as_much(self) -> None:
        had = {10 + one: [Had(self.mark(5), rank) for rank in range(4)] for one in range(3)}
        (found,) = newest_whole([had])
        assert sorted(found.holders) == [10, 10, 11, 12]

    def test_what_survivors_say(self) -> None:
        said = alive(self.layout, steps(0, 1))
        had = self.had(0, 1)
        for one in said:
            copies = tuple(had[said[one].number])
            said[one] = from_record(Survivor, to_record(replace(said[one], copies=copies)))
        assert whole_copies([said]) == ()
        assert joint_loss([said]) == (
            "no sound copy of ranks 2, 3 at step 5 is left: all members that had one died together"
        )
        assert joint_loss([alive(self.layout, steps(0, 1))]) == ""

    def idle(self, since: tuple[int, ...] | None = (), registered: int = 0) -> dict[str, Survivor]:
        """One that has whole copies of step 5, of a moment before any load."""
        copies = tuple(Had(self.mark(5), rank) for rank in range(4))
        of_it = Survivor(10, None, 3, 5, True, False, self.layout, copies, None, registered, since)
        return {"a/0": from_record(Survivor, to_record(of_it))}

    @pytest.mark.parametrize("since", [(), (2, 7), (3, 0)])
    def test_a_load_before_the_copies(self, since: tuple[int, ...]) -> None:
        (found,) = whole_copies([self.idle(since)])
        assert found.mark == self.mark(5)

    @pytest.mark.parametrize("since", [(3, 1), (4, 1)])
    @pytest.mark.parametrize("who", ["itself", "another"])
    def test_a_load_after_the_copies(self, who: str, since: tuple[int, ...]) -> None:
        """Whoever knows of it: what was replaced is no state to go on from."""
        other = replace(alive(self.layout, steps(1))["n1/0"], since=since)
        said = self.idle(since) if who == "itself" else {**self.idle(None), "b/0": other}
        assert whole_copies([said]) == ()
        assert "were taken before a checkpoint was loaded" in joint_loss([said])

    def test_nobody_can_know_of_loads(self) -> None:
        """Idle members, and another coordinator than when they came; one that worked knows."""
        assert whole_copies([self.idle(None)]) == ()
        assert "it is unknown whether a checkpoint was loaded" in joint_loss([self.idle(None)])
        (found,) = whole_copies([{**self.idle(None), **alive(self.layout, steps(1))}])
        assert found.mark == self.mark(5)

    def test_parameters_were_registered_anew(self) -> None:
        """Copies of the line before would be read as others."""
        assert whole_copies([self.idle(registered=1)]) == ()
        assert "or before parameters were registered again" in joint_loss([self.idle(registered=1)])

    def test_frozen_weights_come_from_a_replica_that_lives(self) -> None:
        said, had = alive(self.layout, steps(0, 1, 2)), self.had(0, 1, 2)
        for name, one in said.items():
            copies = tuple(had[one.number])
            said[name] = replace(one, copies=copies, frozen=(self.layout, one.number - 10))
        (found,) = whole_copies([said])
        assert found.members == (10, 11, 12)
        assert found.frozen == Frozen(Layout(data=3, zero_stage=0), (10, 11, 12))
        assert from_record(WholeCopies, to_record(found)) == found

    def test_frozen_weights_of_which_a_stage_is_gone(self) -> None:
        layout = Layout(data=1, pipe=2, zero_stage=1)
        mark = Mark(3, "3.0", 0, 5, layout)
        copies = tuple(Had(mark, rank) for rank in range(2))
        one = Survivor(10, 0, 3, 5, True, True, layout, copies, (layout, 0))
        assert whole_copies([{"a/0": one}]) == ()
        assert "some frozen weights of step 5 are lost" in joint_loss([{"a/0": one}])
        assert whole_copies([{"a/0": replace(one, frozen=None)}]) == (WholeCopies(mark, (10, 10)),)

    def test_frozen_weights_that_idle_members_do_not_have(self) -> None:
        """They have all copies, and all that worked are dead: the weights that nobody trains are gone."""
        layout = Layout(data=2, zero_stage=1)
        mark = Mark(3, "3.0", 0, 5, layout)
        had = {lacks: tuple(Had(mark, rank, lacks_frozen=lacks) for rank in range(2)) for lacks in (True, False)}
        idle = Survivor(10, None, 3, 5, True, False, layout, had[True])
        assert whole_copies([{"a/0": idle}]) == ()
        assert "some frozen weights of step 5 are lost" in joint_loss([{"a/0": idle}])
        worked = Survivor(11, 1, 3, 5, True, False, layout, (), (layout, 1))
        (found,) = whole_copies([{"a/0": idle, "b/0": worked}])
        assert found.holders == (10, 10) and found.frozen is not None and found.frozen.members == (11,)
        assert whole_copies([{"a/0": replace(idle, copies=had[False])}]) == (WholeCopies(mark, (10, 10)),)
        for alone in (Layout(data=1, zero_stage=1), Layout(data=2, zero_stage=3)):  # which have them in the copies
            ranks = range(alone.world_size)
            copies = tuple(Had(Mark(3, "3.0", 0, 5, alone), rank) for rank in ranks)
            stale = replace(idle, copies=copies, frozen=(layout, 0))
            (found,) = whole_copies([{"a/0": stale}])
            assert found.frozen is None


class TestCopiesOfSeveralEngines:
    """Of two: the first in pairs at stage 2, the other one at stage 1, which makes two steps in a round."""

    first, other = Layout(data=2, zero_stage=2), Layout(data=2, zero_stage=1)

    def marks(self, step: int) -> tuple[Mark, Mark]:
        """Of one boundary."""
        mark = Mark(3, "3.0", 0, step, self.first)
        return mark, Mark(7, "7.0", 0, 2 * step, self.other, mark.moment)

    def had(self, *steps: int, of_other: tuple[int, ...] | None = None) -> list[dict[int, list[Had]]]:
        """What member 10 has, its own and the dead one's, of each engine."""
        of_each = steps, steps if of_other is None else of_other
        return [
            {10: [Had(self.marks(step)[each], rank, rank == 0) for step in of_each[each] for rank in range(2)]}
            for each in range(2)
        ]

    def test_all_are_at_one_boundary(self) -> None:
        first, other = self.marks(5)
        assert first.moment == other.moment and from_record(Mark, to_record(other)) == other
        assert newest_whole(self.had(4, 5)) == (WholeCopies(first, (10, 10)), WholeCopies(other, (10, 10)))

    def test_a_newer_one_of_one_engine_does_not_count(self) -> None:
        """The death came while the other one's copies travelled."""
        assert [whole.mark for whole in newest_whole(self.had(4, 5, of_other=(3, 4)))] == [*self.marks(4)]

    def test_no_boundary_in_common(self) -> None:
        assert newest_whole(self.had(4, 5, of_other=(2, 3))) == newest_whole(self.had(4, 5, of_other=())) == ()

    def test_whose_loss_it_was(self) -> None:
        """Of the engine that lacks a copy."""
        said = [alive(layout, steps(0)) for layout in (self.first, self.other)]
        for each, had in enumerate(self.had(5)):
            kept = had[10] if each == 0 else had[10][:1]
            said[each]["n0/0"] = replace(said[each]["n0/0"], copies=tuple(kept))
        assert whole_copies(said) == ()
        found = joint_loss(said, lambda engine, mark, rank: f"of engine {engine}")
        assert found.startswith("no sound copy of rank 1 (of engine 1) at step 10 is left")
