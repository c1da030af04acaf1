"""When to move: each rule by a table, the judgement of a move, and whole runs with noise and with costs that swing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from ds_dynatrain.balance.config import BalanceConfig as Rules
from ds_dynatrain.balance.decision import (
    Answer,
    BetterLayout,
    DecisionHistory,
    Drift,
    MoveVerdict,
    PastMove,
    decide,
    drift_of,
    judge,
)
from ds_dynatrain.balance.partition import Problem, partition, uniform
from ds_dynatrain.balance.profile import Floats
from ds_dynatrain.space.layout import Layout
from tests.balance.cuts import stage_seconds
from tests.sets import one_in

RULES = Rules()
FRESH = DecisionHistory()
GOOD = dict(present_seconds=10.0, target_seconds=8.0, error_seconds=0.1, cost_seconds=20.0, lost_seconds=40.0)
# 0.2 of a step; 40 s are lost, as much as it costs there and back


@pytest.mark.parametrize(
    ("answer", "offer", "history", "rules"),
    [
        (Answer.ACT, GOOD, FRESH, RULES),
        (Answer.SMALL, dict(GOOD, target_seconds=9.71), FRESH, RULES),
        (Answer.ACT, dict(GOOD, target_seconds=9.69), FRESH, RULES),
        (Answer.SMALL, dict(GOOD, target_seconds=10.0), FRESH, Rules(least_gain=0)),
        (Answer.SMALL, dict(GOOD, target_seconds=12.0), FRESH, Rules(least_gain=0)),
        (Answer.SMALL, dict.fromkeys(GOOD, 0.0), FRESH, RULES),
        (Answer.NOISE, dict(GOOD, error_seconds=0.67), FRESH, RULES),
        (Answer.ACT, dict(GOOD, error_seconds=0.66), FRESH, RULES),
        (Answer.DEAR, dict(GOOD, cost_seconds=20.1), FRESH, RULES),
        (Answer.DEAR, dict(GOOD, lost_seconds=39.0), FRESH, RULES),
        (Answer.ACT, dict(GOOD, lost_seconds=20.0), FRESH, Rules(safety=1)),
        (Answer.ACT, dict(GOOD, lost_seconds=0.0), FRESH, Rules(safety=0)),
        (Answer.OPEN, GOOD, dataclasses.replace(FRESH, open=PastMove(0.1, 9.0, 0.1)), RULES),
        (Answer.SMALL, GOOD, dataclasses.replace(FRESH, factor=0.1), RULES),
        (Answer.DEAR, GOOD, dataclasses.replace(FRESH, factor=0.4), RULES),
        (Answer.ACT, dict(GOOD, lost_seconds=100.0), dataclasses.replace(FRESH, factor=0.4), RULES),
    ],
)
def test_the_table(answer: Answer, offer: dict[str, float], history: DecisionHistory, rules: Rules) -> None:
    found = decide(rules, history, **offer)
    assert found.answer is answer and found.acts is (answer is Answer.ACT)
    assert found.why.startswith(f"{answer.value}: ")


def test_why_says_the_arithmetic() -> None:
    assert decide(RULES, FRESH, **dict(GOOD, cost_seconds=200)).why == (
        "too little time is lost so far: 40 s, safety 2 × cost 200 s = 400 s"
    )


def test_time_lost_is_never_below_nothing() -> None:
    layout = Layout(zero_stage=1)
    (found,) = dataclasses.replace(FRESH, step=7, since=3).rivals_at(10, BetterLayout(layout), lambda _: 0.5)
    assert found.lost_seconds == 0.5 * 7, "as long as costs are as they are"
    history = dataclasses.replace(FRESH, step=10, rivals=(found, BetterLayout(layout, (1,))))
    *_, found = history.rivals_at(20, BetterLayout(layout), lambda _: -0.2)
    assert found == BetterLayout(layout, (), 1.5)
    assert history.rivals_at(20, BetterLayout(layout), lambda _: -1.0)[-1].lost_seconds == 0
    assert history.rivals_at(20, BetterLayout(layout, (1,)), lambda _: 0.1)[-1] == BetterLayout(layout, (1,), 1.0)


MOVE = PastMove(0.2, 10.0, 0.1)


@pytest.mark.parametrize(
    ("seconds", "drift", "verdict", "factor"),
    [
        (8.0, Drift.SAME, MoveVerdict.KEPT, 1.0),
        (8.9, Drift.SAME, MoveVerdict.KEPT, 1.0),
        (9.2, Drift.SAME, MoveVerdict.LESS, 0.4),
        (10.4, Drift.SAME, MoveVerdict.LESS, 0.1),  # slower by less than three standard errors
        (10.5, Drift.SAME, MoveVerdict.BACK, 0.5),
        (8.0, Drift.LONGER, MoveVerdict.KEPT, 1.0),  # faster all the same
        (8.0, Drift.SHORTER, MoveVerdict.UNKNOWN, 1.0),
        (8.0, Drift.MIXED, MoveVerdict.UNKNOWN, 1.0),
        (9.2, Drift.LONGER, MoveVerdict.UNKNOWN, 1.0),
        (9.2, Drift.SHORTER, MoveVerdict.UNKNOWN, 1.0),
        (15.0, Drift.LONGER, MoveVerdict.UNKNOWN, 1.0),
        (15.0, Drift.SHORTER, MoveVerdict.BACK, 0.5),  # slower all the same
        (15.0, Drift.MIXED, MoveVerdict.UNKNOWN, 1.0),
    ],
)
def test_the_next_window_judges(seconds: float, drift: Drift, verdict: MoveVerdict, factor: float) -> None:
    found, after = judge(FRESH, MOVE, seconds, 0.1, drift)
    assert found is verdict and after.factor == pytest.approx(factor) and after.open is None


def test_each_move_back_halves_what_predictions_count_for() -> None:
    history, factors = FRESH, []
    for _ in range(5):
        _, history = judge(history, MOVE, 12.0, 0.1)
        factors.append(history.factor)
    assert factors == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]
    assert judge(history, MOVE, 8.0, 0.1)[1].factor == 1


def costs_differ(before: Floats, after: Floats, error: Floats, least: float) -> bool:
    return drift_of(before, after, error, least) is not Drift.SAME


def test_costs_differ() -> None:
    before, error = np.ones(10), np.full(10, 0.02)
    assert not costs_differ(before, before * 1.05, error, 0.03)  # each may be noise
    one = before.copy()
    one[3] = 1.5
    assert costs_differ(before, one, error, 0.03) and not costs_differ(before, one, error, 0.06)
    assert drift_of(before, one, error, 0.03) is Drift.LONGER and drift_of(one, before, error, 0.03) is Drift.SHORTER
    one[4:6] = 0.8, 0.9
    assert drift_of(before, one, error, 0.03) is Drift.MIXED


def stages_at(cut: tuple[int, ...]) -> Layout:
    return Layout(pipe=len(cut) - 1, zero_stage=1, boundaries=cut)


@dataclass
class Run:
    """A pipeline whose layers' seconds are known, measured with noise in every window, and moved as the table says.

    What is known is the mean of all windows since costs changed.
    """

    costs: Callable[[int], Floats]
    rules: Rules
    noise: float = 0.0
    member_noise: float = 0.0
    cost_seconds: float = 1.0
    stages: int = 4
    every: int = 10
    micro_batches: int = 8
    seed: int = 0
    moves: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    verdicts: list[MoveVerdict] = field(default_factory=list)

    def go(self, steps: int = 2000) -> Run:
        random, cut = np.random.default_rng(self.seed), uniform(len(self.costs(0)), self.stages)
        history, former, windows = DecisionHistory(), cut, list[tuple[Floats, Floats]]()
        for step in range(self.every, steps, self.every):
            true = self.costs(step)
            paces = 1 + self.member_noise * random.standard_normal(self.stages).clip(-3, 3)
            seconds = true * (1 + self.noise * random.standard_normal(len(true)).clip(-3, 3))
            windows.append((seconds, paces))
            mean = np.mean([each for each, _ in windows[:-1]] or [seconds], axis=0)
            differ = costs_differ(mean, seconds, np.sqrt(2) * self.noise * mean + 1e-12, self.rules.least_gain)
            if differ:
                history, windows = dataclasses.replace(history, since=history.step), windows[-1:]
            now = Problem.of(seconds, self.stages, speeds=1 / paces)
            if history.open is not None:
                drift = Drift.MIXED if differ else Drift.SAME
                verdict, history = judge(history, history.open, *self.slowest(now, cut, 1), drift)
                self.verdicts.append(verdict)
                if verdict is MoveVerdict.BACK:
                    history, cut = history.restarted(step), former
                    self.moves.append((step, cut))
                    continue
            known, pace = (np.mean(each, axis=0) for each in zip(*windows, strict=True))
            problem = Problem.of(known, self.stages, speeds=1 / pace)
            best = partition(problem, cut).boundaries
            (took, error), (target, target_error) = (self.slowest(problem, each, len(windows)) for each in (cut, best))
            rivals = history.rivals_at(step, BetterLayout(stages_at(best)), partial(self.saved, problem, cut))
            lost = rivals[-1].lost_seconds
            noise = float(np.hypot(error, target_error))
            decision = decide(self.rules, history, took, target, noise, self.cost_seconds, lost)
            if decision.answer in (Answer.SMALL, Answer.NOISE):
                rivals = rivals[: len(history.rivals)]
            history = dataclasses.replace(history, step=step, rivals=rivals)
            if decision.acts:
                move = PastMove(1 - target / took, *self.slowest(now, cut, 1))
                history = dataclasses.replace(history.restarted(step, stages_at(cut)), open=move)
                former, cut = cut, best
                self.moves.append((step, cut))
        return self

    def saved(self, problem: Problem, cut: tuple[int, ...], rival: BetterLayout) -> float:
        """Seconds of a step that a rival's boundaries save."""
        return self.slowest(problem, cut, 1)[0] - self.slowest(problem, rival.layout.boundaries or (), 1)[0]

    def slowest(self, problem: Problem, cut: tuple[int, ...], windows: int) -> tuple[float, float]:
        """Seconds of a step by the slowest stage alone, and their standard error from so many windows."""
        loads = stage_seconds(problem, cut) * self.micro_batches
        stage = int(loads.argmax())
        layers = problem.seconds[stage, cut[stage] : cut[stage + 1]] * self.micro_batches
        error = np.hypot(self.noise * np.sqrt((layers**2).sum()), self.member_noise * loads[stage])
        return float(loads[stage]), float(error / np.sqrt(windows))


