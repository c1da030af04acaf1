"""What a switch costs: the fit against a solver, and what few switches say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from ds_dynatrain.balance.decision import RECENT, Pause

FIRST = Pause(0.1, 1e-9)


def test_without_a_switch_it_is_what_was_said() -> None:
    assert FIRST.fitted([]) == FIRST and FIRST.seconds(10**9) == 1.1


def test_one_switch_corrects_the_fixed_part() -> None:
    assert FIRST.fitted([(10**9, 1.5)]).seconds(10**9) == pytest.approx(1.5)
    both = FIRST.fitted([(10**9, 1.5), (10**9, 1.7)])
    assert both.fixed_seconds == pytest.approx(0.6) and both.seconds_per_byte == 1e-9
    assert FIRST.fitted([(10**9, 0.5)]) == Pause(0.0, 1e-9)


def test_several_are_fitted_as_a_solver_does() -> None:
    random = np.random.default_rng(8)
    for _ in range(100):
        sizes = random.integers(1, 10**9, int(random.integers(2, 10)))
        took = random.random(len(sizes)) * random.choice([0.1, 1]) + sizes * random.choice([-1e-9, 0, 1e-9, 1e-8]) + 1
        took = np.maximum(took - random.choice([0, 2]), 0)
        scaled = sizes / 1e9
        (fixed, slope), _ = nnls(np.stack((np.ones(len(sizes)), scaled), axis=1), took)
        found = FIRST.fitted(list(zip(sizes.tolist(), took.tolist(), strict=True)))
        assert (found.fixed_seconds, 1e9 * found.seconds_per_byte) == pytest.approx((fixed, slope), rel=1e-6, abs=1e-9)


def test_old_ones_do_not_count() -> None:
    made = [(1, 100.0)] * 50 + [(size, 1.0) for size in range(RECENT)]
    assert FIRST.fitted(made) == Pause(1.0, 0.0)
