"""Charts of a comparison's figures, drawn with matplotlib, which the extra `demo` installs."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # a Figure of its own: no window, no global state

from ds_dynatrain.comparison.job import WAYS
from ds_dynatrain.comparison.results import PHASES, Comparison, Measure

PHASE_COLORS = dict(zip(PHASES, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
WAY_COLORS = {name: f"C{number}" for number, name in enumerate(WAYS)}
STYLE: dict[Any, Any] = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none"}


def phases(found: Mapping[str, Measure], name: str) -> str:
    """Return an SVG chart with a bar of stacked phases for each way (method) to carry out a change.

    The left half shows the whole bars. The right half shows, enlarged, the part from 0 to the longest live switch.

    name: a prefix for identifiers, unique in the page.
    """
    measures = [each for each in found.values() if each.is_done]
    titles = [WAYS[each.way].title for each in measures]
    figure = Figure((11, 1.1 + 0.42 * len(measures)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes in (left, right):
        begin = np.zeros(len(measures))
        for phase in PHASES:
            widths = np.array([max(0.0, each.phases.get(phase, 0.0)) for each in measures])
            if widths.any():
                axes.barh(titles, widths, left=begin, color=PHASE_COLORS[phase], label=phase, height=0.7)
                begin = begin + widths
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    left.invert_yaxis()  # and the shared axis of `right`
    right.set_xlim(0, 1.1 * max((each.total for each in measures if WAYS[each.way].is_live), default=1.0))
    left.set_title("seconds to the end of the first new step", loc="left", fontsize=10)
    right.set_title("the same, under a lens", loc="left", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return _svg(figure, name)


def growth(found: Comparison, change: str, name: str) -> str:
    """Return an SVG chart of the time for which training stops, by model size, for one change.

    The chart has a line for each way (method) to carry out the change.

    name: a prefix for identifiers, unique in the page.
    """
    figure, axes = _chart((7, 4), xlabel="million parameters", ylabel="training stands still (s)")
    every = [each for case in found.cases() if case[1] == change for each in found.of(*case).values()]
    for way in WAYS.values():
        done = [each for each in every if each.way == way.name and each.is_done]
        if done:
            points = sorted((each.parameters / 1e6, each.still) for each in done)
            axes.plot(*zip(*points, strict=True), "o-", color=WAY_COLORS[way.name], label=way.title)
    axes.set(xscale="log", yscale="log")
    known = sorted({each.parameters / 1e6 for each in every if each.parameters})
    axes.set_xticks(known, [f"{value:.0f}" for value in known])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure, name)


def losses(found: Mapping[str, Measure], before: int, name: str) -> str:
    """Return an SVG chart of the training loss before and after the change, with a curve for each way (method).

    before: the last step before the change.
    name: a prefix for identifiers, unique in the page.
    """
    figure, axes = _chart((9, 3.6), xlabel="optimizer step", ylabel="loss")
    measures = {way: each for way, each in found.items() if each.is_done}
    for number, (way, each) in enumerate(measures.items()):
        width = 6.0 - 4.6 * number / max(1, len(measures) - 1)  # curves that agree hide one another
        points = zip(*sorted(each.losses.items()), strict=True)
        axes.plot(*points, color=WAY_COLORS[way], linewidth=width, label=WAYS[way].title, alpha=0.75)
    axes.axvline(before + 0.5, color="#444444", linestyle="--", linewidth=1)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure, name)


def _chart(size: tuple[float, float], **labels: str) -> tuple[Figure, Axes]:
    figure = Figure(size, layout="constrained")
    axes = figure.subplots()
    axes.set(**labels)
    axes.grid(alpha=0.25)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element to embed in a page, without a prolog. Its identifiers begin with `name`."""
    text = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    return re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", svg)
