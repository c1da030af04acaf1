"""From passes to a profile: medians, errors, ranks of different speeds, means over windows, and advice from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from ds_dynatrain.balance.adapters.timing import waited
from ds_dynatrain.balance.advice import MoveCost, Situation, advise
from ds_dynatrain.balance.config import BalanceConfig as Rules
from ds_dynatrain.balance.decision import Answer, DecisionHistory
from ds_dynatrain.balance.partition import Problem, partition
from ds_dynatrain.balance.profile import LayerCost
from ds_dynatrain.balance.window import COLUMNS, Averaged, TimingWindow, rows_of, waiting
from ds_dynatrain.errors import LayoutError, ProfileError
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space import Columns, Layout

TWO = Layout(zero_stage=1, pipe=2, boundaries=(0, 2, 4))
KINDS = {"weight": 400, "master": 400, "exp_avg": 400, "exp_avg_sq": 400}


def rows(*seconds: float, passes: int = 8, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """A rank's rows: forward passes of these seconds, backward passes of twice as many."""
    random = np.random.default_rng(seed)
    forward = np.array(seconds) * (1 + noise * random.standard_normal((passes, len(seconds))))
    count = [10 + place for place in range(len(seconds))]
    return rows_of(forward, 2 * forward, np.full((1, len(seconds)), 0.1), count, count)


def window(*seconds: float, noise: float = 0.0, seed: int = 0) -> TimingWindow:
    """Of four layers on two stages."""
    cut = len(seconds) // 2
    by_rank = {0: rows(*seconds[:cut], noise=noise, seed=seed), 1: rows(*seconds[cut:], noise=noise, seed=seed + 1)}
    return TimingWindow.of(by_rank, TWO, (0, cut, len(seconds)))


def averaged(*seconds: float, **more: float) -> Averaged:
    return Averaged.after(None, window(*seconds, **more), (16, 2), 0, 0.03, is_new=False)


def layers(count: int = 4) -> list[LayerCost]:
    return [
        LayerCost(name=f"{place}.Block", forward_seconds=0.0, backward_seconds=0.0, kind_bytes=KINDS)
        for place in range(count)
    ]


def test_a_row_has_the_median_and_its_error() -> None:
    found = rows(1.0, 2.0, passes=400, noise=0.1)
    assert found.shape == (2, len(COLUMNS))
    named = dict(zip(COLUMNS, found.T, strict=True))
    assert named["forward_seconds"] == pytest.approx([1, 2], rel=0.02)
    assert named["backward_seconds"] == pytest.approx([2, 4], rel=0.02)
    assert named["forward_error"] == pytest.approx([0.1 * 1.2533 / 20, 0.2 * 1.2533 / 20], rel=0.2)
    assert named["activation_bytes"].tolist() == [10, 11]


def test_an_outlier_moves_nothing() -> None:
    forward = np.ones((9, 1))
    forward[4] = 1000
    found = rows_of(forward, np.zeros((0, 1)), np.zeros((0, 1)), [0], [0])
    assert found[0, :3].tolist() == [1, 0, 0] and found[0, 3] == 0


def test_one_pass_is_as_uncertain_as_it_is_long() -> None:
    named = dict(zip(COLUMNS, rows(3.0, passes=1).T, strict=True))
    assert named["forward_error"] == [3] and named["backward_error"] == [6]


def test_a_layer_that_never_ran_takes_nothing() -> None:
    """It has a row all the same, and stages are cut by the others."""
    silent = rows_of(np.zeros((0, 1)), np.zeros((0, 1)), np.zeros((0, 1)), [0], [0])
    by_rank = {0: np.concatenate((silent, rows(3.0))), 1: rows(1.0, 1.0)}
    found = TimingWindow.of(by_rank, TWO, (0, 2, 4))
    assert found.rows[0].tolist() == [0.0] * len(COLUMNS) and found.rows[1, 0] == 3
    profile = Averaged.after(None, found, (16, 2), 0, 0.03, is_new=False).profile(layers(), "by hand")
    assert partition(Problem.of(profile.seconds("forward_seconds"), 2)).optimum == 3


