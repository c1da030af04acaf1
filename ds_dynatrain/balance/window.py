"""The timings of all ranks in one window (a number of timed steps), and the mean over windows.

A rank has one row for each layer of its stage, with the columns of `COLUMNS` (float64): medians over micro-batches. The
rows of all ranks are merged into one window. Windows are averaged as long as costs stay the same. The mean is restarted
when two windows in a row show that costs have changed.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator

from ds_dynatrain.balance.decision import CERTAIN, Drift, drift_of
from ds_dynatrain.balance.profile import (
    BESIDE,
    BYTES,
    ERRORS,
    SECONDS,
    ExpertCost,
    ExpertRows,
    Floats,
    LayerCost,
    Profile,
)
from ds_dynatrain.errors import ProfileError
from ds_dynatrain.space.layout import Layout

Rows = Annotated[
    Floats,
    PlainValidator(lambda said: np.array(said, dtype=np.float64)),
    PlainSerializer(lambda held: held.tolist()),
]
"""An array of rows. Records hold it as nested lists."""
COLUMNS = (*SECONDS, *ERRORS, *BYTES)
"""The columns of a row: the measured fields of `LayerCost`."""
OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of the median of normally distributed numbers, divided by that of their mean."""
OF_DEVIATION = 1.4826
"""Standard deviation of normally distributed numbers, divided by their median distance from the median."""

PASSES = slice(0, 2)
"""The columns with the seconds of the forward and the backward pass."""
_TIMES = slice(0, len(SECONDS))
ERROR_COLUMNS = slice(len(SECONDS), len(SECONDS) + len(ERRORS))
"""The columns with standard errors. The first two belong to the passes."""


def rows_of(
    forward: Floats, backward: Floats, optimizer: Floats, kept_bytes: Sequence[int], output_bytes: Sequence[int]
) -> Floats:
    """Return [layers, COLUMNS]: the rows of one rank.

    forward: [passes, layers], seconds of each forward pass. A layer without any pass gets 0 s.
    backward: [passes, layers], seconds of each backward pass. A layer without any pass gets 0 s.
    optimizer: [steps, layers], seconds of an optimizer step over all elements of a layer.
    kept_bytes: the `activation_bytes` of each layer; see `LayerCost`.
    output_bytes: the `output_bytes` of each layer; see `LayerCost`.
    """
    parts = [_median(each) for each in (forward, backward, optimizer)]
    columns = [*(middle for middle, _ in parts), *(error for _, error in parts), kept_bytes, output_bytes]
    return np.array(columns, dtype=np.float64).T.copy()


def _median(passes: Floats) -> tuple[Floats, Floats]:
    """Return each layer's median and its standard error. With a single pass, the error is as large as the value."""
    count, layers = passes.shape
    if not count:
        return np.zeros(layers), np.zeros(layers)
    middle = np.median(passes, axis=0)
    if count == 1:
        return middle, middle.copy()
    spread = OF_DEVIATION * np.median(np.abs(passes - middle), axis=0)
    return middle, OF_MEDIAN * spread / math.sqrt(count)


def waiting(passes: Sequence[Floats]) -> tuple[float, float]:
    """Return the mean seconds for which a micro-batch waits for a core, and their standard error.

    Few passes wait, but these wait long, so the median would say little. With a single pass, the error is as large as
    the value.

    passes: the `waits` of `StageTimes`.
    """
    found = [each for each in passes if len(each)]
    errors = [each.std(ddof=1) / math.sqrt(len(each)) if len(each) > 1 else each[0] for each in found]
    return float(sum(each.mean() for each in found)), float(math.hypot(*errors))


@dataclass(frozen=True)
class Busy:
    """How long the ranks computed in the last window.

    seconds: the seconds for which each rank computed, over all steps of the window.
    since: the step at which costs changed.
    """

    seconds: tuple[float, ...]
    since: int


FADING = 0.5
"""Weight that earlier token counts keep when a new window is added.

Counts of a window are exact, because it counts the tokens of all steps since the last one, and earlier counts belong to
other routes.
"""


