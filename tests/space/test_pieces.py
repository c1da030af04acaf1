"""Sets of runs and pieces against Python sets."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.space import BufferId, Piece, Pieces, interval
from tests.space.laid import pieces_of

Run = tuple[int, int]
rows = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda run: (run[0], run[0] + run[1])), max_size=8)


def columns(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(runs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def elements(start: np.ndarray, stop: np.ndarray) -> list[int]:
    return [at for low, high in zip(start.tolist(), stop.tolist(), strict=True) for at in range(low, high)]


@given(rows)
def test_union_is_tidy_and_covers_the_same(runs: list[Run]) -> None:
    start, stop = interval.union(*columns(runs))
    assert elements(start, stop) == sorted({at for low, high in runs for at in range(low, high)})
    assert (start < stop).all() and (start[1:] > stop[:-1]).all()


@given(rows, rows)
def test_intersect_and_subtract_split_every_row(runs: list[Run], other: list[Run]) -> None:
    tidy = interval.union(*columns(other))
    row, run, low, high = interval.intersect(*columns(runs), *tidy)
    left_row, left_low, left_high = interval.subtract(*columns(runs), *tidy)
    inside = set(elements(*tidy))
    for number, (start, stop) in enumerate(runs):
        mine, rest = row == number, left_row == number
        assert elements(low[mine], high[mine]) == [at for at in range(start, stop) if at in inside]
        assert elements(left_low[rest], left_high[rest]) == [at for at in range(start, stop) if at not in inside]
    assert (low >= tidy[0][run]).all() and (high <= tidy[1][run]).all()


@given(rows, st.integers(1, 7))
def test_cut_every_width(runs: list[Run], width: int) -> None:
    start, stop = columns(runs)
    row, low, high, part = interval.cut_every(start, stop, np.full(len(start), width, dtype=np.int64))
    for number, (first, last) in enumerate(runs):
        assert elements(low[row == number], high[row == number]) == list(range(first, last))
    assert (low // width == part).all() and ((high - 1) // width == part).all()


@st.composite
def pieces(draw: st.DrawFn) -> Pieces:
    tidy = interval.union(*columns(draw(rows)))
    found, ends = [], [0, 0]
    for start, stop in zip(tidy[0].tolist(), tidy[1].tolist(), strict=True):
        buffer = draw(st.integers(0, 1))
        ends[buffer] += draw(st.integers(0, 2))
        found.append(Piece(start, stop, BufferId("tensor", buffer), ends[buffer]))
        ends[buffer] += stop - start
    return pieces_of(found)


def addresses(held: Pieces) -> dict[int, tuple[BufferId, int]]:
    return {
        piece.start + step: (piece.buffer, piece.offset + step)
        for piece in held
        for step in range(piece.stop - piece.start)
    }


@given(pieces(), pieces(), rows)
def test_pieces_keep_the_address_of_every_element(a: Pieces, b: Pieces, runs: list[Run]) -> None:
    tidy = interval.union(*columns(runs))
    inside, of_a, of_b = set(elements(*tidy)), addresses(a), addresses(b)
    mine, theirs = a.intersect(b)
    assert addresses(mine) == {at: place for at, place in of_a.items() if at in of_b}
    assert addresses(theirs) == {at: place for at, place in of_b.items() if at in of_a}
    assert (mine.start == theirs.start).all() and (mine.stop == theirs.stop).all()
    assert addresses(a.restrict(*tidy)) == {at: place for at, place in of_a.items() if at in inside}
    assert addresses(a.subtract(*tidy)) == {at: place for at, place in of_a.items() if at not in inside}
    row = np.repeat(np.arange(len(a)), a.stop - a.start)
    singles = a.take(
        row, np.array(elements(a.start, a.stop), np.int64), np.array(elements(a.start, a.stop), np.int64) + 1
    )
    assert addresses(singles.coalesce()) == of_a
    assert len(singles.coalesce()) <= len(a)
    assert a.numel == len(of_a)


def test_nothing_is_no_piece() -> None:
    assert len(Pieces.empty()) == 0 and Pieces.empty().numel == 0


def test_a_hundred_thousand_pieces_are_quick(in_time: Callable[[float, float], None]) -> None:
    start = np.arange(100_000, dtype=np.int64) * 10
    a = Pieces(start, start + 9, np.zeros_like(start), start, (BufferId("group", 0),))
    b = Pieces(start + 5, start + 14, np.zeros_like(start), start, (BufferId("group", 0),))
    begun = time.perf_counter()
    assert a.intersect(b)[0].numel == 100_000 * 4 + 99_999 * 4
    assert a.subtract(b.start, b.stop).numel + a.intersect(b)[0].numel == a.numel
    in_time(time.perf_counter() - begun, 1.0)
