"""The certificate over what members hold together: what is equal passes, and what differs is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.errors import CertificateError
from ds_dynatrain.membership.control import Control, pack, unpack
from ds_dynatrain.membership.session import Session
from ds_dynatrain.reshard.certificate import (
    Shares,
    SideDigests,
    agreed,
    certify,
    differing,
    doubts,
    fold,
    folded,
    joined,
    shares,
)
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from tests.plan import test_axes as axes

TENSORS = (LogicalTensor("first", (4, 3), 0), LogicalTensor("second", (5,), 0))
KINDS = ("weight", "master", "exp_avg")
TWO, FOUR = Layout(data=2, zero_stage=1), Layout(data=4, zero_stage=1)
WHOLE = {"weight": [11, 12], "master": [2**63 + 5, 22], "exp_avg": [31, 2**64 - 1]}
Sides = dict[str, dict[int, SideDigests]]
Whole = dict[str, Any]
Change = Callable[[Sides], object]


def space(layout: Layout, tensors: tuple[LogicalTensor, ...] = TENSORS) -> VirtualParameterSpace:
    members, kinds = tuple(range(layout.world_size)), standard_kinds(2, stale_grad=2)
    cuts = None if tensors is TENSORS else axes.partition
    return VirtualParameterSpace.of(tensors, ZeroRules(sub_group_size=100), kinds, layout, members, cuts)


def digests(size: int, rank: int) -> SideDigests:
    """The share of a rank: the whole of a replicated kind, else parts that add up to the whole modulo 2**64."""
    made = {}
    for kind in KINDS:
        whole = np.array(WHOLE[kind], dtype=np.uint64)
        part = np.full(2, 1000 + rank, dtype=np.uint64)
        rest = whole - np.sum(
            [np.full(2, 1000 + other, dtype=np.uint64) for other in range(1, size)], axis=0, dtype=np.uint64
        )
        made[kind] = whole if kind == "weight" else part if rank else rest
    return SideDigests(made)


def sides() -> Sides:
    """Two members before, four after."""
    return {
        "source": {rank: digests(2, rank) for rank in range(2)},
        "target": {rank: digests(4, rank) for rank in range(4)},
    }


def summed(
    vps: VirtualParameterSpace, layout: Layout, held: Mapping[int, SideDigests], members: tuple[int, ...] | None = None
) -> Shares:
    """Those of all ranks, by way of the bytes that travel."""
    members = members or tuple(range(layout.world_size))
    records = [pack(shares(vps, layout, members, rank, held[rank])) for rank in range(layout.world_size)]
    return reduce(joined, (unpack(record) for record in records))


def judge(found: Sides, made: Callable[[Shares], Shares] = lambda sums: sums) -> dict[str, Any]:
    vps = space(TWO)
    sums = {"source": summed(vps, TWO, found["source"]), "target": summed(vps, FOUR, found["target"])}
    return certify(vps, TWO, FOUR, {side: made(each) for side, each in sums.items()})


def changed(side: str, member: int, kind: str, tensor: int) -> Change:
    """One digest is another number."""

    def change(found: Sides) -> None:
        values = {name: held.copy() for name, held in found[side][member].items()}
        values[kind][tensor] += np.uint64(1)
        found[side][member] = SideDigests(values)

    return change


def without(side: str, members: tuple[int, ...]) -> Change:
    """Members hold no first moments."""

    def change(found: Sides) -> None:
        for member in members:
            found[side][member] = SideDigests({k: v for k, v in found[side][member].items() if k != "exp_avg"})

    return change


def test_equal_sides_pass_with_one_digest() -> None:
    assert judge(sides()) == judge(sides()) and len(judge(sides())["digest"]) == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("target", 2, "master", 1), r"master of 'second' is not the same after the moves \(1 of 2 tensors"),
        (changed("source", 0, "exp_avg", 0), "exp_avg of 'first' is not the same after"),
        (without("source", (1,)), "source: only one of members 0 and 1 holds exp_avg"),
        (without("target", (0, 1, 2, 3)), "'exp_avg' was there before"),
        (without("source", (0, 1)), r"\['exp_avg'\] appeared"),
    ],
)
def test_what_differs_is_named(change: Change, words: str) -> None:
    found = sides()
    change(found)
    with pytest.raises(CertificateError, match=words):
        judge(found)


@pytest.mark.parametrize(("side", "member", "tensor"), [("source", 1, 1), ("target", 3, 0)])
def test_copies_that_differ_are_doubted(side: str, member: int, tensor: int) -> None:
    found = sides()
    changed(side, member, "weight", tensor)(found)
    other = "target" if side == "source" else "source"
    assert judge(found) == {"doubts": {side: {"weight": [tensor]}, other: {}}}


def test_an_error_that_all_replicas_share_is_found() -> None:
    found = sides()
    for member in range(4):
        changed("target", member, "weight", 1)(found)
    with pytest.raises(CertificateError, match="weight of 'second' is not the same after the moves"):
        judge(found)


def test_folds_pass_where_sums_do_with_the_same_digest() -> None:
    assert judge(sides(), folded) == judge(sides())


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("side", "member"), [("source", 1), ("target", 0), ("target", 3)])
def test_folds_differ_where_sums_do(side: str, member: int, kind: str, tensor: int) -> None:
    found = sides()
    changed(side, member, kind, tensor)(found)
    with suppress(CertificateError):
        assert judge(found, folded)["doubts"][side] == {kind: [0]}


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=9), st.integers(0, 1 << 32))
def test_folds_add_up(drawn: list[int], seed: int) -> None:
    one = np.array(drawn, np.uint64)
    other = np.random.default_rng(seed).integers(0, 1 << 63, size=len(one), dtype=np.uint64)
    assert np.array_equal(fold(one) + fold(other), fold(one + other))
    assert np.array_equal(fold(fold(one)), fold(one)) and len(fold(one)) == 1


# ---- several axes: sums say the same as all digests side by side ----------------------------------------------------

LAYOUTS = [
    Layout(data=1, zero_stage=0),
    Layout(data=3, zero_stage=0),
    Layout(data=2, zero_stage=1),
    Layout(data=2, zero_stage=3),
    Layout(data=2, tensor=2, zero_stage=1),
    Layout(data=1, tensor=3, zero_stage=0),
    Layout(data=2, pipe=2, zero_stage=1),
    Layout(data=2, pipe=2, tensor=2, zero_stage=0),
    Layout(data=4, expert=2, zero_stage=1),
    Layout(data=2, pipe=2, expert=2, zero_stage=0),
    Layout(data=2, tensor=2, expert=4, zero_stage=0),
]


def many(layout: Layout) -> VirtualParameterSpace:
    """Tensors that are cut by all axes, tied, or whole on several places."""
    return space(layout, tuple(axes.TENSORS))


def held_in(vps: VirtualParameterSpace, layout: Layout, seed: int) -> tuple[dict[int, SideDigests], Whole]:
    """(of each rank, of whole tensors) as if of real state: one number for each element, added up over what is held."""
    drawn = np.random.default_rng(seed).integers(0, 1 << 63, size=(len(KINDS), int(vps.bases[-1])), dtype=np.uint64)
    found, whole = {}, {kind: np.zeros(len(vps.tensors), np.uint64) for kind in KINDS}
    there = {kind: np.zeros(drawn.shape[1], bool) for kind in KINDS}
    for rank in range(layout.world_size):
        of = {}
        for row, kind in enumerate(KINDS):
            number, pieces = vps.split_by_tensor(vps.holding(layout, rank, kind))
            of[kind] = np.zeros(len(vps.tensors), np.uint64)
            for tensor, piece in zip(number.tolist(), pieces, strict=True):
                of[kind][[tensor]] += drawn[row, piece.start : piece.stop].sum(dtype=np.uint64)
                there[kind][piece.start : piece.stop] = True
        found[rank] = SideDigests(of)
    for row, kind in enumerate(KINDS):
        held = np.where(there[kind], drawn[row], np.uint64(0))
        for tensor, (start, stop) in enumerate(zip(vps.bases[:-1], vps.bases[1:], strict=True)):
            whole[kind][tensor] = held[start:stop].sum(dtype=np.uint64)
    return found, whole


@given(st.sampled_from(LAYOUTS), st.integers(0, 1000), st.data())
@settings(max_examples=60, deadline=None)
def test_sums_are_the_whole_state_and_find_what_differs(layout: Layout, seed: int, data: st.DataObject) -> None:
    vps = many(layout)
    found, whole = held_in(vps, layout, seed)
    sums = summed(vps, layout, found)
    assert not doubts(sums["copies"]) and not doubts(sums["places"])
    assert all(np.array_equal(sums["whole"][kind], whole[kind]) for kind in KINDS)

    rank, kind = data.draw(st.sampled_from(range(layout.world_size))), data.draw(st.sampled_from(KINDS))
    there = np.flatnonzero(found[rank][kind]).tolist()
    if not there:
        return
    tensor = data.draw(st.sampled_from(there))
    before = found[rank][kind][tensor]
    found[rank][kind][tensor] ^= np.uint64(data.draw(st.integers(1, (1 << 64) - 1)))
    wrong = summed(vps, layout, found)
    doubted = {**doubts(wrong["places"]), **doubts(wrong["copies"])}
    has_copies = sum(each[kind][tensor] == before for each in found.values()) > 0
    if not doubted:
        assert not has_copies and not np.array_equal(wrong["whole"][kind], whole[kind])
    else:
        assert doubted == {kind: [tensor]}


def together(layout: Layout, work: Callable[[Session, int], Any]) -> list[Any]:
    """What each rank's call returns or raises."""
    store, members = HashStore(), tuple(range(10, 10 + layout.world_size))

    def one(rank: int) -> Any:
        try:
            return work(Session(Control(store, "job", members[rank], 20.0), "it", members, "doing it"), rank)
        except CertificateError as error:
            return error

    with ThreadPoolExecutor(layout.world_size) as threads:
        return list(threads.map(one, range(layout.world_size)))


