"""The mean over windows while costs stay what they are; it begins anew when two in a row say that they have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_dynatrain.balance.decision import REMEMBERED, costs_differ
from ds_dynatrain.balance.profile import BESIDE, BYTES, Floats, LayerCost, Profile
from ds_dynatrain.balance.window import COLUMNS, ERROR_COLUMNS, PASSES, Window

NEW_SHARE = 0.25
"""Of a window in the mean, once there are four; before that all windows count alike."""


@dataclass(frozen=True)
class Known:
    """What is known of a layer without measuring it; see `LayerCost`."""

    name: str
    kind_bytes: Mapping[str, int]
    trained: bool


@dataclass(frozen=True, eq=False)
class Doubted:
    """A window that differs from those before it: [layers, COLUMNS], as of a step."""

    rows: Floats
    step: int


@dataclass(frozen=True, eq=False)
class Averaged:
    """The mean over windows. batch: (samples of a step, of a micro-batch). since: see `decision.History`.

    windows: how many it is of. speeds: of the last one. beside: [BESIDE]. doubted: the last one, where it is not in the
    mean: layers that have not changed may take a third longer in all passes of one window, as where a core is shared,
    so costs are others only once the next window says the same.
    """

    rows: Floats
    speeds: tuple[float, ...]
    beside: Floats
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
        now = cls(window.rows, window.speeds, window.beside, batch, since=(step,))
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
        since = (*self.since, step)[-REMEMBERED:]
        return Averaged(window.rows, window.speeds, self._beside(window, 1.0), self.batch, since=since)

    def _with(self, window: Window) -> Averaged:
        share = max(NEW_SHARE, 1 / (self.windows + 1))
        rows = (1 - share) * self.rows + share * window.rows
        rows[:, ERROR_COLUMNS] = np.hypot(
            (1 - share) * self.rows[:, ERROR_COLUMNS], share * window.rows[:, ERROR_COLUMNS]
        )
        return Averaged(rows, window.speeds, self._beside(window, share), self.batch, self.windows + 1, self.since)

    def _beside(self, window: Window, share: float) -> Floats:
        """What a window has not measured stays, and what it is the first to measure counts in full."""
        mixed = np.where(self.beside > 0, (1 - share) * self.beside + share * window.beside, window.beside)
        return np.where(window.beside > 0, mixed, self.beside)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` gives the same, every digit of it."""
        doubted = self.doubted
        return {
            "rows": self.rows.tolist(),
            "speeds": list(self.speeds),
            "beside": self.beside.tolist(),
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
        beside = np.array(said["beside"], dtype=np.float64)
        return cls(rows, tuple(said["speeds"]), beside, batch, int(said["windows"]), tuple(said["since"]), doubted)

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
            layers=tuple(costs),
            train_batch_size=train,
            micro_batch_size=micro,
            speeds=self.speeds,
            source=source,
            **dict(zip(BESIDE, self.beside.tolist(), strict=True)),
        )


def _differ(before: Floats, after: Floats, least: float) -> bool:
    errors = [np.sqrt((rows[:, ERROR_COLUMNS][:, PASSES] ** 2).sum(axis=1)) for rows in (before, after)]
    return costs_differ(_seconds(before), _seconds(after), np.hypot(errors[0], errors[1]), least)


def _is_nearer(rows: Floats, one: Floats, other: Floats) -> bool:
    """Whether layers take times that are nearer to those of the one than to those of the other."""
    distances = [np.abs(_seconds(rows) - _seconds(each)).sum() for each in (one, other)]
    return bool(distances[0] < distances[1])


def _seconds(rows: Floats) -> Floats:
    """[layers], of both passes."""
    return np.asarray(rows[:, PASSES].sum(axis=1))
