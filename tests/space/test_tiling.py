"""Tilings, element by element: rows of tiles lie in every buffer where the shard says, and runs find their places."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.space import DimCut, Shard
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.space.strips import PLAIN, Strips
from ds_dynatrain.space.tiling import strips_of, tiles

Shape = tuple[int, ...]


@st.composite
def cuts(draw: st.DrawFn, shape: Shape) -> DimCut:
    """A dim in one or two blocks, each in uneven parts, some of them empty; the last may be longer than the tensor."""
    dim, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    middle = draw(st.integers(0, shape[dim]))
    blocks = []
    for number, size in enumerate((middle, shape[dim] - middle)):
        more = size + number * draw(st.integers(0, 2))
        ends = sorted(draw(st.lists(st.integers(0, more), min_size=count - 1, max_size=count - 1)))
        blocks.append(tuple(high - low for low, high in itertools.pairwise([0, *ends, more])))
    return DimCut(dim, tuple(blocks))


@st.composite
def shards(draw: st.DrawFn) -> tuple[Shape, list[Shard]]:
    """A shape, and all shards of it under two layouts."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    found = []
    for _ in range(2):
        cut = draw(cuts(shape))
        found += [cut.shard(shape, index) for index in range(cut.count)]
    return shape, found


def places(strips: Strips) -> dict[int, int]:
    """The address of each coordinate."""
    found: dict[int, int] = {}
    for start, stop, address, width, step in zip(*(column.tolist() for column in strips.columns), strict=True):
        assert start < stop and (width == step == PLAIN or width <= step)
        for nth in range(stop - start):
            assert start + nth not in found
            found[start + nth] = address + nth // width * step + nth % width
    return found


def expected(shape: Shape, shard: Shard) -> dict[int, int]:
    """The address of each element of a shard, by its row-major number in the tensor."""
    numbers, found = np.arange(int(np.prod(shape))).reshape(shape), dict[int, int]()
    for piece in shard.pieces:
        for index in np.ndindex(*piece.box.shape):
            at = tuple(low + here for low, here in zip(piece.box.start, index, strict=True))
            found[int(numbers[at])] = piece.offset + sum(np.multiply(index, piece.strides).tolist())
    return found


@settings(deadline=None, max_examples=200)
@given(shards(), st.data())
def test_every_element_of_every_shard_is_found(problem: tuple[Shape, list[Shard]], data: st.DataObject) -> None:
    shape, held = problem
    split = tiles(shape, held)
    logical = places(strips_of(Shard.whole(shape), shape, split))
    assert sorted(logical) == sorted(logical.values()) == list(range(int(np.prod(shape))))
    for shard in held:
        strips, lying = strips_of(shard, shape, split), expected(shape, shard)
        found = places(strips)
        assert {logical[at]: address for at, address in found.items()} == lying
        edges = sorted(data.draw(st.tuples(*[st.integers(0, len(logical))] * 2)))
        check_runs(strips, found, *edges)


def check_runs(strips: Strips, found: dict[int, int], first: int, last: int) -> None:
    """A run of coordinates, and a range of addresses, each asked for and brought back."""
    inside = {at: address for at, address in found.items() if first <= at < last}
    hulls = strips.hulls(np.array([first]), np.array([last]))
    back = hulls.back(np.arange(len(hulls.row)), hulls.first, hulls.last)[1:]
    assert expanded(*back) == sorted(inside)
    for low, high, start, stop in zip(hulls.start, hulls.stop, hulls.first, hulls.last, strict=True):
        assert (found[int(low)], found[int(high) - 1] + 1) == (start, stop)
    _, strip, start, stop = strips.at_addresses(np.array([first]), np.array([last]))
    assert expanded(start, stop) == sorted(at for at, address in found.items() if first <= address < last)
    assert [found[at] for at in start.tolist()] == strips.address_of(strip, start).tolist()


def expanded(start: Ints, stop: Ints) -> list[int]:
    return sorted(at for low, high in zip(start.tolist(), stop.tolist(), strict=True) for at in range(low, high))


def test_whole_rows_keep_their_order() -> None:
    held = [DimCut(0, ((2, 4),)).shard((6, 4), index) for index in range(2)]
    assert tiles((6, 4), held) is None


def test_columns_are_two_tiles() -> None:
    held = [DimCut(1, ((2, 6),)).shard((100, 8), index) for index in range(2)]
    split = tiles((100, 8), held)
    assert split is not None and [tile.box.shape for tile in split] == [(100, 2), (100, 6)]
    strips = strips_of(Shard.whole((100, 8)), (100, 8), split)
    assert [column.tolist() for column in strips.columns] == [[0, 200], [200, 800], [0, 2], [2, 6], [8, 8]]
