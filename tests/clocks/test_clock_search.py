"""The search for clocks: against a trial of every clock, for times that grow in any way as clocks fall."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.clocks.clock_search import ClockSearch, waiting
from tests.sets import examples

LEAST = 0.03
Curve = list[float]
"""Seconds by the place of a clock; shorter at higher clocks."""

CLOCKS = st.sets(st.integers(1, 3000), min_size=1, max_size=120).map(sorted)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[Curve]]:
    """Clocks, and the curve of each rank."""
    clocks = draw(CLOCKS)
    steps = st.lists(st.floats(0, 1), min_size=len(clocks), max_size=len(clocks))
    curves = []
    for _ in range(draw(st.integers(1, 5))):
        longer, seconds = draw(steps), [draw(st.floats(0.01, 10))]
        for each in longer[1:]:
            seconds.append(seconds[-1] * (1 + each))
        curves.append(seconds[::-1])
    return clocks, curves


def by_trial(curves: list[Curve]) -> list[int]:
    """The lowest place at which each rank does not limit, found by trying all of them."""
    top = len(curves[0]) - 1
    slowest = max(curve[top] for curve in curves)
    return [
        top
        if curve[top] >= (1 - LEAST) * slowest
        else next(place for place in range(top + 1) if curve[place] <= slowest)
        for curve in curves
    ]


@given(cases())
@settings(max_examples=examples(400), deadline=None)
def test_it_finds_what_a_trial_of_all_finds(case: tuple[list[int], list[Curve]]) -> None:
    clocks, curves = case
    search, windows = ClockSearch.begun(clocks, len(curves)), 0
    while not search.is_over:
        seconds = [curve[place] for curve, place in zip(curves, search.places, strict=True)]
        search, windows = search.after(seconds, LEAST), windows + 1
    assert list(search.places) == by_trial(curves)
    assert windows <= 1 + math.ceil(math.log2(len(clocks) + 1))


@given(CLOCKS, st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
@settings(max_examples=examples(400), deadline=None)
def test_predicted_clocks_never_limit(clocks: list[int], seconds: list[float]) -> None:
    search = ClockSearch.begun(clocks, len(seconds)).after(seconds, LEAST)
    while not search.is_over:
        search = search.after(search.predicted(seconds), LEAST)
    assert max(search.predicted(seconds)) <= max(seconds)


def test_noise_costs_no_more_than_itself() -> None:
    """Times that jump by a percent: the clock is at most the next one that a percent would allow."""
    clocks = list(range(100, 2001, 100))
    search, jump = ClockSearch.begun(clocks, 2), 1.0
    while not search.is_over:
        jump = 2.01 - jump if jump > 1 else 1.01
        search = search.after([1.0, jump * 0.5 * 2000 / clocks[search.places[1]]], LEAST)
    assert clocks[search.places[1]] in (1000, 1100) and clocks[search.places[0]] == 2000


def test_waiting_is_the_share_that_the_others_do_not_compute() -> None:
    assert waiting([2.0, 2.0]) == 0 and waiting([2.0, 1.0]) == 0.25