def test_ranks_of_a_stage_have_speeds_and_one_row() -> None:
    layout = TWO.replace(data=3)
    slow = {rank: rows(1.0, 1.0, noise=0.01, seed=rank) for rank in range(6)}
    slow[4] = rows(2.0, 2.0, noise=0.01, seed=4)
    found = TimingWindow.of(slow, layout, (0, 2, 4))
    assert found.speeds[:4] == (1, 1, 1, 1) and found.speeds[5] == 1
    assert found.speeds[4] == pytest.approx(0.5, rel=0.03)
    assert found.rows[:, 0] == pytest.approx([1] * 4, rel=0.02)
    alone = TimingWindow.of({rank: slow[3 + rank] for rank in range(2)}, Layout(zero_stage=1, data=2), (0, 2))
    assert alone.speeds[0] == 1 and alone.speeds[1] == pytest.approx(0.5, rel=0.03)


def test_waiting_for_a_core_makes_a_member_slow_and_no_layer() -> None:
    by_rank = {rank: rows(1.0, 1.0, noise=0.01, seed=rank) for rank in range(3)}
    layout = Layout(zero_stage=1, data=3)
    found = TimingWindow.of(by_rank, layout, (0, 2), waits={0: (0.1, 0.02), 1: (6.2, 0.1), 2: (0.9, 0.4)})
    assert found.speeds == pytest.approx((1, 6.9 / 12.2, 1), rel=0.05), "0.8 s more or less say nothing"
    assert np.array_equal(found.rows, TimingWindow.of(by_rank, layout, (0, 2)).rows)


def test_a_thread_waits_while_another_process_has_its_core() -> None:
    cores, before = os.sched_getaffinity(0), waited()
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("this kernel does not count it")
    os.sched_setaffinity(0, {min(cores)})
    neighbor = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 30
        while waited() - before < 0.1 and time.monotonic() < deadline:
            pass
    finally:
        neighbor.kill()
        neighbor.wait()
        os.sched_setaffinity(0, cores)
    assert waited() - before >= 0.1


@pytest.mark.parametrize(("passes", "mean", "error"), [([[]], 0, 0), ([[2.0]], 2, 2), ([[1.0, 3.0], [4.0, 4.0]], 6, 1)])
def test_the_mean_wait_of_both_passes(passes: list[list[float]], mean: float, error: float) -> None:
    assert waiting([np.array(each) for each in passes]) == pytest.approx((mean, error))


@pytest.mark.parametrize("by_rank", [{0: rows(1.0, 1.0)}, {0: rows(1.0, 1.0), 1: rows(1.0)}])
def test_every_rank_has_a_row_for_each_of_its_layers(by_rank: dict[int, np.ndarray]) -> None:
    with pytest.raises(ProfileError, match=r"rank 1 of .* stage 1 has 2 layers"):
        TimingWindow.of(by_rank, TWO, (0, 2, 4))


def test_windows_are_averaged_until_costs_change() -> None:
    state = averaged(1, 1, 1, 1, noise=0.05)
    for step in range(1, 6):
        state = Averaged.after(state, window(1, 1, 1, 1, noise=0.05, seed=10 * step), (16, 2), step, 0.03, is_new=False)
    assert state.windows == 6 and state.since == 0
    assert state.rows[:, 3].max() < window(1, 1, 1, 1, noise=0.05).rows[:, 3].max()
    doubted = following(state, 6, 1, 1, 1, 2, noise=0.05)
    assert np.array_equal(doubted.rows, state.rows) and (doubted.windows, doubted.since) == (6, 0)
    assert doubted.doubted is not None and doubted.doubted.step == 6
    after = following(doubted, 10, 1, 1, 1, 2, noise=0.05, seed=10)
    assert (after.windows, after.since, after.doubted) == (1, 6, None)
    assert after.rows[3, 0] == pytest.approx(2, rel=0.1)


