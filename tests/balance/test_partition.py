"""The cut of layers into stages: against all cuts, an integer programme, and what it says if nothing fits."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.balance.partition import Problem, partition
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout
from tests.balance.cuts import (
    allowed,
    by_brute_force,
    by_milp,
    every_cut,
    greedy,
    moved_bytes,
    random_problem,
    stage_seconds,
)
from tests.sets import examples
from tools.diffusion import diffuse

CASES, MILP_CASES = examples(2400), examples(100)


def test_no_cut_is_better_in_thousands_of_cases() -> None:
    random = np.random.default_rng(5)
    solved = 0
    for _ in range(CASES):
        problem, present = random_problem(random)
        slack = float(random.choice([0, 0.02, 0.3]))
        best = by_brute_force(problem, present, slack)
        if best is None:
            with pytest.raises(LayoutError):
                partition(problem, present, slack)
            continue
        found = partition(problem, present, slack)
        assert allowed(problem, found.boundaries)
        squares = float((stage_seconds(problem, found.boundaries) ** 2).sum())
        assert (found.optimum, moved_bytes(problem, found.boundaries, present)) == best[:2]
        assert squares == pytest.approx(best[2], rel=1e-12)
        assert stage_seconds(problem, found.boundaries).max() <= found.optimum * (1 + slack)
        Layout(zero_stage=1, pipe=problem.stages, boundaries=found.boundaries)
        solved += 1
    assert CASES / 2 < solved < CASES * 23 / 24


def test_an_integer_programme_finds_no_better_one() -> None:
    random = np.random.default_rng(6)
    solved = 0
    for _ in range(MILP_CASES):
        problem, present = random_problem(random, 14)
        best = by_milp(problem, present, 0.05)
        if best is None:
            with pytest.raises(LayoutError):
                partition(problem, present, 0.05)
            continue
        found = partition(problem, present, 0.05)
        assert found.optimum == pytest.approx(best[0], abs=1e-6)
        assert moved_bytes(problem, found.boundaries, present) == best[1]
        solved += 1
    assert solved > MILP_CASES / 2


def test_a_greedy_probe_misses_a_cut_that_there_is() -> None:
    """The first stage could take two layers, which leaves the third to a stage that has no room for it."""
    problem = Problem.of([1, 1, 1, 1], 3, taken=[1, 1, 5, 1], room=[9, 1, 9])
    assert partition(problem).boundaries == (0, 1, 2, 4)
    assert greedy(problem) is None


def test_a_greedy_probe_is_exact_for_equal_stages() -> None:
    random = np.random.default_rng(7)
    for _ in range(60):
        problem = Problem.of(random.integers(1, 9, 7), int(random.integers(1, 6)))
        assert partition(problem).optimum == greedy(problem)


def test_stages_are_even_where_the_slowest_leaves_a_choice() -> None:
    assert partition(Problem.of([9, 1, 1, 1, 1], 3)).boundaries == (0, 1, 3, 5)
    assert partition(Problem.of([1] * 8, 4)).boundaries == (0, 2, 4, 6, 8)


def test_a_slow_stage_gets_fewer_layers() -> None:
    assert partition(Problem.of([1] * 9, 3, speeds=[1, 0.25, 1])).boundaries == (0, 4, 5, 9)


def test_slack_keeps_layers_where_they_are() -> None:
    problem = Problem.of([1.01, 1, 1, 1, 1, 1.01], 2, moved=7)
    assert partition(problem, (0, 3, 6)).boundaries == (0, 3, 6)
    problem = Problem.of([1.04, 1, 1, 1, 1, 1], 2, moved=7)
    assert partition(problem, (0, 3, 6), 0.02).boundaries == (0, 3, 6)
    problem = Problem.of([1, 1, 1, 1, 1, 1, 1.1], 2, moved=7)
    assert partition(problem, (0, 3, 7)).boundaries == (0, 4, 7)
    kept = partition(problem, (0, 3, 7), 0.1)
    assert kept.boundaries == (0, 3, 7)
    assert kept.optimum == 4 < stage_seconds(problem, kept.boundaries).max()


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_more_slack_never_moves_more(seed: int, slack: float) -> None:
    problem, present = random_problem(np.random.default_rng(seed))
    try:
        exact = partition(problem, present)
    except LayoutError:
        return
    loose = partition(problem, present, slack)
    assert loose.optimum == exact.optimum
    loose_bytes, exact_bytes = (moved_bytes(problem, each.boundaries, present) for each in (loose, exact))
    assert loose_bytes <= exact_bytes
    assert partition(problem, present, slack) == loose  # ties included


@pytest.mark.parametrize(
    ("problem", "words"),
    (
        (lambda: Problem.of([1, 1], 3), "2 layers cannot be cut into 3 stages"),
        (
            lambda: Problem.of([1, 1, 1], 2, taken=[1, 70, 1], room=50, names=["in", "wide", "out"]),
            r"'wide' \(layer 1\) takes 70 bytes at the least, and no stage has more than 50",
        ),
        (
            lambda: Problem.of([1] * 6, 2, taken=10, room=[20, 30]),
            r"all stages together end before 'layer 5' \(layer 5\) at the latest; that layer takes 10 bytes there, all "
            r"layers 60, and the stages have \[20, 30\]",
        ),
        (
            lambda: Problem.of([1] * 3, 2, taken=[1, 40, 20], room=[50, 19]),
            "and of what they may leave stage 1 can hold nothing; that layer takes 20 bytes there",
        ),
    ),
)
def test_what_is_said_if_nothing_fits(problem: object, words: str) -> None:
    assert callable(problem)
    with pytest.raises(LayoutError, match=words):
        partition(problem())


def test_exchanges_of_neighbours_end_where_no_pair_gains_and_may_be_far_from_the_optimum() -> None:
    random = np.random.default_rng(8)
    worst = 1.0
    for _ in range(300):
        layers = int(random.integers(4, 24))
        stages = int(random.integers(2, min(layers, 6)))
        seconds = random.lognormal(sigma=1, size=layers)
        start = tuple(np.linspace(0, layers, stages + 1).astype(int).tolist())
        found = diffuse(seconds, start)
        assert diffuse(seconds, found.boundaries).boundaries == found.boundaries
        assert found.boundaries in set(every_cut(layers, stages)) if layers < 9 else True
        ratio = found.seconds / partition(Problem.of(seconds, stages)).optimum
        assert ratio > 1 - 1e-12
        worst = max(worst, ratio)
    assert worst > 1.2


def test_it_is_quick_without_torch() -> None:
    """In processor time, which other work on the machine hardly changes."""
    for layers, stages, limit in ((128, 16, 0.05), (512, 64, 2.0)):
        random = np.random.default_rng(9)
        problem = Problem.of(random.random(layers), stages, taken=1, room=layers, moved=1)
        begin = time.thread_time()
        partition(problem, tuple(np.linspace(0, layers, stages + 1).astype(int).tolist()), 0.02)
        assert time.thread_time() - begin < limit
    code = "import ds_dynatrain.balance.partition, sys; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=120)
