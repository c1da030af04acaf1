"""A job on a virtual clock, whose routes of tokens drift, and the moves that balance makes in it.

Windows, decisions and judgements are the library's. Each layer's routes are a random walk of the experts' logarithmic
shares around a skew of Zipf's law; each window counts the tokens of the steps since the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.balance.advice import Advice, MoveCost, Situation, advise
from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.course import Course
from ds_dynatrain.balance.experts import busiest, rows_of
from ds_dynatrain.balance.profile import BESIDE, Floats, LayerCost
from ds_dynatrain.balance.window import COLUMNS, ERROR_COLUMNS, PASSES, Averaged, ExpertTimes, Measured, TimingWindow
from ds_dynatrain.space.layout import Layout

LAYERS, EXPERTS, INDICES = 2, 8, 2
STEP, OF_EXPERTS, COST = 0.5, 0.5, 1.0
"""Seconds of a balanced step, the share of experts in it, and seconds that a move costs."""
TIME = 50
"""Windows that a last move needs behind it to be counted."""
EVERY, TOKENS, NOISE = 6, 4096, 0.2
"""Steps from window to window, as where balance acts; tokens of a step, and by how much a step's routes are its own."""
SPLIT = np.array([1.0, 2.0]) / 3
"""The shares of the two passes in the time of both."""


@dataclass
class Move:
    """A move that was made at a step, from a layout; and what it has saved until the next one, in seconds."""

    step: int
    left: Layout
    is_back: bool
    saved: float = 0.0


def seconds(layout: Layout, shares: Floats) -> float:
    """Seconds of a step with these shares, [layers, experts]."""
    ratios = [busiest(each.tolist(), rows_of(layout, layer, EXPERTS)) for layer, each in enumerate(shares)]
    return STEP * (1 - OF_EXPERTS + OF_EXPERTS * float(np.mean(ratios)))


def drifting(seed: int, drift: float, windows: int = 1000, zipf: float = 1.0) -> tuple[list[Move], float, float]:
    """The moves that had time to pay, the mean seconds of a step, and those without moves.

    drift: the standard deviation of what each window adds to the logarithm of a share.
    """
    random, rules = np.random.default_rng(seed), BalanceConfig(mode="act", experts=True)
    begin = layout = Layout(data=INDICES, expert=INDICES, zero_stage=1)
    course = Course()
    start = -zipf * np.log(np.arange(1, EXPERTS + 1))
    logs = np.array([random.permutation(start) for _ in range(LAYERS)])
    averaged: Averaged | None = None
    moves, took, still = list[Move](), list[float](), list[float]()
    for step in range(EVERY, EVERY * (windows + 1), EVERY):
        logs += drift * random.normal(size=logs.shape)
        logs -= logs.mean(axis=1, keepdims=True)
        logs *= np.minimum(1.0, start.std() / logs.std(axis=1, keepdims=True))
        shares = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
        took.append(seconds(layout, shares))
        still.append(seconds(begin, shares))
        if moves:
            moves[-1].saved += EVERY * (seconds(moves[-1].left, shares) - took[-1])
        seen = shares * np.exp(NOISE / np.sqrt(EVERY) * random.normal(size=shares.shape))
        counts = [random.multinomial(EVERY * TOKENS, each / each.sum()).astype(np.float64) for each in seen]
        averaged = Averaged.after(averaged, _window(counts), (INDICES, 1), step, rules.least_gain, False)
        measured = Measured(took[-1] * (1 + 0.003 * random.normal()), 0.003 * took[-1], 16)
        course = _decided(course, rules, step, measured, layout, averaged)
        if (wanted := course.wanted) is not None:
            moves.append(Move(step, layout, wanted.back))
            course, layout = course.moved(wanted, step, layout, COST), wanted.layout
    if moves and moves[-1].step > EVERY * (windows - TIME):
        moves.pop()
    return moves, float(np.mean(took)), float(np.mean(still))


def _window(counts: Sequence[Floats]) -> TimingWindow:
    rows = np.zeros((1, len(COLUMNS)))
    rows[0, PASSES], rows[0, ERROR_COLUMNS] = STEP * (1 - OF_EXPERTS) * SPLIT, 1e-4
    passes = STEP * OF_EXPERTS / LAYERS * SPLIT
    experts = {str(layer): ExpertTimes(passes, each) for layer, each in enumerate(counts)}
    return TimingWindow(rows, (1.0,) * INDICES, np.zeros(len(BESIDE)), experts)


def _decided(
    course: Course, rules: BalanceConfig, step: int, measured: Measured, layout: Layout, averaged: Averaged
) -> Course:
    whole = LayerCost(name="model", forward_seconds=0.0, backward_seconds=0.0, kind_bytes={"weight": 4})
    dealt = {str(layer): (0, rows_of(layout, layer, EXPERTS)) for layer in range(LAYERS)}
    profile = averaged.profile([whole], "", dealt)

    def ask(course: Course) -> Advice:
        history, clock = course.history, measured.seconds
        at = Situation(layout, lambda _: 1, step, history, rules, step_seconds=clock, pipeline=False)
        return advise(profile, at, lambda *_: MoveCost(1, COST))

    return course.at(step, averaged.since, course.slow).after(rules, step, measured, layout, profile, ask)
