"""What a rank of a layout holds at the most while it trains, from a profile.

State lies as `space.zero` says: weights are cut by stage 3, masters and moments by stages 1 to 3; where weight and
master are the same bytes (fp32), stages 0 and 3 hold them once. Gradients are held in the type of the weights, cut from
stage 2 on, and once more in the type of the masters while the optimizer steps, cut as these are. Activations are held
for each micro-batch in flight. Every number adds up over layers but what stage 3 gathers, so that the partition can
keep to it.

A profile knows layers, not tensors. What it says of a layer counts as whole on each place of the tensor and expert
axes, which is too much where they cut it. Buffers of DeepSpeed's reductions come in addition, and what an allocator
loses.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.profile import Ints, Profile
from ds_dynatrain.balance.schedule import in_flight
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.kind import MASTER, WEIGHT
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.zero import group_size


@dataclass(frozen=True)
class StageBytes:
    """What each rank of one pipeline stage holds, in bytes. states: masters, moments, and what else the kinds have.

    gathered: what stage 3 has of other ranks at the most, two layers that follow each other.
    """

    weights: int
    states: int
    gradients: int
    activations: int
    gathered: int

    @property
    def total(self) -> int:
        """At the most."""
        return self.weights + self.states + self.gradients + self.activations + self.gathered


def peak_bytes(profile: Profile, layout: Layout, deal: Deal) -> tuple[StageBytes, ...]:
    """What a rank of each stage holds; LayoutError for boundaries that are not of these layers."""
    cut = cut_of(profile, layout)
    weights, states, gradients = _state(profile, layout)
    activations, gathered = _activations(profile, layout, deal), gathered_bytes(profile, layout)
    found = []
    for line, (start, stop) in zip(activations, itertools.pairwise(cut), strict=True):
        held, others, reduced, kept = (int(each[start:stop].sum()) for each in (weights, states, gradients, line))
        found.append(StageBytes(held, others, reduced, kept, gathered))
    return tuple(found)


def taken_bytes(profile: Profile, layout: Layout, deal: Deal) -> Ints:
    """[stages, layers]: what a layer takes on a rank of each stage."""
    return _activations(profile, layout, deal) + sum(_state(profile, layout))


def gathered_bytes(profile: Profile, layout: Layout) -> int:
    """What stage 3 has of other ranks at the most: the layer at work, and the next one, fetched ahead."""
    if layout.zero_stage < 3:
        return 0
    weights = profile.kind_bytes(WEIGHT)
    return int((weights + np.append(weights[1:], 0)).max())


def cut_of(profile: Profile, layout: Layout) -> tuple[int, ...]:
    """The boundaries of a layout: of one stage all layers; LayoutError if there are none, or not of these layers."""
    layers = len(profile.layers)
    cut = layout.boundaries or ((0, layers) if layout.pipe == 1 else ())
    if not cut or cut[-1] != layers:
        raise LayoutError(f"{layout}: give boundaries that end with {layers}, the number of layers in the profile")
    return cut


def _state(profile: Profile, layout: Layout) -> tuple[Ints, Ints, Ints]:
    """(weights, other kinds, gradients): [layers] each, bytes on a rank."""
    ranks, stage = group_size(layout), layout.zero_stage
    weight, master = profile.kind_bytes(WEIGHT), profile.kind_bytes(MASTER)
    shared = (weight == master) & (stage in (0, 3))
    others = profile.counts("total_bytes") - weight - np.where(shared, master, 0)
    gradient, stepped = np.where(profile.trained, weight, 0), np.where(shared, 0, master)
    whole = ranks if stage >= 1 else 1
    gradients = _parts(gradient, ranks if stage >= 2 else 1) + _parts(stepped, whole)
    return _parts(weight, ranks if stage == 3 else 1), _parts(others, whole), gradients


def _parts(values: Ints, ranks: int) -> Ints:
    return np.asarray(-(-values // ranks), dtype=np.int64)


def _activations(profile: Profile, layout: Layout, deal: Deal) -> Ints:
    """[stages, layers]: of all micro-batches in flight."""
    flights = np.array([in_flight(layout.pipe, deal.micro_batches, stage) for stage in range(layout.pipe)])
    one = profile.counts("activation_bytes") * (deal.size / profile.micro_batch_size)
    return np.asarray(np.ceil(flights[:, None] * one[None, :]), dtype=np.int64)
