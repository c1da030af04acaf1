"""A balancer in which neighbouring stages exchange layers. It is only used in tables that compare it with the optimum.

It follows DynMo's "diffusion" balancer (arXiv 2505.14864; code: wahibium/DynMo). Here pairs of neighbours take their
own best cut, at odd and even boundaries in turn, so the order of layers stays, which it does not in that code. Each
change lowers the loads, sorted from the largest down, so the exchanges end. At the end no single boundary can be
improved. All boundaries together may still be far from optimal: the slowest stage may take twice the optimum. Memory
and speeds are not taken into account.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_dynatrain.balance.profile import Floats


@dataclass(frozen=True)
class Diffused:
    """The state in which the exchanges ended.

    seconds: the time of the slowest stage.
    rounds: the number of rounds over all boundaries, including the last one, which changed nothing.
    """

    boundaries: tuple[int, ...]
    seconds: float
    rounds: int


def diffuse(seconds: Floats, boundaries: tuple[int, ...]) -> Diffused:
    """Exchange layers, starting with these boundaries, until no pair of neighbours gains.

    seconds: [layers].
    """
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