def following(state: Averaged, step: int, *seconds: float, **more: float) -> Averaged:
    """With one more window."""
    return Averaged.after(state, window(*seconds, **more), (16, 2), step, 0.03, is_new=False)


def test_one_window_that_differs_is_noise() -> None:
    before = averaged(1, 1, 1, 1, noise=0.01)
    doubted = following(before, 1, 1.3, 1.3, 1, 1, noise=0.01)
    after = following(doubted, 2, 1, 1, 1, 1, noise=0.01, seed=20)
    assert (after.windows, after.since, after.doubted) == (2, 0, None)
    assert after.rows[:, 0] == pytest.approx([1] * 4, rel=0.02)


def test_two_windows_that_differ_in_other_layers_are_noise() -> None:
    state = following(averaged(1, 1, 1, 1, noise=0.01), 1, 1.3, 1, 1, 1, noise=0.01)
    state = following(state, 2, 1, 1, 1, 1.3, noise=0.01)
    assert (state.windows, state.since) == (1, 0)
    assert state.doubted is not None and state.doubted.step == 2, "the newer one is looked at next"


def test_costs_that_go_on_changing_have_changed() -> None:
    state, changes = averaged(1, 1, 1, 1, noise=0.01), []
    for step in range(1, 9):
        state = following(state, step, 1 + 0.2 * step, 1, 1, 1, noise=0.01, seed=step)
        changes.append(state.since)
    assert changes == [0, 1, 1, 3, 3, 5, 5, 7] and state.rows[0, 0] == pytest.approx(2.6, rel=0.02)


def test_windows_on_a_shared_core_change_nothing() -> None:
    """One in ten is a third longer on one stage, with small errors; two in a row on the same stage are believed."""
    random = np.random.default_rng(7)
    state, longer, changes = averaged(1, 1, 1, 1, noise=0.01), 0, set[int]()
    for step in range(1, 300):
        first, second = 1 + 0.33 * np.eye(2)[random.integers(2)] * (random.random() < 0.1)
        longer += first > 1 or second > 1
        state = following(state, step, first, first, second, second, noise=0.01, seed=step)
        changes.add(state.since)
    assert longer > 20 and len(changes) <= 3, f"{longer} windows were longer, changes at {changes}"


def beside(*ranks: tuple[float, float, float]) -> TimingWindow:
    return TimingWindow.of({0: rows(1.0, 1.0), 1: rows(1.0, 1.0)}, TWO, (0, 2, 4), ranks)


def test_what_no_layer_takes_is_averaged_where_it_was_measured() -> None:
    state = Averaged.after(None, beside((2, 1, 4), (0, 3, 4)), (16, 2), 0, 0.03, is_new=False)
    assert state.beside.tolist() == [2, 2, 4], "a stage that loads nothing does not count"
    state = Averaged.after(state, beside((4, 0, 6), (4, 0, 6)), (16, 2), 1, 0.03, is_new=False)
    assert state.beside.tolist() == [3, 2, 5], "without messages what is known of them stays"
    profile = state.profile(layers())
    assert (profile.load_seconds, profile.message_seconds, profile.beside_seconds) == (3, 2, 5)


def test_what_is_known_to_have_changed_is_not_doubted() -> None:
    found = Averaged.after(averaged(1, 1, 1, 1), window(1, 1, 1, 1.5), (16, 2), 1, 0.03, is_new=True)
    assert (found.windows, found.since, found.doubted) == (1, 1, None)


@pytest.mark.parametrize(("batch", "is_new", "since"), [((16, 2), True, 1), ((16, 4), False, 1)])
def test_what_begins_anew(batch: tuple[int, int], is_new: bool, since: int) -> None:
    found = Averaged.after(averaged(1, 1, 1, 1), window(1, 1, 1, 1), batch, 1, 0.03, is_new)
    assert (found.windows, found.since) == (1, since)


