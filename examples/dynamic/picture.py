"""A plot of each stage's time and of the stage boundaries, by step, as a PNG. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamic.runs import Run

_COLORS = ("#0b6e99", "#d1495b", "#3a7d44", "#8a5a9e")


def draw(path: Path, title: str, static: Run, balanced: Run) -> Path:
    """Plot two runs into the PNG at `path`, the one without balance in pale colors. Return the path."""
    from matplotlib.figure import Figure  # a Figure of its own needs no window and no global state

    figure = Figure(figsize=(9, 6), layout="constrained")
    stages, cuts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for run, name, how in ((static, "static", {"lw": 4.0, "alpha": 0.35}), (balanced, "balanced", {"lw": 1.5})):
        for stage in range(len(run.boundaries[-1]) - 1):
            took = [1e3 * each[stage] for each in run.stages.values()]
            stages.plot([*run.stages], took, color=_COLORS[stage % 4], label=f"stage {stage}, {name}", **how)
        for begin in zip(*(cut[1:-1] for cut in run.boundaries), strict=True):
            cuts.step(range(len(begin)), begin, color="#444444", where="post", **how)
    for axes in (stages, cuts):
        axes.grid(alpha=0.25)
        for step in balanced.changes:
            axes.axvline(step, color="#444444", linestyle=":", lw=0.8)
    stages.set(title=f"{title}: dotted where layers change", ylabel="ms that a stage computes", ylim=(0, None))
    stages.legend(frameon=False)
    cuts.set(xlabel="optimizer step", ylabel="where stages begin", ylim=(0, balanced.boundaries[-1][-1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
