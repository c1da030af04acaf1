"""Problems of cutting layers, and their answers by trying every cut, or by a solver that shares nothing with ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from ds_dynatrain.balance.partition import Problem


def random_problem(random: np.random.Generator, most_layers: int = 9) -> tuple[Problem, tuple[int, ...]]:
    """A problem with speeds and rooms that are often too tight, and present boundaries."""
    layers = int(random.integers(1, most_layers + 1))
    stages = int(random.integers(1, min(layers, 5) + 1))
    whole = random.random() < 0.5
    seconds = (
        random.integers(0, 9, layers).astype(float) if whole else random.random(layers) * random.choice([1, 5], layers)
    )
    taken = random.integers(0, 10, layers)
    held = -(-int(taken.sum()) // stages)
    problem = Problem.of(
        seconds,
        stages,
        speeds=random.choice([0.5, 1, 2, 4], stages) if random.random() < 0.7 else 1,
        taken=taken + random.integers(0, 3, (stages, 1)) * (random.random() < 0.5),
        room=random.integers(held, 3 * held + 8, stages) if random.random() < 0.8 else 10**9,
        moved=random.integers(0, 4, layers),
    )
    before = int(random.integers(1, layers + 1))
    present = (0, *sorted(random.choice(np.arange(1, layers), before - 1, replace=False).tolist()), layers)
    return problem, present


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All boundaries that there are."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def allowed(problem: Problem, cut: tuple[int, ...]) -> bool:
    """Whether each stage has room."""
    for stage, (start, stop) in enumerate(pairwise(cut)):
        if problem.taken[stage, start:stop].sum() > problem.room[stage]:
            return False
    return True


def by_brute_force(problem: Problem, present: tuple[int, ...], slack: float) -> tuple[float, int, float] | None:
    """(least seconds of the slowest stage, fewest bytes within the slack, least sum of squares among those)."""
    cuts = [cut for cut in every_cut(problem.layers, problem.stages) if allowed(problem, cut)]
    if not cuts:
        return None
    loads = {cut: stage_seconds(problem, cut) for cut in cuts}
    least = min(float(each.max()) for each in loads.values())
    near = [cut for cut in cuts if loads[cut].max() <= least * (1 + slack)]
    moved = {cut: moved_bytes(problem, cut, present) for cut in near}
    fewest = min(moved.values())
    squares = min(float((loads[cut] ** 2).sum()) for cut in near if moved[cut] == fewest)
    return least, fewest, squares


def stage_seconds(problem: Problem, cut: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """The seconds of each stage, added in the order in which `partition` adds them."""
    sums = np.concatenate((np.zeros((problem.stages, 1)), np.cumsum(problem.seconds, axis=1)), axis=1)
    return np.array([sums[stage, stop] - sums[stage, start] for stage, (start, stop) in enumerate(pairwise(cut))])


def moved_bytes(problem: Problem, cut: tuple[int, ...], present: tuple[int, ...]) -> int:
    """The bytes of the layers whose stage changes."""
    before, after = _stage_of(present), _stage_of(cut)
    return sum(int(size) for layer, size in enumerate(problem.moved) if before[layer] != after[layer])


def _stage_of(cut: tuple[int, ...]) -> list[int]:
    return [stage for stage, (start, stop) in enumerate(pairwise(cut)) for _ in range(start, stop)]


def by_milp(problem: Problem, present: tuple[int, ...], slack: float) -> tuple[float, int] | None:
    """(least seconds, fewest bytes within the slack) as an integer programme: a 0 or 1 for each (layer, stage)."""
    stages, layers = problem.stages, problem.layers
    rows, low, high = [], [], []

    def add(row: Any, least: float, most: float) -> None:
        rows.append(np.append(np.asarray(row, dtype=float).ravel(), 0.0))
        low.append(least)
        high.append(most)

    def only(stage: slice | int, layer: slice | int, values: Any = 1.0) -> Any:
        row = np.zeros((stages, layers))
        row[stage, layer] = values
        return row

    for layer in range(layers):
        add(only(slice(None), layer), 1, 1)
    number = np.arange(stages)
    for layer in range(layers - 1):  # the number of the stage never falls
        add(only(slice(None), layer + 1, number) - only(slice(None), layer, number), 0, stages)
    for stage in range(stages):
        add(only(stage, slice(None)), 1, layers)
        add(only(stage, slice(None), problem.taken[stage]), 0, float(problem.room[stage]))
    first_load = len(rows)
    for stage in range(stages):
        add(only(stage, slice(None), problem.seconds[stage]), -np.inf, 0)
        rows[-1][-1] = -1

    def solved(price: Any) -> Any:
        count = stages * layers
        bounds = Bounds(np.zeros(count + 1), np.append(np.ones(count), np.inf))
        within = LinearConstraint(np.array(rows), low, high)
        whole = np.append(np.ones(count), 0)
        return milp(price, integrality=whole, bounds=bounds, constraints=within, options={"mip_rel_gap": 0})

    first = solved(np.append(np.zeros(stages * layers), 1))
    if not first.success:
        return None
    for place in range(first_load, len(rows)):
        rows[place][-1], high[place] = 0, first.fun * (1 + slack) + 1e-6
    away = np.array(_stage_of(present))[None, :] != number[:, None]
    second = solved(np.append((away * problem.moved).ravel(), 0))
    return float(first.fun), round(second.fun)


def greedy(problem: Problem) -> float | None:
    """What bisection of the bottleneck with a greedy probe finds: each stage takes as many layers as it can."""
    found = None
    for limit in sorted(
        {float(stage_seconds(problem, cut).max()) for cut in every_cut(problem.layers, problem.stages)}
    ):
        if _probe(problem, limit):
            found = limit
            break
    return found


def _probe(problem: Problem, limit: float) -> bool:
    start = 0
    for stage in range(problem.stages):
        left = problem.stages - stage - 1
        reach = [
            stop
            for stop in range(start + 1, problem.layers - left + 1)
            if problem.seconds[stage, start:stop].sum() <= limit + 1e-12
            and problem.taken[stage, start:stop].sum() <= problem.room[stage]
        ]
        if not reach:
            return False
        start = max(reach)
    return start == problem.layers