def test_every_digit_travels() -> None:
    state = averaged(1 / 3, 0.1, 1e-7, 2, noise=0.1)
    state = following(state, 1, 1, 0.1, 1e-7, 2, noise=0.1)
    assert state.doubted is not None and state.beside.tolist() == [0, 0, 0]
    back = from_record(Averaged, json.loads(json.dumps(to_record(state))))
    assert back.doubted is not None and np.array_equal(back.doubted.rows, state.doubted.rows)
    assert np.array_equal(back.rows, state.rows) and (back.speeds, back.batch) == (state.speeds, state.batch)
    assert back.profile(layers()) == state.profile(layers())


# ---- advice ----------------------------------------------------------------------------------------------------------


def situation(step: int = 100, **more: float) -> Situation:
    return Situation(TWO, lambda layout: 8, step, DecisionHistory(), Rules(**more))


def test_a_heavy_stage_gives_layers_away() -> None:
    profile = averaged(3, 1, 1, 1, noise=0.01).profile(layers())
    found = advise(profile, situation(), lambda layout, without: MoveCost(1600, 0.5))
    assert found.proposed.boundaries == (0, 1, 4)
    assert found.gain > 0.15 and found.decision.answer is Answer.ACT
    shown = str(found)
    assert "present boundaries 0,2,4" in shown and "proposed boundaries 0,1,4" in shown and "1600 bytes" in shown


def test_what_is_balanced_stays() -> None:
    profile = averaged(1, 1, 1, 1, noise=0.01).profile(layers())
    found = advise(profile, situation(), lambda layout, without: MoveCost(1600, 0.5))
    assert found.proposed == found.present and found.gain == 0 and found.decision.answer is Answer.SMALL
    assert "no layout" in str(found)


def test_a_move_that_does_not_pay_is_shown_with_its_reason() -> None:
    profile = averaged(3, 1, 1, 1, noise=0.01).profile(layers())
    found = advise(profile, situation(), lambda layout, without: MoveCost(1600, 1e6))
    assert found.decision.answer is Answer.DEAR and "too little time is lost" in str(found)


def test_what_a_switch_refuses_is_not_proposed() -> None:
    profile = averaged(3, 1, 1, 1, noise=0.01).profile(layers())
    found = advise(profile, situation(), lambda layout, without: None)
    assert found.proposed == found.present


def test_a_memory_limit_that_nothing_fits_names_the_layer() -> None:
    profile = averaged(1, 1, 1, 1).profile(layers())
    at = Situation(TWO, lambda layout: 8, 100, DecisionHistory(), Rules(), memory_bytes=100)
    with pytest.raises(LayoutError, match="Block"):
        advise(profile, at, lambda layout, without: MoveCost(1, 0.0))


def test_members_stay_at_their_ranks() -> None:
    """The slow member is on the first stage, so that one gets less, though it comes first."""
    layout = TWO.replace(data=2, boundaries=(0, 3, 6))
    by_rank = {rank: rows(1.0, 1.0, 1.0, noise=0.01, seed=rank) for rank in range(4)}
    by_rank[0] = rows(3.0, 3.0, 3.0, noise=0.01)
    window = TimingWindow.of(by_rank, layout, (0, 3, 6))
    profile = Averaged.after(None, window, (16, 2), 0, 0.03, is_new=False).profile(layers(6))
    at = Situation(layout, numbers, 100, DecisionHistory(), Rules(), slow=frozenset({0}))
    cut = advise(profile, at, lambda layout, without: None if layout.shares else MoveCost(1, 0.0)).proposed
    assert cut == layout.replace(boundaries=(0, 1, 6))
    shared = advise(profile, at, lambda layout, without: MoveCost(1, 0.0)).proposed
    assert shared == layout.replace(shares=(4, 12)), "its pipeline runs fewer micro-batches, which is better"


def numbers(layout: Layout) -> int:
    """Of 16 samples, by two."""
    return Columns.of(16, 2, layout.data, layout.shares).longest
