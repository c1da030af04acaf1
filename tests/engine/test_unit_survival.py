"""Is the whole state still there? Ranks of small layouts die, in all the ways that differ."""

from __future__ import annotations

import itertools

import pytest

from ds_dynatrain.engine.members.survival import Source, Survivor, whole_state
from ds_dynatrain.space import Layout


def alive(
    layout: Layout, ranks: dict[int, int], dirty: tuple[int, ...] = (), generation: int = 3
) -> dict[str, Survivor]:
    """Survivors of a world whose rank r is held by member 10 + r. ranks: the step at which each one stands."""
    return {
        f"n{rank}/0": Survivor(10 + rank, rank, generation, step, rank not in dirty, True, layout.to_dict())
        for rank, step in ranks.items()
    }


def steps(*ranks: int, at: int = 5) -> dict[int, int]:
    return dict.fromkeys(ranks, at)


class TestWithoutZero:
    layout = Layout(data=3, zero_stage=0)

    def test_any_one_that_lives_has_it_all(self) -> None:
        for rank in range(3):
            found = whole_state(alive(self.layout, steps(rank)))
            assert found == Source(Layout(data=1, zero_stage=0), (10 + rank,), 5)

    def test_all_that_live_keep_their_order(self) -> None:
        assert whole_state(alive(self.layout, steps(0, 2))) == Source(Layout(data=2, zero_stage=0), (10, 12), 5)

    def test_those_that_are_behind_come_as_newcomers(self) -> None:
        assert whole_state(alive(self.layout, {0: 5, 1: 6})) == Source(Layout(data=1, zero_stage=0), (11,), 6)

    def test_who_died_inside_of_its_step_holds_nothing(self) -> None:
        assert whole_state(alive(self.layout, {0: 5, 1: 5}, dirty=(1,))) == Source(Layout(zero_stage=0), (10,), 5)
        assert whole_state(alive(self.layout, {1: 5}, dirty=(1,))) is None

    def test_a_newer_world_counts(self) -> None:
        old, new = alive(self.layout, steps(0)), alive(Layout(data=2, zero_stage=0), steps(1), generation=4)
        assert whole_state({**old, **new}) == Source(Layout(zero_stage=0), (11,), 5)

    def test_idle_members_hold_nothing(self) -> None:
        assert whole_state({"a/0": Survivor(1, None, 3, 5, True, True, self.layout.to_dict())}) is None


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
        assert whole_state(alive(self.layout, {0: 6, 3: 5, 1: 5, 4: 5})) == Source(
            Layout(data=1, pipe=2, zero_stage=0), (11, 14), 5
        )

    def test_experts_ask_for_blocks(self) -> None:
        layout = Layout(data=4, expert=2, zero_stage=0)
        assert whole_state(alive(layout, steps(0, 1, 2))) == Source(layout.replace(data=2), (10, 11), 5)
        assert whole_state(alive(layout, steps(0, 2))) is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_zero_a_death_takes_state_with_it(stage: int) -> None:
    layout = Layout(data=2, zero_stage=stage)
    assert whole_state(alive(layout, steps(0))) is None
    assert whole_state(alive(layout, steps(0, 1))) == Source(layout, (10, 11), 5)
    assert whole_state(alive(layout, {0: 5, 1: 6})) is None
