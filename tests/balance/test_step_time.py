"""Seconds of a step and bytes of a rank: by hand, in closed form, and against the project's own space."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.balance.deal import Deal, peak_bytes, shares_of, state_of, taken_bytes
from ds_dynatrain.balance.profile import LayerCost, Profile
from ds_dynatrain.balance.step_time import Link, LinkCosts, step_time
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.plan import held_bytes
from ds_dynatrain.space import (
    FROZEN,
    AxisCuts,
    Layout,
    LogicalTensor,
    Partition,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
)
from tests.balance.profiles import FP16, FP32, layer, profile

SLOW = LinkCosts(Link(1000.0, 0.25))


def costs(**more: Any) -> LayerCost:
    """A layer of 100 elements and round numbers: 200 bytes of weights, 12 seconds of optimizer."""
    return layer("a", 1.0, 100, **{"optimizer_seconds": 12.0, **more})


def of(layout: Layout, layers: tuple[LayerCost, ...], batch: int = 12, **more: Any) -> dict[str, float]:
    """The terms in seconds."""
    measured = Profile(layers=layers, train_batch_size=batch, micro_batch_size=1)
    found = step_time(measured, layout, Deal.of(measured, layout), **more)
    assert found.seconds == pytest.approx(found.step_ms["total"] / 1e3)
    return {name: ms / 1e3 for name, ms in found.step_ms.items()}


def test_one_rank_computes_and_steps() -> None:
    terms = of(Layout(zero_stage=0), (costs(), costs()))
    assert terms == {"compute": 72, "waiting": 0, "reduce": 0, "optimizer": 24, "gather": 0, "beside": 0, "total": 96}


def test_what_a_pipeline_does_beside_its_layers() -> None:
    """Samples are loaded on the first and on the last stage, a message takes both sides, and the rest comes once."""
    beside = {"load_seconds": 0.5, "message_seconds": 0.25, "beside_seconds": 7.0}
    layers = (costs(), costs(), costs())
    plain = Profile(layers=layers, train_batch_size=1, micro_batch_size=1)
    measured = Profile(layers=layers, train_batch_size=1, micro_batch_size=1, **beside)
    layout = Layout(zero_stage=0, pipe=3, boundaries=(0, 1, 2, 3))
    times = [step_time(each, layout, Deal.of(each, layout)) for each in (plain, measured)]
    assert times[1].seconds - times[0].seconds == 2 * 0.5 + 4 * 0.25 + 7
    assert [after - before for before, after in zip(times[0].busy, times[1].busy, strict=True)] == [0.5, 0, 0.5]
    whole = [
        step_time(each, Layout(zero_stage=0), Deal.of(each, Layout(zero_stage=0))).seconds for each in (plain, measured)
    ]
    assert whole[1] - whole[0] == 0.5 + 7, "one stage loads them once"


@pytest.mark.parametrize(
    ("zero_stage", "reduce", "optimizer", "gather"),
    [
        # 3 ranks: a gather is 2 messages of a third, 0.25 s + 66.7 bytes / 1000 each; a reduction two of them
        (0, 2 * 2 * (0.25 + 200 / 3000), 12, 0),
        (1, 2 * 2 * (0.25 + 200 / 3000), 4, 2 * (0.25 + 200 / 3000)),
        (2, 4 * 2 * 2 * (0.25 + 200 / 3000), 4, 2 * (0.25 + 200 / 3000)),  # with each of 4 micro-batches
        (3, 4 * 2 * (0.25 + 200 / 3000), 4, 4 * 2 * 2 * (0.25 + 200 / 3000)),
    ],
)
def test_data_ranks(zero_stage: int, reduce: float, optimizer: float, gather: float) -> None:
    terms = of(Layout(zero_stage=zero_stage, data=3), (costs(),), links=SLOW)
    assert terms["compute"] == 12 and terms["waiting"] == 0
    assert [terms[name] for name in ("reduce", "optimizer", "gather")] == pytest.approx([reduce, optimizer, gather])


def test_the_share_of_bytes_of_a_ring() -> None:
    link = Link(1.0)
    for ranks in range(1, 9):
        assert link.gather(100.0, ranks) == pytest.approx(100 * (ranks - 1) / ranks)


def test_a_pipeline_waits_for_its_bubble_and_its_messages() -> None:
    """Two stages, two micro-batches, forward 1, backward 2: 9 seconds by hand (test_schedule), each computes 6."""
    layers = (costs(), costs())
    layout = Layout(zero_stage=1, pipe=2, boundaries=(0, 1, 2))
    assert of(layout, layers, batch=2)["waiting"] == 3
    # 100 bytes, three meetings, one of which has two messages: 4 messages of 0.35 s
    assert of(layout, layers, batch=2, links=SLOW)["waiting"] == pytest.approx(3 + 4 * 0.35)


def test_what_reductions_take_beyond_the_last_pass_is_what_counts() -> None:
    """The last stage is done before the first one, and reduces its gradients meanwhile."""
    small, large = layer("s", 1.0, 1), layer("l", 1.0, 1000)
    layout = Layout(zero_stage=0, pipe=2, data=2, boundaries=(0, 1, 2))
    links = LinkCosts(Link(10000.0))
    early = of(layout, (small, large), batch=4, links=links)
    late = of(layout, (large, small), batch=4, links=links)
    assert late["reduce"] == pytest.approx(0.2)
    assert early["reduce"] < 0.001


def test_slow_ranks() -> None:
    layers = (costs(), costs())
    layout = Layout(zero_stage=1, pipe=2, boundaries=(0, 1, 2))
    measured = Profile(layers=layers, train_batch_size=8, micro_batch_size=1)
    found = step_time(measured, layout, Deal.of(measured, layout), speeds=(1, 0.5))
    assert found.bottleneck == 1 and found.busy == (36, 72)
    assert found.step_ms["optimizer"] == 24e3
    even = step_time(measured, layout, Deal.of(measured, layout))
    assert even.seconds < found.seconds and found.efficiency < even.efficiency <= 1


def test_shares_help_a_slow_rank() -> None:
    measured = Profile(layers=(costs(optimizer_seconds=0.0),), train_batch_size=9, micro_batch_size=3)
    layout = Layout(zero_stage=0, data=2)
    pace = (1, 0.5)
    even = step_time(measured, layout, Deal.of(measured, layout), speeds=pace)
    shared = layout.replace(shares=(6, 3))
    uneven = step_time(measured, shared, Deal.of(measured, shared), speeds=pace)
    assert uneven.seconds == 6 and uneven.efficiency == 1 and even.seconds == 8


@given(pace=st.lists(st.floats(0.2, 2), min_size=1, max_size=3), more=st.integers(0, 6))
def test_shares_are_the_best_there_are(pace: list[float], more: int) -> None:
    """Against all of them."""
    samples = len(pace) + more

    def last(shares: tuple[int, ...]) -> float:
        return max(share / speed for share, speed in zip(shares, pace, strict=True))

    every = [each for each in itertools.product(range(1, samples + 1), repeat=len(pace)) if sum(each) == samples]
    found = shares_of(pace, samples)
    assert found in every and last(found) == min(map(last, every))


def test_columns_of_a_pipeline_run_their_own_number() -> None:
    measured = Profile(layers=(costs(), costs()), train_batch_size=8, micro_batch_size=1)
    layout = Layout(zero_stage=1, pipe=2, data=2, boundaries=(0, 1, 2), shares=(5, 3))
    deal = Deal.of(measured, layout)
    assert deal.counts == (5, 3)
    found = step_time(measured, layout, deal, speeds=(1, 0.6, 1, 0.6))
    alone = Profile(layers=(costs(), costs()), train_batch_size=5, micro_batch_size=1)
    pipe = layout.replace(data=1)
    assert found.compute_seconds == pytest.approx(3 * 3 / 0.6)
    quick = step_time(measured, layout, deal, speeds=(1, 0.75, 1, 0.75))
    five = step_time(alone, pipe, Deal.of(alone, pipe))
    assert (quick.compute_seconds, quick.waiting_seconds) == (five.compute_seconds, five.waiting_seconds) == (15, 3)


def test_a_frozen_prefix_gets_no_gradient() -> None:
    frozen = layer("f", 1.0, trained=False, backward_seconds=0.0)
    layout = Layout(zero_stage=1, pipe=2, boundaries=(0, 1, 2))
    without = of(layout, (frozen, costs()), batch=3, links=SLOW)
    passed = of(layout, (layer("f", 1.0, backward_seconds=0.0), costs()), batch=3, links=SLOW)
    assert without["total"] < passed["total"] - 0.3


def test_seconds_go_with_the_samples() -> None:
    measured = Profile(layers=(costs(optimizer_seconds=0.0),) * 2, train_batch_size=8, micro_batch_size=4)
    layout = Layout(zero_stage=1, pipe=2, boundaries=(0, 1, 2))
    deal = Deal.of(measured, layout, 8)
    assert deal.size == 1 and deal.micro_batches == 8
    assert step_time(measured, layout, deal).seconds == 0.25 * (8 * 3 + 3)
    assert step_time(measured, layout, Deal.of(measured, layout)).seconds == 2 * 3 + 3


def test_links_between_nodes() -> None:
    links = LinkCosts(Link(math.inf), Link(1.0), per_node=2)
    assert links.of([0, 1]) is links.inside and links.of([1, 2]) is links.between
    assert LinkCosts(links.inside, links.between).of(range(100)) is links.inside
    moved = replace(links, members=(0, 2, 1, 3))
    assert moved.of([0, 1]) is links.between and moved.of([0, 2]) is links.inside
    layout = Layout(zero_stage=1, pipe=2, data=2, boundaries=(0, 1, 2))
    terms = of(layout, (costs(), costs()), batch=4, links=links)
    assert terms["reduce"] == 0 and terms["waiting"] > 400  # each stage on a node, messages of 100 bytes between them
    across = of(layout.replace(pipe=1, data=4), (costs(), costs()), batch=4, links=links)
    assert across["reduce"] == pytest.approx(2 * 0.75 * 400)


@pytest.mark.parametrize("kinds", [FP16, FP32], ids=["half", "single"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pipe", [1, 2])
def test_state_is_what_the_space_says(pipe: int, zero_stage: int, kinds: dict[str, int]) -> None:
    """Weights and states of a rank, with one tensor for each layer, one of them frozen; parts are rounded up."""
    sizes, frozen = (96, 48, 24, 120, 60), 2
    cut = (0, 5) if pipe == 1 else (0, 2, 5)
    layers = tuple(layer(f"l{k}", 1.0, size, kinds, trained=k != frozen) for k, size in enumerate(sizes))
    order = [k for k in range(5) if k != frozen] + [frozen]
    layout = Layout(zero_stage=zero_stage, pipe=pipe, data=3, boundaries=cut)

    def partition(wanted: Layout) -> Partition:
        return tuple(AxisCuts((sum(k >= each for each in cut[1:-1]),)) for k in order)

    tensors = [LogicalTensor(f"l{k}", (sizes[k],), 0 if k != frozen else FROZEN) for k in order]
    space = VirtualParameterSpace.of(
        tensors, ZeroRules(alignment_factor=1), standard_kinds(kinds["weight"]), layout, range(3 * pipe), partition
    )
    measured = Profile(layers=layers, train_batch_size=12, micro_batch_size=1)
    weights, others, _ = state_of(measured, layout)
    for stage, (start, stop) in enumerate(itertools.pairwise(cut)):
        held = held_bytes(space, layout, tuple(kinds))[3 * stage : 3 * stage + 3]
        assert (weights + others)[start:stop].sum() == held.max()


def test_bytes_by_hand() -> None:
    """Two layers of 200 bytes of weights, 400 of masters and of each moment, 1000 of activations for each sample."""
    measured = profile((1.0, 1.0), batch=8)
    pipe = Layout(zero_stage=1, pipe=2, data=2, boundaries=(0, 1, 2))
    assert [each.tolist() for each in state_of(measured, pipe)] == [[200] * 2, [600] * 2, [200 + 200] * 2]
    held = 200 + 600 + 200 + 200
    assert peak_bytes(measured, pipe, Deal.of(measured, pipe)) == (held + 2000, held + 1000)
    third = Layout(zero_stage=3, data=2)
    assert [each.tolist() for each in state_of(measured, third)] == [[100] * 2, [600] * 2, [100 + 200] * 2]
    assert peak_bytes(measured, third, Deal.of(measured, third)) == (200 + 1200 + 600 + 2000 + 400,)


def test_what_a_layer_takes_adds_up() -> None:
    measured = profile((1.0, 2.0, 1.0, 1.0), batch=12)
    for zero_stage, pipe in itertools.product((0, 1), (1, 2, 3)):
        cut = {1: (0, 4), 2: (0, 1, 4), 3: (0, 1, 2, 4)}[pipe]
        layout = Layout(zero_stage=zero_stage, pipe=pipe, data=2, boundaries=cut)
        deal = Deal.of(measured, layout)
        taken = taken_bytes(measured, layout, deal)
        sums = [int(taken[k, start:stop].sum()) for k, (start, stop) in enumerate(itertools.pairwise(cut))]
        assert sums == [*peak_bytes(measured, layout, deal)]


def test_bad_input() -> None:
    measured = profile(batch=8)
    layout = Layout(zero_stage=1, data=2)
    with pytest.raises(LayoutError, match="give boundaries that end with 8"):
        step_time(measured, Layout(zero_stage=1, pipe=2), Deal((8,), 8))
    with pytest.raises(LayoutError, match="give boundaries that end with 8"):
        peak_bytes(measured, Layout(zero_stage=1, pipe=2, boundaries=(0, 3, 7)), Deal((8,), 8))
    with pytest.raises(LayoutError, match=r"shares \(5, 2\) are 7 samples"):
        Deal.of(measured, layout.replace(shares=(5, 2)))
    with pytest.raises(LayoutError, match="each data index needs a sample"):
        Deal((8, 0), 1)
    with pytest.raises(LayoutError, match="1 samples over 2 data indices"):
        shares_of((1, 1), 1)
    with pytest.raises(LayoutError, match="5 micro-batches of 4 samples"):
        Deal.of(measured, layout, 5)
    with pytest.raises(LayoutError, match="more than 0"):
        Link(0)
    with pytest.raises(LayoutError, match="0 or more"):
        Link(1, math.nan)
