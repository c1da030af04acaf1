"""Boxes, their runs, and cuts, each against a count element by element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import (
    Box,
    Cut,
    Dealt,
    DimCut,
    Pick,
    Placed,
    Shard,
    row_major,
    uneven,
)
from ds_dynatrain.space.tiling import rows
from tests.space.models import even, fused

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
PADDING = -1


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))


def indices(box: Box) -> Iterator[tuple[int, ...]]:
    """Those of all elements, in row-major order."""
    return itertools.product(*(range(low, high) for low, high in zip(box.start, box.stop, strict=True)))


def flat_indices(shape: tuple[int, ...], box: Box) -> list[int]:
    return [int(np.ravel_multi_index(index, shape)) if shape else 0 for index in indices(box)]


@given(st.data(), shapes)
def test_a_box_is_the_fewest_runs(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes(shape))
    found = rows(shape, [Placed(box, 0, row_major(box.shape))] if box.numel else [])
    start, stop = found.start, found.stop
    elements = [index for low, high in zip(start.tolist(), stop.tolist(), strict=True) for index in range(low, high)]
    assert elements == flat_indices(shape, box)
    assert all(low > high for low, high in zip(start[1:].tolist(), stop[:-1].tolist(), strict=True))


@st.composite
def dim_cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> DimCut:
    dim = draw(st.integers(0, len(shape) - 1))
    size, count = shape[dim], draw(st.integers(1, 3))
    style = draw(st.sampled_from(["uneven", "padded", "blocks"]))
    if style == "padded":
        step = count * draw(st.integers(1, 2))
        return DimCut(dim, ((-(-size // step) * step // count,) * count,))
    blocks = draw(st.integers(1, 2)) if style == "blocks" else 1
    ends = sorted(draw(st.lists(st.integers(0, size), min_size=blocks * count - 1, max_size=blocks * count - 1)))
    sizes = np.diff([0, *ends, size]).tolist()
    return DimCut(dim, tuple(tuple(sizes[block * count : (block + 1) * count]) for block in range(blocks)))


@st.composite
def any_cut(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    if shape and draw(st.sampled_from([True, True, False])):
        if draw(st.booleans()):
            ends = sorted(draw(st.lists(st.integers(0, shape[0]), max_size=2)))
            order = draw(st.permutations(range(shape[0])))
            return Dealt(tuple(tuple(each.tolist()) for each in np.split(np.array(order, int), ends)))
        return draw(dim_cuts(shape))
    return Pick(2, draw(st.sampled_from([(0,), (1,), (0, 1)])))


def deal(local: np.ndarray, cut: Cut, index: int) -> np.ndarray:
    """What a rank keeps of a local array, by numpy slices: another way than `cut.parts`."""
    if isinstance(cut, Pick):
        return local if index in cut.holders else np.full(0, PADDING)
    if isinstance(cut, Dealt):
        return local[list(cut.rows[index])]
    assert isinstance(cut, DimCut)
    rows = np.moveaxis(local, cut.dim, 0)
    total = sum(sum(block) for block in cut.blocks)
    rows = np.concatenate([rows, np.full((total - len(rows), *rows.shape[1:]), PADDING)])
    blocks = np.split(rows, np.cumsum([sum(block) for block in cut.blocks])[:-1])
    parts = [np.split(block, np.cumsum(sizes)[:-1])[index] for block, sizes in zip(blocks, cut.blocks, strict=True)]
    return np.moveaxis(np.concatenate(parts), 0, cut.dim)


def written(shard: Shard, shape: tuple[int, ...]) -> np.ndarray:
    """The local buffer that the pieces describe, with each element's row-major number in the tensor."""
    local = np.full(math.prod(shard.shape), PADDING)
    for piece in shard.pieces:
        for index in indices(piece.box):
            steps = zip(index, piece.box.start, piece.strides, strict=True)
            local[piece.offset + sum((at - first) * stride for at, first, stride in steps)] = (
                np.ravel_multi_index(index, shape) if shape else 0
            )
    return local.reshape(shard.shape)


@settings(deadline=None, max_examples=150)
@given(st.data(), shapes)
def test_a_shard_is_what_slices_of_an_array_are(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    cut = data.draw(any_cut(shape))
    index = data.draw(st.integers(0, cut.count - 1))
    local, shard = deal(whole, cut, index), cut.shard(shape, index)
    assert shard.shape == local.shape
    np.testing.assert_array_equal(written(shard, shape), local)
    assert shard.numel == int((local != PADDING).sum())


@settings(deadline=None, max_examples=60)
@given(st.data(), shapes)
def test_the_shards_of_all_ranks_tile_the_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    cut = data.draw(dim_cuts(shape)) if shape else Pick(2, (1,))
    seen: list[int] = []
    for index in range(cut.count):
        held = written(cut.shard(shape, index), shape).reshape(-1).tolist()
        seen += [number for number in held if number != PADDING]
    assert sorted(seen) == list(range(math.prod(shape)))


def test_cuts_as_models_have_them() -> None:
    assert uneven(0, [3, 1]).blocks == ((3, 1),)
    padded = DimCut(0, ((3, 3, 3, 3),))
    assert [padded.shard((10,), index).numel for index in range(4)] == [3, 3, 3, 1]
    heads = fused(0, [8, 4, 4], 2)
    assert [piece.box for piece in heads.shard((16, 2), 1).pieces] == [
        Box((4, 0), (8, 2)),
        Box((10, 0), (12, 2)),
        Box((14, 0), (16, 2)),
    ]
    assert even(0, 4, 2).shard((4, 2, 3), 1).pieces[0].box == Box((2, 0, 0), (4, 2, 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: uneven(0, [3, 1]).shard((5, 2), 0), "do not cover"),
        (lambda: uneven(2, [3, 1]).shard((5, 2), 0), "no dim 2"),
        (lambda: DimCut(0, ((1, 2), (3,))), "one number of ranks"),
        (lambda: DimCut(0, ((1, -2),)), "of 0 or more"),
        (lambda: Dealt(((0, 2), (1, 2))).shard((4, 2), 0), "each row of its dim 0 once"),
    ],
)
def test_impossible_geometry_is_refused(make: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        make()  # type: ignore[operator]
