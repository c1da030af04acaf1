"""Which combinations of axes and stages are let in: the rules, and the tables that they come from."""

from __future__ import annotations

import pytest

from ds_dynatrain.space import Layout
from ds_dynatrain.support.axes import (
    EXPERTS,
    NATIVE_EXPERTS,
    PIPELINE,
    RULES,
    ULYSSES,
    nearest,
    refusal,
)


def refused(layout: Layout, *features: str, processes: int = 4) -> tuple[str, str]:
    found = refusal(frozenset(features), layout, processes)
    assert found is not None, layout
    return found.why, found.instead


@pytest.mark.parametrize(
    ("layout", "features", "why", "instead"),
    [
        (
            Layout(data=2, pipe=2, zero_stage=1),
            (),
            "no pipe axis: it is not a deepspeed.PipelineModule",
            "data=4 zero_stage=1",
        ),
        (Layout(data=2, expert=2, zero_stage=1), (), "no expert axis", "data=2 zero_stage=1"),
        (
            Layout(sequence=2, zero_stage=3),
            (),
            "no sequence axis: it has no DistributedAttention",
            "data=2 zero_stage=3",
        ),
        (
            Layout(data=2, pipe=2, zero_stage=3),
            (PIPELINE,),
            "pipelines only in ZeRO stages 0 and 1",
            "data=2 pipe=2 zero_stage=1",
        ),
        (Layout(zero_stage=2), (PIPELINE,), "only in ZeRO stages 0 and 1", "data=1 zero_stage=1"),
        (Layout(pipe=2, tensor=2, zero_stage=1), (PIPELINE,), "no tensor axis", "data=2 pipe=2 zero_stage=1"),
        (
            Layout(data=4, expert=2, zero_stage=3),
            (NATIVE_EXPERTS,),
            "only in ZeRO stages 0 to 2",
            "data=4 expert=2 zero_stage=2",
        ),
        (
            Layout(data=2, tensor=2, zero_stage=1),
            (EXPERTS,),
            "once for each tensor rank if every rank has all experts",
            "data=4 zero_stage=1 or data=2 expert=2 tensor=2 zero_stage=1",
        ),
        (
            Layout(data=2, sequence=2, zero_stage=1),
            (EXPERTS, ULYSSES),
            "mistakes the mpu's sequence ranks for tensor ranks",
            "data=4 zero_stage=1",
        ),
    ],
)
def test_refusals_name_the_reason_and_what_is_nearest(
    layout: Layout, features: tuple[str, ...], why: str, instead: str
) -> None:
    said, way_out = refused(layout, *features)
    assert str(layout) in said and why in said
    assert way_out.startswith(f"nearest: {instead}")


def test_what_is_nearest_can_be_trained() -> None:
    everything = frozenset({PIPELINE, NATIVE_EXPERTS, EXPERTS, ULYSSES})
    for rule in RULES:
        sizes = {axis: 2 for axis in rule.axes if axis != "expert"}
        layout = Layout(**{"data": 2, **sizes}, zero_stage=rule.stages[0])  # type: ignore[arg-type]
        for features in (frozenset(rule.features), everything):
            found = nearest(features, layout, 8)
            assert found and all(other.world_size == layout.world_size for other in found)
            assert all(refusal(features, other, 8) is None for other in found)
    assert nearest(frozenset(), Layout(pipe=8, zero_stage=0), 4)[0] == Layout(data=4, zero_stage=0)