@pytest.mark.parametrize(
    ("layout", "rank", "kind", "words"),
    [
        (
            Layout(data=4, zero_stage=0),
            2,
            "weight",
            "weight of 'norm' differs between the replicas of members 10 and 12",
        ),
        (Layout(data=2, pipe=2, zero_stage=0), 1, "weight", "'norm' differs between the replicas of members 10 and 11"),
        (
            Layout(data=1, tensor=2, zero_stage=0),
            1,
            "master",
            "'norm' differs between the replicas of members 10 and 11",
        ),
    ],
)
def test_whose_copies_differ_is_told_to_all(layout: Layout, rank: int, kind: str, words: str) -> None:
    vps = many(layout)
    found, whole = held_in(vps, layout, 1)
    alike = together(layout, lambda session, mine: agreed(session, "one", vps, layout, mine, found[mine], "held"))
    assert all(np.array_equal(each[kind], whole[kind]) for each in alike for kind in KINDS)
    found[rank][kind][1] += np.uint64(1)
    said = together(layout, lambda session, mine: agreed(session, "one", vps, layout, mine, found[mine], "held"))
    assert {str(each) for each in said} == {str(said[0])}
    assert words in str(said[0])


def test_drift_between_places_is_no_error_where_it_can_be_settled() -> None:
    layout = Layout(data=1, tensor=2, zero_stage=0)
    vps = many(layout)
    found, _ = held_in(vps, layout, 1)
    found[1]["master"][1] += np.uint64(1)
    said = together(layout, lambda session, mine: differing(session, "one", vps, layout, mine, found[mine], "held"))
    assert said == [{"master": [1]}] * 2
