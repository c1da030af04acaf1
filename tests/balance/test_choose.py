"""The choice of a layout: against all layouts with all cuts, and what it says if nothing fits."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_dynatrain.balance.choose import Members, Search, choose, problem_of
from ds_dynatrain.balance.deal import Deal, peak_bytes
from ds_dynatrain.balance.partition import partition
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import Link, LinkCosts, step_time
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.layout import Layout
from tests.balance.cuts import allowed, by_milp, every_cut, stage_seconds
from tests.balance.profiles import layer, profile
from tests.sets import examples

CASES, MILP_CASES = examples(80), examples(100)
ALL = 10**6
ONE = Layout(zero_stage=1)


def random_case(random: np.random.Generator, most_layers: int = 6) -> tuple[Profile, Members, Layout]:
    count = int(random.integers(1, most_layers + 1))
    layers = tuple(
        layer(
            f"b{place}",
            float(random.random() + 0.1),
            int(random.integers(10, 100)),
            trained=place == 0 or random.random() < 0.8,
            optimizer_seconds=float(random.random()),
            activation_bytes=int(random.integers(0, 2000)),
        )
        for place in range(count)
    )
    measured = Profile(layers=layers, train_batch_size=int(random.choice([4, 6, 8])), micro_batch_size=2)
    members = int(random.integers(1, 6))
    speeds = tuple(random.choice([0.5, 1.0, 2.0], members).tolist()) if random.random() < 0.5 else (1.0,) * members
    state = sum(each.total_bytes for each in layers)
    room = int(random.integers(state // 3, 3 * state) + 5000)
    links = LinkCosts(Link(float(random.choice([1e3, 1e5])), 0.01), Link(500.0, 0.1), per_node=2)
    cut = (0, int(random.integers(1, count)), count) if count > 1 and members > 1 else None
    present = Layout(zero_stage=1, pipe=2 if cut else 1, boundaries=cut)
    return measured, Members(speeds, room, links), present


def by_brute_force(
    measured: Profile, members: Members, horizon: float, cost: float, present: Layout, pipeline: bool
) -> dict[Any, tuple[float, float]]:
    """(pipe, data, stage) -> (least seconds of a stage, least seconds of a step over all cuts)."""
    found: dict[Any, tuple[float, float]] = {}
    count, batch = len(measured.layers), measured.train_batch_size
    for pipe, data, zero_stage in itertools.product(range(1, count + 1), range(1, batch + 1), range(4)):
        if pipe * data > len(members.speeds) or (zero_stage > 1 if pipeline else pipe > 1):
            continue
        layout = Layout(zero_stage=zero_stage, pipe=pipe, data=data)
        deal = Deal.of(measured, layout, None, pipeline)
        problem = problem_of(measured, layout, deal, members)
        working = sorted(range(len(members.speeds)), key=lambda each: (-members.speeds[each], each))
        speeds = [members.speeds[each] for each in working[: pipe * data]]
        for cut in every_cut(count, pipe):
            each = layout.replace(boundaries=cut if pipe > 1 else None)
            fits = max(peak_bytes(measured, each, deal)) <= members.memory_bytes
            assert fits == allowed(problem, cut)
            if not fits:
                continue
            links = dataclasses.replace(members.links, members=tuple(working[: pipe * data]))
            seconds = step_time(measured, each, deal, speeds, links).seconds
            seconds += 0 if each == present else cost / horizon
            key, load = (pipe, data, zero_stage), float(stage_seconds(problem, cut).max())
            load = load if allowed(problem, cut) else np.inf
            before = found.get(key, (np.inf, np.inf))
            found[key] = min(before[0], load), min(before[1], seconds)
    return found


def test_no_layout_is_left_out_and_none_is_better() -> None:
    random = np.random.default_rng(11)
    worse, solved = [], 0
    for _ in range(CASES):
        measured, members, present = random_case(random)
        measured = dataclasses.replace(measured, micro_batch_size=int(random.choice([1, 2])))
        horizon, cost = 20.0, float(random.choice([0, 5]))
        pipeline = bool(random.random() < 0.7)
        search = Search(pipeline=pipeline, horizon_steps=horizon, count=ALL)
        best = by_brute_force(measured, members, horizon, cost, present, pipeline)
        asked: dict[str, Any] = {"switch_seconds": lambda layout, cost=cost: cost}
        if not best:
            with pytest.raises(LayoutError):
                choose(measured, present, members, search, **asked)
            continue
        found = choose(measured, present, members, search, **asked)
        alike = [each for each in found if each.layout.shares is None]
        assert {_key(each) for each in alike} == set(best)
        for each in alike:
            problem = problem_of(measured, each.layout, each.deal, members)
            cut = each.layout.boundaries or (0, len(measured.layers))
            if each.layout != present:
                assert stage_seconds(problem, cut).max() == pytest.approx(best[_key(each)][0], rel=1e-12)
            assert each.peak_bytes <= members.memory_bytes
            assert len(each.members) == each.layout.world_size
        assert list(found) == sorted(found, key=lambda each: each.order)
        assert choose(measured, present, members, dataclasses.replace(search, count=3), **asked) == found[:3]
        worse.append(alike[0].seconds / min(seconds for _, seconds in best.values()))
        solved += 1
    assert solved > CASES / 2
    assert min(worse) > 1 - 1e-9 and max(worse) < 1.1 and np.mean(worse) < 1.005


@pytest.mark.parametrize("cases", [20, pytest.param(240, marks=pytest.mark.full)])
def test_what_is_not_looked_at_would_not_be_among_the_best(cases: int) -> None:
    """Bounds leave layouts out; asked for all answers `choose` leaves out none."""
    random = np.random.default_rng(15)
    compared = 0
    for _ in range(cases):
        measured, members, present = random_case(random, 8)
        frozen = int(random.integers(0, len(measured.layers))) if random.random() < 0.3 else 0
        first = tuple(dataclasses.replace(each, trained=False) for each in measured.layers[:frozen])
        measured = dataclasses.replace(measured, layers=first + measured.layers[frozen:])
        speeds = tuple(random.choice([0.5, 1.0, 2.0], 9).tolist()) if random.random() < 0.5 else (1.0,) * 9
        wide = LinkCosts(Link(float(random.choice([1e2, 1e4]))))
        members = Members(speeds, 4 * members.memory_bytes, wide if random.random() < 0.3 else members.links)
        pipeline = bool(random.random() < 0.7)
        measured = dataclasses.replace(measured, micro_batch_size=int(random.choice([1, 2])))
        search = Search(
            pipeline=pipeline,
            horizon_steps=20,
            count=int(random.choice([1, 3, 10])),
        )
        cost, bad = float(random.choice([0, 5])), int(random.integers(0, 6))
        asked = measured, present if search.pipeline else Layout(zero_stage=int(random.integers(0, 4))), members

        def refused(layout: Layout, bad: int = bad) -> bool:
            return (layout.data + layout.pipe) % 7 == bad

        def switch_seconds(layout: Layout, cost: float = cost) -> float:
            return cost

        every = choose(*asked, dataclasses.replace(search, count=ALL), refused, switch_seconds)
        assert choose(*asked, search, refused, switch_seconds) == every[: search.count]
        compared += len(every) > search.count
    assert compared > cases / 2


@pytest.mark.parametrize("cases", [40, pytest.param(80, marks=pytest.mark.full)])
def test_slow_members_without_stages_get_the_best_shares(cases: int) -> None:
    """Against all shares, where neither links nor memory say anything."""
    random = np.random.default_rng(13)
    shared = 0
    for _ in range(cases):
        speeds = tuple(random.choice([0.25, 0.5, 0.7, 1.0], int(random.integers(1, 5))).tolist())
        measured = profile((1.0, 2.0), batch=int(random.integers(4, 11)), micro=int(random.integers(1, 5)))
        members, seconds = Members(speeds), {}
        search = Search(zero_stages=(0,), pipeline=False, count=1)
        (found,) = choose(measured, Layout(zero_stage=0), members, search)
        for data in range(1, len(speeds) + 1):
            for shares in itertools.product(range(1, measured.train_batch_size + 1), repeat=data):
                if sum(shares) != measured.train_batch_size:
                    continue
                layout = Layout(zero_stage=0, data=data, shares=shares)
                pace = [speeds[each] for each in members.working(data)]
                if (deal := search.deal(measured, layout)) is not None:
                    seconds[shares] = step_time(measured, layout, deal, pace).seconds
        assert found.seconds == pytest.approx(min(seconds.values()))
        shared += found.layout.shares is not None
    assert shared > cases / 4


def test_slow_members_of_pipelines_get_fewer_micro_batches() -> None:
    """Against all shares with all cuts, where neither links nor memory say anything; members are at their ranks."""
    random = np.random.default_rng(14)
    worse, shared = [], 0
    for _ in range(CASES // 4):
        pipe, data = int(random.integers(1, 4)), int(random.integers(2, 4))
        speeds = [1.0] * (pipe * data)
        for rank in random.choice(pipe * data, int(random.integers(1, 3)), replace=False):
            speeds[rank] = float(random.choice([0.25, 0.5, 0.7]))
        measured = profile(tuple(random.uniform(0.5, 1.5, 5).tolist()), batch=2 * int(random.integers(4, 11)), micro=2)
        layout, best = Layout(zero_stage=0, pipe=pipe, data=data), np.inf
        search = Search(pipes=(pipe,), zero_stages=(0,), count=1)
        members = Members(tuple(speeds), are_placed=True)
        (found,) = choose(measured, layout, members, search, lambda each, data=data: each.data != data)  # type: ignore[misc]
        total = measured.train_batch_size // 2
        for counts in itertools.product(range(1, total + 1), repeat=data):
            if sum(counts) != total:
                continue
            deal = Deal(tuple(2 * each for each in counts), max(counts))
            for cut in every_cut(5, pipe):
                each = layout.replace(boundaries=cut if pipe > 1 else None)
                best = min(best, step_time(measured, each, deal, speeds).seconds)
        worse.append(found.seconds / best)
        shared += found.layout.shares is not None
    assert min(worse) > 1 - 1e-9 and max(worse) < 1.2 and np.mean(worse) < 1.01
    assert shared > CASES / 8


def _key(choice: Any) -> tuple[int, int, int]:
    return choice.layout.pipe, choice.layout.data, choice.layout.zero_stage


def test_its_boundaries_are_those_of_an_integer_programme() -> None:
    random = np.random.default_rng(12)
    solved = 0
    while solved < MILP_CASES:
        measured, members, _ = random_case(random, 9)
        pipe = int(random.integers(1, min(len(measured.layers), 4) + 1))
        layout = Layout(zero_stage=1, pipe=pipe)
        members = Members((*members.speeds, *(1.0,) * pipe), members.memory_bytes)
        problem = problem_of(measured, layout, Deal.of(measured, layout), members)
        solved += 1
        best = by_milp(problem, (0, len(measured.layers)), 0.0)
        if best is None:
            with pytest.raises(LayoutError):
                partition(problem)
            continue
        assert partition(problem).optimum == pytest.approx(best[0], abs=1e-6)


def test_a_member_too_many_stays_idle() -> None:
    """Two layers, one micro-batch size of two: a fifth member would only add a rank to each ring."""
    measured = profile((1.0, 1.0), batch=8, micro=2)
    slow = LinkCosts(Link(100.0, 1.0))
    (best,) = choose(measured, ONE, Members((1.0,) * 5, links=slow), Search(count=1))
    assert len(best.members) < 5
    alone = choose(measured, ONE, Members((1.0,) * 5), Search(count=1))[0]
    assert len(alone.members) == 4 and alone.layout.data == 4  # of 5, one would have no whole share


def test_a_slow_member_is_left_out_or_gets_less() -> None:
    measured = profile((1.0,) * 6, batch=8)
    (best,) = choose(measured, ONE, Members((1.0, 0.01, 1.0)), Search(zero_stages=(1,), count=1))
    assert set(best.members) == {0, 2}
    pipes = Search(pipes=(2,), zero_stages=(1,), count=1)
    (uneven,) = choose(measured, ONE, Members((0.5, 1.0)), pipes)
    assert uneven.layout.boundaries == (0, 4, 6) and uneven.members == (1, 0)


def test_the_cost_of_a_switch_is_spread_over_the_horizon() -> None:
    measured = profile((1.0, 1.1, 1.0, 1.0), batch=8)
    present = Layout(zero_stage=1, pipe=2, boundaries=(0, 1, 4))
    search = Search(pipes=(2,), zero_stages=(1,), count=5)
    members = Members((1.0, 1.0))
    assert choose(measured, present, members, search)[0].layout.boundaries == (0, 2, 4)

    def dear(layout: Layout) -> float:
        return 1000.0

    for horizon, best in ((10, (0, 1, 4)), (10**6, (0, 2, 4))):
        spread = Search(pipes=(2,), zero_stages=(1,), horizon_steps=horizon)
        first = choose(measured, present, members, spread, switch_seconds=dear)[0]
        assert first.layout.boundaries == best
        assert first.switch_seconds == (0 if best == (0, 1, 4) else 1000)


def test_what_would_be_refused_is_not_proposed() -> None:
    measured = profile((1.0,) * 4, batch=8)
    asked = []

    def refused(layout: Layout) -> bool:
        asked.append(layout)
        return layout.pipe == 1

    found = choose(measured, ONE, Members((1.0,) * 4), Search(count=ALL), refused)
    assert found and all(each.layout.pipe > 1 for each in found)
    assert all(each.boundaries for each in asked if each.pipe > 1)
    with pytest.raises(LayoutError, match=r"of the largest that was tried: data=4 .* would be refused"):
        choose(measured, ONE, Members((1.0,) * 4), refused=lambda layout: True, search=Search(pipes=(1,)))


def test_other_axes_stay() -> None:
    measured = profile((1.0,) * 4, batch=8)
    search = Search(pipeline=False, count=ALL)
    found = choose(measured, Layout(zero_stage=1, tensor=2, expert=4, data=2), Members((1.0,) * 9), search)
    assert {each.layout.tensor for each in found} == {2} and {each.layout.expert for each in found} == {4}
    assert {each.layout.data for each in found} == {2, 4}
    with pytest.raises(LayoutError, match=r"4 members .* sequence 1 x tensor 8 ranks for each data index"):
        choose(measured, Layout(zero_stage=1, tensor=8), Members((1.0,) * 4))


def test_equal_ones_have_an_order() -> None:
    measured = profile((1.0,) * 4, batch=8)
    found = choose(measured, ONE, Members((1.0,) * 4), Search(count=ALL))
    orders = [each.order for each in found]
    assert orders == sorted(orders) and len(set(orders)) == len(orders)
    code = (
        "from tests.balance.test_choose import *; "
        "print([str(each.layout) for each in choose(profile((1.0,) * 4, batch=8), ONE, Members((1.0,) * 4))])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert ran.stdout.strip() == str([str(each.layout) for each in found[:10]])


def test_a_layer_that_fits_nowhere() -> None:
    measured = profile((1.0,) * 4, batch=8)
    with pytest.raises(LayoutError, match=r"no layout fits 4 members.*'block.0' \(layer 0\) takes \d+ bytes"):
        choose(measured, ONE, Members((1.0,) * 4, memory_bytes=500))
    with pytest.raises(LayoutError, match="4 layers cannot be cut into 5 stages"):
        choose(measured, ONE, Members((1.0,) * 5), Search(pipes=(5,)))


def test_many_members() -> None:
    """A thousand members: only layouts that may be among the best are played through."""
    measured = profile((1.0,) * 48, batch=1024)
    members, played = Members((1.0,) * 1024, links=LinkCosts(Link(1e4))), []

    def refused(layout: Layout) -> bool:
        played.append(layout)
        return False

    found = choose(measured, ONE, members, Search(zero_stages=(1,), count=3), refused)
    assert len(found) == 3 and found[0].layout.world_size <= 1024
    assert len(played) < 400  # of 4,545 sizes
