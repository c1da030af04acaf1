"""Layers to stages by exchanges of neighbours: for tables that compare it with the optimal cut, and for nothing else.

After DynMo's "diffusion" balancer (arXiv 2505.14864; code: wahibium/DynMo). Here a pair of neighbours takes its own
best cut, in turns of odd and even boundaries, so the order of layers stays, as it does not in that code. Each change
lowers the loads, sorted from the largest down, so it ends. At the end no boundary alone can be moved for the better,
which says nothing about all of them together: the slowest stage may take twice the optimum. It knows neither room nor
speeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_dynatrain.balance.profile import Floats


@dataclass(frozen=True)
class Diffused:
    """Where the exchanges ended. seconds: of the slowest stage. rounds: of all boundaries, the last changed nothing."""

    boundaries: tuple[int, ...]
    seconds: float
    rounds: int


def diffuse(seconds: Floats, boundaries: tuple[int, ...]) -> Diffused:
    """Exchange layers from these boundaries on until no pair of neighbours gains. seconds: [layers]."""
    sums = np.concatenate((np.zeros(1), np.cumsum(seconds)))
    cut, rounds, changed = list(boundaries), 0, True
    while changed:
        changed, rounds = False, rounds + 1
        for parity in (1, 2):
            for place in range(parity, len(cut) - 1, 2):
                start, stop = cut[place - 1], cut[place + 1]
                inner = np.arange(start + 1, stop)
                loads = np.maximum(sums[inner] - sums[start], sums[stop] - sums[inner])
                best = int(loads.argmin())
                if loads[best] < loads[cut[place] - start - 1]:
                    cut[place], changed = start + 1 + best, True
    loads = np.diff(sums[cut])
    return Diffused(tuple(cut), float(loads.max()), rounds)