@pytest.mark.parametrize("layers", one_in(3, [24, 48, 128]))
@pytest.mark.parametrize(("noise", "member_noise"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.1)])
def test_noise_moves_nothing(layers: int, noise: float, member_noise: float) -> None:
    """10 % on every layer or every member, 2,000 steps, a move that costs nothing at all."""
    for seed in range(5):
        run = Run(lambda step: np.full(layers, 0.01), Rules(), noise, member_noise, cost_seconds=0.0, seed=seed)
        assert run.go().moves == []


def swinging(period: int, layers: int = 24) -> Callable[[int], Floats]:
    """The first half costs twice as much as the second one, then the second, and so on."""
    first = np.repeat([0.02, 0.01], layers // 2)
    return lambda step: first if step // period % 2 == 0 else first[::-1]


@pytest.mark.parametrize("period", [15, 40, 100, 250])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_costs_that_swing_faster_than_a_move_pays(period: int, noise: float) -> None:
    """A move saves 0.64 s a step at the most (1.44 → 0.8): twice its cost takes more steps than costs stay.

    For how long they stay is seen to within a window, 10 steps.
    """
    cost = 0.64 * (period + 10) / 2 * 1.1
    run = Run(swinging(period), Rules(), noise, cost_seconds=cost).go()
    assert len(run.moves) <= 1


def test_costs_that_swing_slowly_are_followed() -> None:
    run = Run(swinging(500), Rules(), cost_seconds=2.0).go()
    assert len(run.moves) == 4 and set(run.verdicts) == {MoveVerdict.KEPT}


def test_a_change_that_stays_is_answered_once() -> None:
    before, after = np.full(24, 0.02), np.where(np.arange(24) < 12, 0.01, 0.02)
    run = Run(lambda step: before if step < 300 else after, Rules(), noise=0.02, cost_seconds=2.0).go()
    assert len(run.moves) == 1 and run.verdicts == [MoveVerdict.KEPT]
    assert 300 <= run.moves[0][0] <= 450
