"""A plot of loss curves with marks at the switches, as a PNG. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ds_dynatrain.report.event import SwitchEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#0b6e99", "#d1495b", "#3a7d44", "#8a5a9e")


@dataclass(frozen=True)
class Curve:
    """The losses of one run, keyed by optimizer step."""

    label: str
    train: Mapping[int, float]
    held_out: Mapping[int, float] = field(default_factory=dict)


def plot(path: str | Path, curves: Sequence[Curve], events: Iterable[SwitchEvent] = ()) -> Path:
    """Plot the curves into the PNG at `path`, with a line at each committed switch. Return the path.

    The upper half shows the losses. With two or more curves, the lower half shows how far each is from the first one,
    on a logarithmic scale, because curves that agree hide one another. Raises `ImportError` without matplotlib.
    """
    from matplotlib.figure import Figure  # a Figure of its own needs no window and no global state

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes: list[Axes] = []
    if len(curves) > 1:
        axes.extend(figure.subplots(2, 1, sharex=True, height_ratios=(3, 1)))
        _draw_distance(axes[1], curves)
    else:
        axes.append(figure.subplots())
    _draw_losses(axes[0], curves)
    _mark(axes, [event for event in events if event.outcome == "committed"])
    axes[-1].set_xlabel("optimizer step")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    return target


def _draw_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw all curves, the first one broad and pale, so that it stays visible under a curve with the same values."""
    for index, curve in enumerate(curves):
        color, marker = _COLORS[index % len(_COLORS)], "os^D"[index % 4]
        below = index == 0 and len(curves) > 1
        width, size, alpha = (5.0, 11, 0.35) if below else (1.4, 5, 1.0)
        axes.plot(*_points(curve.train), color=color, linewidth=width, alpha=alpha, label=f"train, {curve.label}")
        if curve.held_out:
            label = f"held out, {curve.label}"
            axes.plot(*_points(curve.held_out), marker, color=color, markersize=size, alpha=alpha, label=label)
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", frameon=False)


def _draw_distance(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw the distance of each later curve from the first one, relative to the first one. Equal values lie at the
    bottom.
    """
    floor = 1e-9
    first = curves[0].train
    for index, curve in enumerate(curves[1:], start=1):
        shared = {step: loss for step, loss in curve.train.items() if step in first}
        apart = {step: max(abs(loss / first[step] - 1.0), floor) for step, loss in shared.items()}
        axes.plot(*_points(apart), color=_COLORS[index % len(_COLORS)], linewidth=0.4, marker="o", markersize=3.5)
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, None)
    axes.set_ylabel("relative distance\n(bottom: equal)")
    axes.grid(alpha=0.25)


def _mark(axes: Sequence[Axes], events: Sequence[SwitchEvent]) -> None:
    """Draw a line through all axes at each switch, labelled with the change."""
    for event in events:
        for part in axes:
            part.axvline(event.step, color="#444444", linestyle="--", linewidth=1)
        axes[0].annotate(
            f" {event.source.describe()}\n -> {event.target.describe()}\n {event.pause_ms:.0f} ms",
            xy=(event.step, 0.72),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color="#444444",
            verticalalignment="top",
        )


def _points(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return (steps in ascending order, losses at these steps)."""
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]
