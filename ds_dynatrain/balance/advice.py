"""Which boundaries the members that there are would best have, and whether to move there: from what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.balance.choose import Members, Refuses, Search, choose
from ds_dynatrain.balance.cost import StepTime, step_time
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.decision import Decision, History, Offer, Rules, decide
from ds_dynatrain.balance.partition import PLENTY, Bools
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.space.layout import Layout

SLACK = 0.02
"""By so much the slowest stage may exceed the optimum where that moves fewer bytes."""


@dataclass(frozen=True)
class Move:
    """What it takes to get to a layout: bytes that travel, and seconds for which training stands still."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Advice:
    """Both boundaries, what a step takes in each, by prediction, and whether a move pays. `print` shows it.

    move: to the proposed layout. decision: the answer, with its arithmetic. Where nothing better is known the proposed
    layout is the present one.
    """

    present: Layout
    proposed: Layout
    present_time: StepTime
    proposed_time: StepTime
    move: Move
    decision: Decision

    @property
    def gain(self) -> float:
        """Share of the present step that is predicted to be saved."""
        present = self.present_time.seconds
        return 1 - self.proposed_time.seconds / present if present else 0.0

    def __str__(self) -> str:
        rows = [self._row("present", self.present, self.present_time)]
        if self.proposed == self.present:
            return "\n".join([*rows, "no boundaries are predicted to be faster"])
        rows.append(self._row("proposed", self.proposed, self.proposed_time))
        move = f"{self.move.nbytes} bytes would move, about {self.move.seconds:.3g} s"
        return "\n".join([*rows, f"{move}; {self.decision.why}"])

    @staticmethod
    def _row(name: str, layout: Layout, time: StepTime) -> str:
        busy = ", ".join(f"{1e3 * seconds:.4g}" for seconds in time.busy)
        cut = ",".join(map(str, layout.boundaries or ()))
        return f"{name} boundaries {cut}: a step takes {1e3 * time.seconds:.4g} ms, its stages compute {busy} ms"


@dataclass(frozen=True)
class Situation:
    """Where training is. present: with its boundaries. history: of decisions. memory_bytes: of a member."""

    present: Layout
    micro_batches: int
    step: int
    history: History
    rules: Rules
    memory_bytes: int = PLENTY


def advise(
    profile: Profile, at: Situation, move_to: Callable[[Layout], Move], refused: Refuses = lambda layout, deal: False
) -> Advice:
    """The best boundaries of the same layout, and whether to move to them.

    move_to: what that takes. refused: what a switch refuses. LayoutError if no boundaries fit into the memory.
    """
    present, deal = at.present, Deal.of(profile, at.present, at.micro_batches)
    members = Members(profile.speeds, at.memory_bytes, are_placed=True)
    search = Search(
        pipes=(present.pipe,),
        zero_stages=(present.zero_stage,),
        micro_batches=at.micro_batches,
        slack=SLACK,
        count=2,
    )
    now = step_time(profile, present, deal, profile.speeds)

    def is_other(layout: Layout, deal: Deal) -> bool:
        return layout.data != present.data or (layout != present and refused(layout, deal))

    best = choose(profile, present, members, search, is_other)[0]
    move = Move(0, 0.0) if best.layout == present else move_to(best.layout)
    error = _error(profile, deal, at.present, best.layout)
    offer = Offer(now.seconds, best.time.seconds, error, move.seconds)
    return Advice(present, best.layout, now, best.time, move, decide(at.rules, at.history, at.step, offer))


def _error(profile: Profile, deal: Deal, present: Layout, target: Layout) -> float:
    """Standard error of the difference of two predicted steps, as far as layers go that are on the slowest stage of one
    of them and not of both."""
    both = [_slowest(profile, layout) for layout in (present, target)]
    errors = [profile.seconds(name) for name in ("forward_error", "backward_error")]
    variance = sum(each**2 for each in errors) * (both[0] ^ both[1])
    samples = deal.micro_batches * deal.size / profile.micro_batch_size
    return float(samples * np.sqrt(variance.sum()))


def _slowest(profile: Profile, layout: Layout) -> Bools:
    """[layers], whether a layer is on the stage that computes the longest."""
    seconds = profile.seconds("forward_seconds") + profile.seconds("backward_seconds")
    cut: Sequence[int] = layout.boundaries or (0, len(profile.layers))
    start, stop = max(itertools.pairwise(cut), key=lambda each: float(seconds[each[0] : each[1]].sum()))
    place = np.arange(len(profile.layers))
    return (start <= place) & (place < stop)