@dataclass(frozen=True, eq=False)
class ExpertTimes:
    """Measurements of the experts of one layer in a window.

    passes: [2], the seconds of the forward and of the backward pass of a micro-batch.
    tokens: [experts], the tokens of each expert.
    """

    passes: Rows
    tokens: Rows

    def plus(self, other: ExpertTimes) -> ExpertTimes:
        """Return the sum of these measurements and those of `other`."""
        return ExpertTimes(self.passes + other.passes, self.tokens + other.tokens)

    def then(self, newer: ExpertTimes, share: float) -> ExpertTimes:
        """Return these measurements updated with those of a newer window.

        Seconds become a weighted mean. Earlier token counts are multiplied by `FADING`.

        share: the weight of the newer seconds.
        """
        passes = (1 - share) * self.passes + share * newer.passes
        return ExpertTimes(passes, FADING * self.tokens + newer.tokens)


@dataclass(frozen=True, eq=False)
class TimingWindow:
    """The merged timings of all ranks in one window.

    rows: [layers of the model, COLUMNS], scaled to a member of speed 1.
    speeds: the speed of each rank.
    beside: [BESIDE], the median over the ranks that have measured it; 0 if none has.
    experts: the `ExpertTimes` of each layer with experts, keyed by its name. The rows leave these seconds out.

    Speeds compare the ranks of one stage, because only they have the same layers, and include waiting for a core. The
    median rank has speed 1, and so do all ranks that differ from it by at most 4 standard errors.
    """

    rows: Floats
    speeds: tuple[float, ...]
    beside: Floats
    experts: Mapping[str, ExpertTimes] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        by_rank: Mapping[int, npt.ArrayLike],
        layout: Layout,
        boundaries: Sequence[int],
        beside: Sequence[Sequence[float]] = (),
        waits: Mapping[int, tuple[float, float]] | None = None,
    ) -> TimingWindow:
        """Merge the rows of all ranks into one window.

        by_rank: the rows of each rank.
        layout: the layout in which they were measured.
        boundaries: the first layer of each stage, followed by the number of layers.
        beside: [ranks, BESIDE], the times outside the layers.
        waits: the result of `waiting` on each rank; None if none has waited.

        Raises ProfileError unless every rank has a row for each layer of its stage.
        """
        size = layout.ranks_per_stage
        rows, speeds = [], list[float]()
        for stage in range(layout.pipe):
            layers, ranks = boundaries[stage + 1] - boundaries[stage], range(stage * size, (stage + 1) * size)
            found = []
            for rank in ranks:
                mine = np.asarray(by_rank.get(rank, ()), dtype=np.float64)
                if mine.shape != (layers, len(COLUMNS)):
                    raise ProfileError(
                        f"rank {rank} of {layout} measured {mine.shape}, and stage {stage} has {layers} layers of "
                        f"{len(COLUMNS)} numbers each; call engine.balancer.note('again') and measure another window"
                    )
                found.append(mine)
            stacked = np.stack(found)
            rows.append(_merged(stacked, _speeds(stacked)))
            waited = np.array([(waits or {}).get(rank, (0.0, 0.0)) for rank in ranks])
            speeds += _speeds(stacked, *waited.T).tolist()
        columns = np.array(beside, dtype=np.float64).reshape(-1, len(BESIDE)).T
        # zeros come from stages that load nothing or have no neighbour
        middle = [np.median(each[each > 0]) if (each > 0).any() else 0.0 for each in columns]
        return cls(np.concatenate(rows), tuple(speeds), np.array(middle))


