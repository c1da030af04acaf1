"""Sides of a change made ready: the numbers are the same, and nothing is taken that was made for something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.reshard.certificate import DigestSide, side_digests
from ds_dynatrain.space import (
    MASTER,
    WEIGHT,
    Layout,
    LogicalTensor,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
)
from ds_dynatrain.transfer import ReadyDigest

TENSORS = [LogicalTensor("a", (7, 5), 0), LogicalTensor("b", (11,), 0), LogicalTensor("c", (3, 3), 1)]
LAYOUTS = [Layout(data=2, zero_stage=stage) for stage in range(4)]


def space(layout: Layout, itemsize: int = 4) -> VirtualParameterSpace:
    return VirtualParameterSpace.of(
        TENSORS, ZeroRules(sub_group_size=20), standard_kinds(itemsize, 4), layout, range(layout.data)
    )


def buffers_of(vps: VirtualParameterSpace, layout: Layout, rank: int, is_one_memory: bool, seed: int = 0) -> Buffers:
    """Random ones; the masters are the weights' memory, or have their own."""
    generator, held = torch.Generator().manual_seed(seed), Buffers()
    for (kind, name), size in vps.local(layout, rank).sizes().items():
        dtype = {2: torch.bfloat16, 4: torch.float32}[vps.kind(kind).itemsize]
        held[kind, name] = torch.randn(size, generator=generator).to(dtype)
    if is_one_memory:
        held |= {(MASTER, name): held[WEIGHT, name] for kind, name in held if kind == MASTER}
    return held


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReadyDigest]]:
    """Every table that is made meanwhile."""
    own, found = ReadyDigest.of, list[ReadyDigest]()

    def noted(*given: Any) -> ReadyDigest:
        found.append(own(*given))
        return found[-1]

    monkeypatch.setattr(ReadyDigest, "of", staticmethod(noted))
    yield found


def same(one: Any, other: Any) -> bool:
    (found, share), (wanted, other_share) = one, other
    pairs = [(found, wanted), (share, other_share)]
    return all(a.keys() == b.keys() and all(np.array_equal(a[kind], b[kind]) for kind in a) for a, b in pairs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("itemsize", "is_one_memory"), [(2, False), (4, False), (4, True)])
def test_ready_or_not_the_numbers_are_the_same(
    layout: Layout, itemsize: int, is_one_memory: bool, made: list[ReadyDigest]
) -> None:
    vps = space(layout, itemsize)
    is_one_memory &= layout.zero_stage in (0, 3)
    for rank in range(2):
        buffers = buffers_of(vps, layout, rank, is_one_memory)
        kinds = vps.present_kinds()
        for kept in (set(), {key for key in buffers if key[1].index == 0}, set(buffers)):
            side = DigestSide(vps, layout, rank)
            side.make_ready(buffers, kinds, kept, 1 << 20)
            later = buffers_of(vps, layout, rank, is_one_memory, seed=1)
            made.clear()
            found = side_digests(vps, layout, rank, later, kinds, kept, ready=side)
            assert not made, "all of it was there"
            assert same(found, side_digests(vps, layout, rank, later, kinds, kept))
            known = side_digests(vps, layout, rank, later, kinds, kept, found[1], side)
            assert same(known, found)


def test_kinds_that_lie_alike_are_cut_once(made: list[ReadyDigest]) -> None:
    layout = Layout(data=2, zero_stage=1)
    vps = space(layout, 2)
    buffers = buffers_of(vps, layout, 0, False)
    side_digests(vps, layout, 0, buffers, vps.present_kinds(), set())
    assert len([each for each in made if each.buffers]) == 2, "weights, and masters with the moments"


def test_what_stays_is_not_made_ready_where_the_other_side_has_weighed_it() -> None:
    layout = Layout(data=2, zero_stage=1)
    vps = space(layout)
    buffers = buffers_of(vps, layout, 0, False)
    sides = [DigestSide(vps, layout, 0) for _ in range(2)]
    for has_share, side in enumerate(sides):
        side.make_ready(buffers, vps.present_kinds(), set(buffers), 1 << 20, has_share=bool(has_share))
    assert sides[0].nbytes > sides[1].nbytes


def test_stale_buffers_are_answered_by_no_table_of_others(made: list[ReadyDigest]) -> None:
    """Those that were to be kept are not kept, and a buffer is of another type."""
    layout = Layout(data=2, zero_stage=2)
    vps = space(layout, 2)
    buffers, kinds = buffers_of(vps, layout, 1, False), vps.present_kinds()
    kept = {key for key in buffers if key[1].index == 0}
    for now in (set(), set(buffers), {key for key in kept if key[0] == WEIGHT}):
        side = DigestSide(vps, layout, 1)
        side.make_ready(buffers, kinds, kept, 1 << 20)
        made.clear()
        found = side_digests(vps, layout, 1, buffers, kinds, now, ready=side)
        assert made
        assert same(found, side_digests(vps, layout, 1, buffers, kinds, now))
    wide: Buffers = {key: held.double() for key, held in buffers.items()}
    found = side_digests(vps, layout, 1, wide, kinds, kept, ready=side)
    assert same(found, side_digests(vps, layout, 1, wide, kinds, kept))
    assert not same(found, side_digests(vps, layout, 1, buffers, kinds, kept))


def test_another_side_is_cut_anew(made: list[ReadyDigest]) -> None:
    """Of another rank, another layout, or a space that deals a kind otherwise."""
    layout = Layout(data=2, zero_stage=1)
    vps = space(layout)
    side = DigestSide(vps, layout, 0)
    side.make_ready(buffers_of(vps, layout, 0, False), vps.present_kinds(), set(), 1 << 20)
    assert side.is_of(vps.with_layout(Layout(data=3, zero_stage=1), range(3)), layout, 0)
    fewer = vps.with_groups(MASTER, [0])
    others = [(vps, layout, 1), (vps, Layout(data=2, zero_stage=3), 0), (fewer, layout, 0), (space(layout), layout, 0)]
    for vps, layout, rank in others:
        vps = vps.with_layout(layout, range(2))
        assert not side.is_of(vps, layout, rank)
        buffers = buffers_of(vps, layout, rank, False)
        found = side_digests(vps, layout, rank, buffers, vps.present_kinds(), set(), ready=side)
        assert same(found, side_digests(vps, layout, rank, buffers, vps.present_kinds(), set()))


def test_tables_stay_within_their_room() -> None:
    """What does not fit is cut when it is asked for; kinds without buffers are left out."""
    layout = Layout(data=2, zero_stage=1)
    vps = space(layout, 2)
    buffers, kinds = buffers_of(vps, layout, 0, False), vps.present_kinds()
    whole = DigestSide(vps, layout, 0)
    whole.make_ready(buffers, kinds, set(), 1 << 20)
    for room in range(0, whole.nbytes + 1, 64):
        side = DigestSide(vps, layout, 0)
        side.make_ready(buffers, kinds, set(), room)
        assert side.nbytes <= room
        expected = side_digests(vps, layout, 0, buffers, kinds, set())
        assert same(side_digests(vps, layout, 0, buffers, kinds, set(), ready=side), expected)
    some = {key: held for key, held in buffers.items() if key[0] in (WEIGHT, MASTER)}
    side = DigestSide(vps, layout, 0)
    side.make_ready(some, kinds, set(), 1 << 20)
    assert 0 < side.nbytes <= whole.nbytes
    assert same(side_digests(vps, layout, 0, buffers, kinds, set(), ready=side), expected)
