"""From the passes of one window to a profile: medians over micro-batches, one view of all ranks, means over windows.

A rank has a row for each layer of its stage (`COLUMNS`, float64). The rows of all ranks make one window; windows are
averaged while costs stay what they are, and begun anew when two in a row say that they have changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynatrain.balance.decision import CERTAIN, REMEMBERED, costs_differ
from ds_dynatrain.balance.profile import BYTES, ERRORS, SECONDS, Floats, LayerCost, Profile
from ds_dynatrain.errors import ProfileError
from ds_dynatrain.space.layout import Layout

COLUMNS = (*SECONDS, *ERRORS, *BYTES)
"""Of a row: the fields of `LayerCost` that are measured."""
NEW_SHARE = 0.25
"""Of a window in the mean, once there are four; before that all windows count alike."""
OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median of normal numbers, by that of their mean."""
OF_DEVIATION = 1.4826
"""Standard deviation of normal numbers, by their median distance from the median."""

_PASSES = slice(0, 2)
_TIMES = slice(0, len(SECONDS))
_ERRORS = slice(len(SECONDS), len(SECONDS) + len(ERRORS))


@dataclass(frozen=True)
class Known:
    """What is known of a layer without measuring it; see `LayerCost`."""

    name: str
    kind_bytes: Mapping[str, int]
    trained: bool


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
    """What all ranks say. rows: [layers of the model, COLUMNS] on a member of speed 1. speeds: by rank.

    Speeds compare the ranks of one stage: nobody else has the same layers. The middle one of them has 1, and so has
    who differs from it by no more than 4 standard errors.
    """

    rows: Floats
    speeds: tuple[float, ...]

    @classmethod
    def of(cls, by_rank: Mapping[int, npt.ArrayLike], layout: Layout, boundaries: Sequence[int]) -> Window:
        """ProfileError unless every rank has a row for each layer of its stage."""
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
                        f"{len(COLUMNS)} numbers each"
                    )
                found.append(mine)
            merged, pace = _merged(np.stack(found))
            rows.append(merged)
            speeds += pace.tolist()
        return cls(np.concatenate(rows), tuple(speeds))


