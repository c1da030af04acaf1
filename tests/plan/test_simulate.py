"""A plan that is wrong in one place is found out when it is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ds_dynatrain.plan import MemberPlan, Moves, SwitchPlan, plan_switch
from ds_dynatrain.space import FROZEN, Layout, LogicalTensor, ZeroRules
from tests.plan.simulate import play
from tests.space.models import space

TENSORS = [LogicalTensor("a", (7, 5)), LogicalTensor("b", (3,), 1), LogicalTensor("f", (5,), FROZEN)]
Change = Callable[[Moves], Moves]


@dataclass(frozen=True, eq=False)
class Broken(SwitchPlan):
    """A plan whose moves are changed, of exchanges alike at both ends. part: the field of `MemberPlan`."""

    part: str = ""
    change: Change = Moves.canonical

    def for_member(self, member: int) -> MemberPlan:
        """The member's part, with the change."""
        plan = super().for_member(member)
        if self.part != "rounds":
            return replace(plan, **{self.part: self.change(getattr(plan, self.part))})
        changed = [
            replace(exchange, sends=self.change(exchange.sends), receives=self.change(exchange.receives))
            for exchange in plan.rounds
        ]
        return replace(plan, rounds=tuple(changed))


def lost(moves: Moves) -> Moves:
    """The last run ends one element early."""
    length = moves.length.copy()
    length[-1:] -= 1
    return replace(moves, length=length).select(np.flatnonzero(length))


def twice(moves: Moves) -> Moves:
    """The first run comes again."""
    return moves.select(np.append(np.arange(len(moves)), np.zeros(min(len(moves), 1), np.int64)))


def shifted(name: str, by: int) -> Change:
    """One column is another number in the last run."""

    def change(moves: Moves) -> Moves:
        column = getattr(moves, name).copy()
        column[-1:] += by
        return replace(moves, **{name: column})

    return change


CHANGES = {
    "lost": (lost, "is not written|reads something else"),  # a weight is cast from what is missing
    "twice": (twice, "writes twice"),
    "another coordinate": (shifted("start", 1), "reads something else"),
    "read behind": (shifted("source_offset", 1), "reads something else|is not in"),
    "read before": (shifted("source_offset", -1), "reads something else|is not in"),
    "written behind": (shifted("target_offset", 1), "writes twice|is not in|is not written"),
    "written before": (shifted("target_offset", -1), "writes twice|is not in|is not written"),
    "too long": (shifted("length", 1), "reads something else|writes twice|is not in"),
}


@pytest.mark.parametrize("part", ["local", "rounds", "derived"])
@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_one_wrong_run_is_found(change: Change, words: str, part: str) -> None:
    vps = space(TENSORS, ZeroRules(), Layout(zero_stage=3, data=3), (0, 1, 2))
    plan = plan_switch(vps, Layout(zero_stage=1, data=2), (0, 3), ("weight", "master"))
    play(plan)
    assert all(len(getattr(plan.for_member(0), field)) for field in ("local", "rounds", "derived"))
    with pytest.raises(AssertionError, match=words):
        play(Broken(plan.sides, part, change))


def test_a_member_that_is_left_out_is_found() -> None:
    vps = space(TENSORS, ZeroRules(), Layout(zero_stage=1, data=2), (0, 1))
    plan = plan_switch(vps, Layout(zero_stage=1, data=3), (0, 1, 2), ("master", "exp_avg"))
    with pytest.raises(AssertionError, match=r"member 2: .* is not written"):
        play(Broken(plan.sides, "rounds", lambda moves: moves.select(np.flatnonzero(moves.target != 2))))


def test_padding_is_not_written() -> None:
    """Of stage 3, a sub-group of two tensors: behind a part of the first one there is room that no element has."""
    tensors = [LogicalTensor("a", (5,)), LogicalTensor("b", (3,))]
    vps = space(tensors, ZeroRules(), Layout(zero_stage=1, data=1), (0,))
    plan = plan_switch(vps, Layout(zero_stage=3, data=3), (0, 1, 2), ("master",))

    def longer(moves: Moves) -> Moves:
        """The runs that end with the first tensor reach one element into the second one's coordinates."""
        return replace(moves, length=moves.length + (moves.start + moves.length == 5))

    play(plan)
    with pytest.raises(AssertionError, match="is padding"):
        play(Broken(plan.sides, "rounds", longer))
