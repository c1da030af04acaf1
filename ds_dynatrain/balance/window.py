"""From the passes of one window to what all ranks say of it: medians over micro-batches, one row for each layer.

A rank has a row for each layer of its stage (`COLUMNS`, float64). The rows of all ranks make one window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_dynatrain.balance.decision import CERTAIN
from ds_dynatrain.balance.profile import BESIDE, BYTES, ERRORS, SECONDS, Floats
from ds_dynatrain.errors import ProfileError
from ds_dynatrain.space.layout import Layout

COLUMNS = (*SECONDS, *ERRORS, *BYTES)
"""Of a row: the fields of `LayerCost` that are measured."""
OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median of normal numbers, by that of their mean."""
OF_DEVIATION = 1.4826
"""Standard deviation of normal numbers, by their median distance from the median."""

PASSES = slice(0, 2)
"""The columns of both passes' seconds."""
_TIMES = slice(0, len(SECONDS))
ERROR_COLUMNS = slice(len(SECONDS), len(SECONDS) + len(ERRORS))
"""Those of standard errors, of passes first."""


def rows_of(
    forward: Floats, backward: Floats, optimizer: Floats, kept_bytes: Sequence[int], output_bytes: Sequence[int]
) -> Floats:
    """[layers, COLUMNS] of one rank.

    forward, backward: [passes, layers], seconds; no pass at all is 0 s. optimizer: [steps, layers], seconds of a step
    over all of a layer's elements.
    """
    parts = [_median(each) for each in (forward, backward, optimizer)]
    columns = [*(middle for middle, _ in parts), *(error for _, error in parts), kept_bytes, output_bytes]
    return np.array(columns, dtype=np.float64).T.copy()


def _median(passes: Floats) -> tuple[Floats, Floats]:
    """Of each layer, and its standard error; a single pass says nothing of its error, which is then all of it."""
    count, layers = passes.shape
    if not count:
        return np.zeros(layers), np.zeros(layers)
    middle = np.median(passes, axis=0)
    if count == 1:
        return middle, middle.copy()
    spread = OF_DEVIATION * np.median(np.abs(passes - middle), axis=0)
    return middle, OF_MEDIAN * spread / math.sqrt(count)


@dataclass(frozen=True, eq=False)
class Window:
    """What all ranks say. rows: [layers of the model, COLUMNS] on a member of speed 1. speeds: by rank. beside:
    [BESIDE], the middle one of those that have measured it, else 0.

    Speeds compare the ranks of one stage: nobody else has the same layers. The middle one of them has 1, and so has
    who differs from it by no more than 4 standard errors.
    """

    rows: Floats
    speeds: tuple[float, ...]
    beside: Floats

    @classmethod
    def of(
        cls,
        by_rank: Mapping[int, npt.ArrayLike],
        layout: Layout,
        boundaries: Sequence[int],
        beside: Sequence[Sequence[float]] = (),
    ) -> Window:
        """beside: [ranks, BESIDE]. ProfileError unless every rank has a row for each layer of its stage."""
        size = layout.ranks_per_stage
        rows, speeds = [], list[float]()
        for stage in range(layout.pipe):
            layers = boundaries[stage + 1] - boundaries[stage]
            found = []
            for rank in range(stage * size, (stage + 1) * size):
                mine = np.asarray(by_rank.get(rank, ()), dtype=np.float64)
                if mine.shape != (layers, len(COLUMNS)):
                    raise ProfileError(
                        f"rank {rank} of {layout} measured {mine.shape}, and stage {stage} has {layers} layers of "
                        f"{len(COLUMNS)} numbers each; call engine.balancer.note('again') and measure another window"
                    )
                found.append(mine)
            merged, pace = _merged(np.stack(found))
            rows.append(merged)
            speeds += pace.tolist()
        return cls(np.concatenate(rows), tuple(speeds), _middle(beside))


def _middle(beside: Sequence[Sequence[float]]) -> Floats:
    """[BESIDE]; a stage that loads nothing, or has no neighbour, has 0 s and does not count."""
    columns = np.array(beside, dtype=np.float64).reshape(-1, len(BESIDE)).T
    return np.array([np.median(each[each > 0]) if (each > 0).any() else 0.0 for each in columns])


def _merged(found: Floats) -> tuple[Floats, Floats]:
    """[ranks, layers, COLUMNS] of one stage as [layers, COLUMNS] on a member of speed 1, and the speeds."""
    total = found[:, :, PASSES].sum(axis=(1, 2))
    errors = np.sqrt((found[:, :, ERROR_COLUMNS][:, :, PASSES] ** 2).sum(axis=(1, 2)))
    middle = int(np.argsort(total, kind="stable")[(len(total) - 1) // 2])
    differs = np.abs(total - total[middle]) > CERTAIN * np.hypot(errors, errors[middle])
    speeds = np.ones(len(total))
    speeds[differs] = total[middle] / total[differs] if total[middle] else 1.0
    rows = found[0].copy()
    scaled = speeds[:, None, None]
    rows[:, _TIMES] = (found[:, :, _TIMES] * scaled).mean(axis=0)
    rows[:, ERROR_COLUMNS] = np.sqrt(((found[:, :, ERROR_COLUMNS] * scaled) ** 2).sum(axis=0)) / len(found)
    rows[:, len(SECONDS) + len(ERRORS) :] = found[:, :, len(SECONDS) + len(ERRORS) :].max(axis=0)
    return rows, speeds