def _speeds(found: Floats, waits: Floats | float = 0.0, wait_errors: Floats | float = 0.0) -> Floats:
    """Return [ranks]: the speed of each rank of one stage, with 1 for the median rank.

    found: [ranks, layers, COLUMNS].
    """
    total = found[:, :, PASSES].sum(axis=(1, 2)) + waits
    errors = np.sqrt((found[:, :, ERROR_COLUMNS][:, :, PASSES] ** 2).sum(axis=(1, 2)) + np.square(wait_errors))
    middle = int(np.argsort(total, kind="stable")[(len(total) - 1) // 2])
    differs = np.abs(total - total[middle]) > CERTAIN * np.hypot(errors, errors[middle])
    speeds = np.ones(len(total))
    speeds[differs] = total[middle] / total[differs] if total[middle] else 1.0
    return speeds


def _merged(found: Floats, speeds: Floats) -> Floats:
    """Merge the rows of one stage's ranks, [ranks, layers, COLUMNS], into [layers, COLUMNS] for a member of speed 1."""
    rows: Floats = found[0].copy()
    scaled = speeds[:, None, None]
    rows[:, _TIMES] = (found[:, :, _TIMES] * scaled).mean(axis=0)
    rows[:, ERROR_COLUMNS] = np.sqrt(((found[:, :, ERROR_COLUMNS] * scaled) ** 2).sum(axis=0)) / len(found)
    rows[:, ERROR_COLUMNS.stop :] = found[:, :, ERROR_COLUMNS.stop :].max(axis=0)
    return rows


LAST_STEPS = 16
"""Number of steps that are remembered. Older steps may have had other costs."""


@dataclass(frozen=True)
class Measured:
    """The measured seconds of a step.

    seconds: the median of the steps.
    error: the standard error of the median, in seconds.
    count: the number of steps.
    """

    seconds: float
    error: float
    count: int


class StepSeconds:
    """Seconds of the newest steps on one member, in one layout."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=LAST_STEPS)

    def add(self, seconds: float) -> None:
        """Add one more step."""
        self._seconds.append(seconds)

    def forget(self, but: int = 0) -> None:
        """Forget all but the newest steps. Called when the layout, the members or the costs have changed.

        but: the number of newest steps to keep, because they were already made at the new costs.
        """
        while len(self._seconds) > but:
            self._seconds.popleft()

    def measured(self, newest: int | None = None) -> Measured:
        """Return the median of the newest steps or, by default, of all remembered steps.

        The standard error of the median follows from the relative spread of all remembered steps. With a single step it
        is as large as the value.
        """
        known = np.array(self._seconds, dtype=np.float64)
        if not len(known):
            return Measured(0.0, 0.0, 0)
        used = known if newest is None else known[-newest:]
        whole, error = (float(each[0]) for each in _median(known[:, None]))
        middle = float(np.median(used))
        scale = middle / whole * math.sqrt(len(known) / len(used)) if whole else 1.0
        return Measured(middle, error * scale, len(used))


NEW_SHARE = 0.25
"""Weight of a new window in the mean once there are four windows. Before that, all windows have the same weight."""


@dataclass(frozen=True, eq=False)
class Doubted:
    """A window that differs from the earlier ones and waits for confirmation by the next one.

    rows: [layers, COLUMNS], the window's timings.
    step: the step at which the window ended.
    """

    rows: Rows
    step: int


@dataclass(frozen=True, eq=False)
class Averaged:
    """The mean over windows.

    rows: [layers, COLUMNS], the mean timings.
    speeds: the speeds of the ranks in the last window.
    beside: [BESIDE], the mean times outside the layers.
    batch: the samples of a step, and the samples of a micro-batch.
    experts: the mean over windows of the experts' times; see `TimingWindow`.
    windows: the number of windows in the mean.
    since: the step at which costs changed.
    doubted: the last window, if it differs too much to be included in the mean.

    All passes of one window may take a third longer although no layer has changed, for example because another process
    used the core. Costs therefore count as changed only if the next window agrees.
    """

    rows: Rows
    speeds: tuple[float, ...]
    beside: Rows
    batch: tuple[int, int]
    experts: Mapping[str, ExpertTimes] = field(default_factory=dict)
    windows: int = 1
    since: int = 0
    doubted: Doubted | None = None

    @classmethod
    def after(
        cls,
        before: Averaged | None,
        window: TimingWindow,
        batch: tuple[int, int],
        step: int,
        least: float,
        is_new: bool,
    ) -> Averaged:
        """Return the mean after one more window.

        before: the mean so far; None for the first window.
        least: the fraction of all layers' seconds that a change of costs must exceed.
        is_new: whether costs are already known to have changed.
        """
        now = cls(window.rows, window.speeds, window.beside, batch, window.experts, since=step)
        if before is None or before.batch != batch or before.rows.shape != window.rows.shape:
            return now
        if is_new:
            return before._restarted(window, step)
        if not _differ(before.rows, window.rows, least):
            return before._with(window, step)
        doubted = before.doubted
        if doubted is not None:
            away = (np.abs(_seconds(window.rows) - _seconds(each.rows)).sum() for each in (doubted, before))
            if operator.lt(*away):  # the new window is nearer to the doubted one than to the mean
                return before._restarted(window, doubted.step)
        return replace(before, speeds=window.speeds, doubted=Doubted(window.rows, step))

    def _restarted(self, window: TimingWindow, step: int) -> Averaged:
        """Return a mean that begins with this window.

        The window before it, which first showed the change of costs, is left out, because it may still have been noise.

        step: the step since which costs are new.
        """
        return Averaged(window.rows, window.speeds, self._beside(window, 1.0), self.batch, window.experts, since=step)

    def _with(self, window: TimingWindow, step: int) -> Averaged:
        share = max(NEW_SHARE, 1 / (self.windows + 1))
        rows = (1 - share) * self.rows + share * window.rows
        rows[:, ERROR_COLUMNS] = np.hypot(
            (1 - share) * self.rows[:, ERROR_COLUMNS], share * window.rows[:, ERROR_COLUMNS]
        )
        since = min(self.since, step)  # loading a checkpoint may go back to an earlier step
        known, new = self.experts, window.experts
        experts = {name: known[name].then(each, share) if name in known else each for name, each in new.items()}
        beside = self._beside(window, share)
        return Averaged(rows, window.speeds, beside, self.batch, experts, self.windows + 1, since)

    def _beside(self, window: TimingWindow, share: float) -> Floats:
        """Return [BESIDE]: the mean times outside the layers, updated with this window.

        A time that this window has not measured keeps its mean. A time that is measured for the first time replaces the
        initial 0.

        share: the weight of this window.
        """
        mixed = np.where(self.beside > 0, (1 - share) * self.beside + share * window.beside, window.beside)
        return np.where(window.beside > 0, mixed, self.beside)

    def profile(
        self, layers: Sequence[LayerCost], source: str = "", experts: Mapping[str, tuple[int, ExpertRows]] | None = None
    ) -> Profile:
        """Return the profile that results from these measurements.

        layers: the layers, with their bytes but without times.
        experts: the number of the layer that contains them and the present rows, for each layer with experts.
        """
        costs, rows, routed = list[LayerCost](), self.rows.copy(), list[ExpertCost]()
        for name, (layer, dealt) in (experts or {}).items():
            times = self.experts[name]
            rows[layer, PASSES] = np.maximum(0.0, rows[layer, PASSES] + times.passes)
            forward, backward = times.passes.tolist()
            shares = tuple((times.tokens / max(1.0, times.tokens.sum())).tolist())
            routed.append(
                ExpertCost(
                    name=name,
                    layer=layer,
                    forward_seconds=forward,
                    backward_seconds=backward,
                    tokens=shares,
                    rows=dealt,
                )
            )
        for known, row in zip(layers, rows.tolist(), strict=True):
            measured = dict(zip(COLUMNS, row, strict=True))
            costs.append(replace(known, **{**measured, **{name: round(measured[name]) for name in BYTES}}))
        train, micro = self.batch
        return Profile(
            layers=tuple(costs),
            train_batch_size=train,
            micro_batch_size=micro,
            speeds=self.speeds,
            source=source,
            experts=tuple(routed),
            **dict(zip(BESIDE, self.beside.tolist(), strict=True)),
        )


def _differ(before: Floats, after: Floats, least: float) -> bool:
    squares = [(rows[:, ERROR_COLUMNS][:, PASSES] ** 2).sum(axis=1) for rows in (before, after)]
    return drift_of(_seconds(before), _seconds(after), np.sqrt(squares[0] + squares[1]), least) is not Drift.SAME


def _seconds(rows: Floats) -> Floats:
    """Return [layers]: the seconds of both passes together."""
    return np.asarray(rows[:, PASSES].sum(axis=1))