def _merged(found: Floats) -> tuple[Floats, Floats]:
    """[ranks, layers, COLUMNS] of one stage as [layers, COLUMNS] on a member of speed 1, and the speeds."""
    total = found[:, :, _PASSES].sum(axis=(1, 2))
    errors = np.sqrt((found[:, :, _ERRORS][:, :, _PASSES] ** 2).sum(axis=(1, 2)))
    middle = int(np.argsort(total, kind="stable")[(len(total) - 1) // 2])
    differs = np.abs(total - total[middle]) > CERTAIN * np.hypot(errors, errors[middle])
    speeds = np.ones(len(total))
    speeds[differs] = total[middle] / total[differs] if total[middle] else 1.0
    rows = found[0].copy()
    scaled = speeds[:, None, None]
    rows[:, _TIMES] = (found[:, :, _TIMES] * scaled).mean(axis=0)
    rows[:, _ERRORS] = np.sqrt(((found[:, :, _ERRORS] * scaled) ** 2).sum(axis=0)) / len(found)
    rows[:, len(SECONDS) + len(ERRORS) :] = found[:, :, len(SECONDS) + len(ERRORS) :].max(axis=0)
    return rows, speeds


@dataclass(frozen=True, eq=False)
class Doubted:
    """A window that differs from those before it: [layers, COLUMNS], as of a step."""

    rows: Floats
    step: int


@dataclass(frozen=True, eq=False)
class Averaged:
    """The mean over windows. batch: (samples of a step, of a micro-batch). since: see `decision.History`.

    windows: how many it is of. speeds: of the last one. doubted: the last one, where it is not in the mean: layers that
    have not changed may take a third longer in all passes of one window, as where a core is shared, so costs are others
    only once the next window says the same.
    """

    rows: Floats
    speeds: tuple[float, ...]
    batch: tuple[int, int]
    windows: int = 1
    since: tuple[int, ...] = (0,)
    doubted: Doubted | None = None

    @classmethod
    def after(
        cls, before: Averaged | None, window: Window, batch: tuple[int, int], step: int, least: float, is_new: bool
    ) -> Averaged:
        """With one more window. least: share of all layers' seconds by which costs must differ to be others.

        is_new: whether they are known to be others.
        """
        now = cls(window.rows, window.speeds, batch, since=(step,))
        if before is None or before.batch != batch or before.rows.shape != window.rows.shape:
            return now
        if is_new:
            return before._begun_anew(window, step)
        if not _differ(before.rows, window.rows, least):
            return before._with(window)
        doubted = before.doubted
        if doubted is not None and _is_nearer(window.rows, doubted.rows, before.rows):
            return before._begun_anew(window, doubted.step)
        return replace(before, speeds=window.speeds, doubted=Doubted(window.rows, step))

    def _begun_anew(self, window: Window, step: int) -> Averaged:
        """Costs are others since a step. The window that was doubted stays out: it may have been noise all the same."""
        return Averaged(window.rows, window.speeds, self.batch, since=(*self.since, step)[-REMEMBERED:])

    def _with(self, window: Window) -> Averaged:
        share = max(NEW_SHARE, 1 / (self.windows + 1))
        rows = (1 - share) * self.rows + share * window.rows
        rows[:, _ERRORS] = np.hypot((1 - share) * self.rows[:, _ERRORS], share * window.rows[:, _ERRORS])
        return Averaged(rows, window.speeds, self.batch, self.windows + 1, self.since)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` gives the same, every digit of it."""
        doubted = self.doubted
        return {
            "rows": self.rows.tolist(),
            "speeds": list(self.speeds),
            "batch": list(self.batch),
            "windows": self.windows,
            "since": list(self.since),
            "doubted": None if doubted is None else [doubted.rows.tolist(), doubted.step],
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Averaged:
        """The inverse of `to_json`."""
        doubted = None
        if said["doubted"] is not None:
            doubted = Doubted(np.array(said["doubted"][0], dtype=np.float64), int(said["doubted"][1]))
        rows = np.array(said["rows"], dtype=np.float64)
        batch = int(said["batch"][0]), int(said["batch"][1])
        return cls(rows, tuple(said["speeds"]), batch, int(said["windows"]), tuple(said["since"]), doubted)

    def profile(self, layers: Sequence[Known], source: str = "") -> Profile:
        """With what is known of the layers."""
        costs = []
        for known, row in zip(layers, self.rows.tolist(), strict=True):
            measured = dict(zip(COLUMNS, row, strict=True))
            counts = {name: round(measured.pop(name)) for name in BYTES}
            own = LayerCost(
                name=known.name,
                forward_seconds=0.0,
                backward_seconds=0.0,
                kind_bytes=dict(known.kind_bytes),
                trained=known.trained,
            )
            costs.append(replace(own, **measured, **counts))
        train, micro = self.batch
        return Profile(
            layers=tuple(costs), train_batch_size=train, micro_batch_size=micro, speeds=self.speeds, source=source
        )


def _differ(before: Floats, after: Floats, least: float) -> bool:
    errors = [np.sqrt((rows[:, _ERRORS][:, _PASSES] ** 2).sum(axis=1)) for rows in (before, after)]
    return costs_differ(_seconds(before), _seconds(after), np.hypot(errors[0], errors[1]), least)


def _is_nearer(rows: Floats, one: Floats, other: Floats) -> bool:
    """Whether layers take times that are nearer to those of the one than to those of the other."""
    distances = [np.abs(_seconds(rows) - _seconds(each)).sum() for each in (one, other)]
    return bool(distances[0] < distances[1])


def _seconds(rows: Floats) -> Floats:
    """[layers], of both passes."""
    return np.asarray(rows[:, _PASSES].sum(axis=1))
