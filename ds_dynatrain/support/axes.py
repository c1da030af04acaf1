"""Rules, based on a model's features, for the axis sizes and ZeRO stages with which DeepSpeed can train it.

The rules come from trying every combination on DeepSpeed itself (`tools/feasibility.py`, whose table is in
`docs/dev/feasibility.md`). Sizes that do not fit one particular model (its heads, experts, layers) are not covered
here: the adapters know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from ds_dynatrain.space.layout import RANK_ORDER, STAGES, Layout
from ds_dynatrain.support.row import Refusal

PIPELINE, EXPERTS, NATIVE_EXPERTS, ULYSSES = "pipeline", "AutoEP", "deepspeed.moe", "Ulysses"
"""Features of a model: a PipelineModule, experts distributed by AutoEP, layers of `deepspeed.moe`, and Ulysses.

Ulysses is attention over sequence ranks.
"""

Features = frozenset[str]

OTHER_AXES = ("pipe", "sequence", "tensor")
"""The axes, besides data, that add ranks."""

AXES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "pipe": ((PIPELINE,), "it is not a deepspeed.PipelineModule"),
    "expert": (
        (EXPERTS, NATIVE_EXPERTS),
        "no expert_parallel block distributes its experts, and it has no layers of deepspeed.moe",
    ),
    "sequence": ((ULYSSES,), "it has no DistributedAttention layer, and no mpu for sequence parallelism was given"),
}
"""A map from axis to (features, error text).

A model needs at least one of the features to use the axis; the error text is for a model without them. Every model can
use the data axis, and AutoTP determines which models can use the tensor axis.
"""


@dataclass(frozen=True)
class Rule:
    """A refused combination of features, axes and ZeRO stages.

    The rule applies if the model has all `features`, all `axes` are above 1, all axes in `without` have size 1, and the
    stage is in `stages`.

    why: the reason for the refusal.
    """

    features: tuple[str, ...]
    why: str
    axes: tuple[str, ...] = ()
    stages: tuple[int, ...] = STAGES
    without: tuple[str, ...] = ()

    def holds(self, features: Features, layout: Layout) -> bool:
        """Return whether the rule applies to a model with these features in a layout."""
        return (
            features.issuperset(self.features)
            and layout.zero_stage in self.stages
            and all(getattr(layout, axis) > 1 for axis in self.axes)
            and all(getattr(layout, axis) == 1 for axis in self.without)
        )


RULES: tuple[Rule, ...] = (
    Rule((PIPELINE,), "DeepSpeed trains pipelines only in ZeRO stages 0 and 1", stages=(2, 3)),
    Rule((PIPELINE,), "DeepSpeed's PipelineEngine has no tensor axis", ("tensor",)),
    Rule((PIPELINE,), "DeepSpeed accepts no mpu with a PipelineModule", ("sequence",)),
    Rule((NATIVE_EXPERTS,), "DeepSpeed trains layers of deepspeed.moe only in ZeRO stages 0 to 2", stages=(3,)),
    Rule(
        (NATIVE_EXPERTS,),
        "layers of deepspeed.moe gather tokens of tensor ranks in a way that gloo does not support",
        ("tensor",),
    ),
    Rule((NATIVE_EXPERTS,), "layers of deepspeed.moe mistake sequence ranks for tensor ranks", ("sequence",)),
    Rule((ULYSSES,), "AutoTP replaces the mpu that knows the sequence ranks", ("tensor", "sequence")),
    Rule((EXPERTS,), "AutoEP mistakes the mpu's sequence ranks for tensor ranks, and refuses them", ("sequence",)),
    Rule(
        (EXPERTS,),
        "AutoEP would count the gradients of tokens once for each tensor rank if every rank has all experts",
        ("tensor",),
        without=("expert",),
    ),
)
"""Combinations of features, axes and ZeRO stages that DeepSpeed does not train."""


def refusal(features: Features, layout: Layout, processes: int) -> Refusal | None:
    """Return why a model with these features cannot be trained in a layout, and the nearest valid layouts.

    Returns None if the model can be trained.

    processes: the maximum number of ranks available.
    """
    why = _why(features, layout)
    if why is None:
        return None
    near = nearest(features, layout, processes)
    return Refusal(f"{layout}: {why}", f"nearest: {' or '.join(map(str, near))}")


def nearest(features: Features, layout: Layout, processes: int) -> list[Layout]:
    """Return up to two valid layouts closest to a refused one, with the same number of ranks if processes suffice."""
    valid = [other for other in _layouts(min(layout.world_size, processes)) if _why(features, other) is None]
    return sorted(valid, key=lambda other: _distance(layout, other))[:2]


def smaller(layout: Layout, ranks: int, most_data: int | None = None) -> Layout:
    """Return the layout closest to one that is too large.

    ranks: the maximum number of ranks.
    most_data: the maximum size of the data axis; None for `ranks`.

    The ZeRO stage is unchanged, and every axis except data has the requested size or a divisor of it.
    """
    return min(_smaller(layout, ranks, ranks if most_data is None else most_data), key=partial(_distance, layout))


def _smaller(layout: Layout, ranks: int, most_data: int) -> Iterator[Layout]:
    for sizes in product(*(_divisors(getattr(layout, axis)) for axis in OTHER_AXES)):
        place: dict[str, Any] = dict(zip(OTHER_AXES, sizes, strict=True))
        room = min(ranks // math.prod(sizes), most_data)
        for expert in _divisors(layout.expert):
            step = expert // math.gcd(expert, place["sequence"] * place["tensor"])
            if room >= step:
                yield layout.replace(**place, data=room - room % step, expert=expert)


def _why(features: Features, layout: Layout) -> str | None:
    if layout.experts is not None and NATIVE_EXPERTS in features:
        return "deepspeed.moe pads each expert's tokens to the largest count, so a map of experts makes no layer faster"
    for axis, (needed, said) in AXES.items():
        if getattr(layout, axis) > 1 and features.isdisjoint(needed):
            return f"the model has no {axis} axis: {said}"
    return next((rule.why for rule in RULES if rule.holds(features, layout)), None)


def _layouts(ranks: int) -> Iterator[Layout]:
    """Yield all layouts of exactly `ranks` ranks."""
    for sizes in product(tuple(_divisors(ranks)), repeat=len(RANK_ORDER) - 1):
        if ranks % math.prod(sizes):
            continue
        place: dict[str, Any] = dict(zip(RANK_ORDER, (*sizes, ranks // math.prod(sizes)), strict=True))
        for expert in _divisors(ranks // place["pipe"]):
            yield from (Layout(**place, expert=expert, zero_stage=stage) for stage in STAGES)


def _divisors(number: int) -> Iterable[int]:
    return (size for size in range(1, number + 1) if number % size == 0)


def _distance(wanted: Layout, other: Layout) -> tuple[float, ...]:
    """Return a sort key that is smaller for nearer layouts: first by how many sizes differ, then by how much.

    An additional axis that was not requested counts three times.
    """
    pairs = {axis: (size, other.axes()[axis]) for axis, size in wanted.axes().items()}
    differing = sum(one != two for one, two in pairs.values()) + (wanted.zero_stage != other.zero_stage)
    unasked = sum(one == 1 < two for axis, (one, two) in pairs.items() if axis != "data")
    apart = sum(abs(math.log2(one / two)) for one, two in pairs.values())
    return (differing + 2 * unasked, apart, abs(wanted.zero_stage - other.zero_stage))
