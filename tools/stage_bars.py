"""A bar chart of each stage's time before and after a change, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

COLUMNS = 2
BEFORE, AFTER = "#b8c4cc", "#0b6e99"


@dataclass(frozen=True)
class Panel:
    """One panel of the chart.

    before, after: the value of each stage, in `unit`.
    """

    title: str
    before: Sequence[float]
    after: Sequence[float]
    unit: str = "ms"


def draw(file: Path, title: str, panels: Sequence[Panel], before: str, after: str) -> None:
    """Draw the panels in two columns.

    before, after: labels of the pale and the dark bars.
    """
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(8.4, 0.8 + 2.0 * rows), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for panel, place in zip(panels, axes, strict=False):
        stages = np.arange(len(panel.before))
        for values, shift, color, words in ((panel.before, -0.2, BEFORE, before), (panel.after, 0.2, AFTER, after)):
            place.bar(stages + shift, values, 0.4, color=color, label=words)
            place.axhline(max(values), color=color, linestyle="--", linewidth=0.8)
        place.set_title(panel.title, fontsize=9)
        place.set_ylabel(panel.unit, fontsize=8)
        place.set_xticks(stages)
        place.tick_params(labelsize=7)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "stages", "svg.fonttype": "none"}):  # equal figures give equal files
        figure.savefig(file, format="svg", metadata={"Date": None})
