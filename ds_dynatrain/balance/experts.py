"""The distribution of a layer's tokens over ranks, and swaps of experts that make it more even.

Under AutoEP all ranks wait in each layer for the rank whose experts have the most tokens. The ranks of one index of the
expert axis have the same experts; a row lists the experts of one index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_dynatrain.balance.profile import ExpertCost, ExpertRows, Profile
from ds_dynatrain.space.layout import ExpertMap, Layout

LEAST_SWAP = 0.002
"""Smallest decrease of the busiest index's tokens, as a fraction of the mean, for which two experts are swapped."""


@dataclass(frozen=True)
class ExpertBalance:
    """The distribution of one layer's tokens: the most tokens of an index, divided by the mean over all indices.

    present: the ratio under the current map of experts.
    proposed: the ratio under the proposed map.
    bound: a lower bound on the ratio under any map, because the largest expert cannot be divided; at least 1.
    """

    name: str
    present: float
    proposed: float
    bound: float

    def __str__(self) -> str:
        swapped = f"{self.proposed:.3f} after swaps" if self.proposed != self.present else "no swap pays"
        return (
            f"experts of {self.name}: most tokens ÷ mean {self.present:.3f} now, {swapped}; at least {self.bound:.3f}"
        )


def rows_of(layout: Layout, layer: int, experts: int) -> ExpertRows:
    """Return the experts at each index of the expert axis. Without a map, the first index has the first experts.

    layer: the number of the layer among those with experts.
    experts: the number of experts in the layer.
    """
    if layout.experts is not None:
        return layout.experts[layer]
    size = experts // layout.expert
    return tuple(tuple(range(start, start + size)) for start in range(0, size * layout.expert, size))


def busiest(shares: Sequence[float], rows: ExpertRows) -> float:
    """Return the most tokens of an index of the expert axis, divided by the mean; 1 if there are no tokens.

    shares: each expert's share of the tokens.
    rows: the experts at each index.
    """
    loads = np.array(shares)[np.array(rows)].sum(axis=1)
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0


def swapped(shares: Sequence[float], rows: ExpertRows) -> ExpertRows:
    """Swap experts between the busiest index of the expert axis and another one until no swap helps; return the new
    rows.

    Each swap is the one that leaves the fewest tokens on the busier of its two indices.

    shares: each expert's share of the tokens.
    rows: the experts at each index.
    """
    held, tokens = np.array(rows), np.array(shares)
    while True:
        each = tokens[held]
        loads = each.sum(axis=1)
        hot = int(loads.argmax())
        given = each[hot][:, None, None] - each[None]  # [place on the busiest index, index, place]
        after = np.maximum(loads[hot] - given, loads[:, None] + given)
        mine, index, place = map(int, np.unravel_index(after.argmin(), after.shape))
        if not after[mine, index, place] < loads[hot] - LEAST_SWAP * loads.mean():
            return tuple(map(tuple, held.tolist()))
        held[hot, mine], held[index, place] = held[index, place], held[hot, mine]


def better_map(profile: Profile, layout: Layout, least_gain: float) -> ExpertMap | None:
    """Return the map of experts after swaps in each layer whose busiest index would get clearly fewer tokens.

    least_gain: the smallest saving for which a layer changes, as a fraction of the layer's time.
    """
    found = []
    for layer, cost in enumerate(profile.experts):
        rows = rows_of(layout, layer, len(cost.tokens))
        better, now = swapped(cost.tokens, rows), busiest(cost.tokens, rows)
        found.append(better if now - busiest(cost.tokens, better) > least_gain * now else rows)
    return tuple(found) or None


def balances(profile: Profile, present: Layout, proposed: Layout) -> tuple[ExpertBalance, ...]:
    """Return how evenly the tokens of each layer with experts are distributed in the current and in the proposed
    layout.
    """
    found = []
    for layer, cost in enumerate(profile.experts):
        now, then = (busiest(cost.tokens, rows_of(each, layer, len(cost.tokens))) for each in (present, proposed))
        found.append(ExpertBalance(cost.name, now, then, bound(cost, present.expert)))
    return tuple(found)


def measured_balances(profile: Profile) -> tuple[ExpertBalance, ...]:
    """Return how evenly each layer's tokens were distributed when measured, and how evenly they would be after all
    swaps.
    """
    return tuple(
        ExpertBalance(
            cost.name,
            busiest(cost.tokens, cost.rows),
            busiest(cost.tokens, swapped(cost.tokens, cost.rows)),
            bound(cost, len(cost.rows)),
        )
        for cost in profile.experts
    )


def bound(cost: ExpertCost, indices: int) -> float:
    """Return the lower bound of `busiest` under any map: the largest expert cannot be divided.

    indices: the size of the expert axis.
    """
    return max(1.0, max(cost.tokens) * indices / total) if (total := sum(cost.tokens)) else 1.0


def with_experts(profile: Profile, layout: Layout) -> Profile:
    """Return a profile in which layers take as long as on the rank with the most tokens under this layout."""
    if not profile.experts or layout.expert == 1:
        return profile
    layers = list(profile.layers)
    for number, cost in enumerate(profile.experts):
        more = busiest(cost.tokens, rows_of(layout, number, len(cost.tokens))) - 1
        known = layers[cost.layer]
        layers[cost.layer] = replace(
            known,
            forward_seconds=known.forward_seconds + more * cost.forward_seconds,
            backward_seconds=known.backward_seconds + more * cost.backward_seconds,
        )
    return replace(profile, layers=tuple(layers))
