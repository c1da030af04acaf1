"""The figures as charts, drawn by matplotlib, which the extra `demo` installs."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_dynatrain.comparison.job import WAYS
from ds_dynatrain.comparison.results import PHASES, Comparison, Measure, way_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASE_COLORS: Mapping[str, str] = dict(
    zip(
        PHASES,
        "#4e79a7 #a0cbe8 #59a14f #8cd17d #f1ce63 #b6992d #e15759 #ff9d9a #b07aa1 #d4a6c8 #9c755f #bab0ac".split(),
        strict=True,
    )
)
WAY_COLORS: Mapping[str, str] = dict(
    zip(
        (way.name for way in WAYS),
        "#0b6e99 #86c5dc #2f4b8f #8cbf6b #3a7d44 #e0a030 #8a5a9e #d1495b".split(),
        strict=True,
    )
)
FONTS: dict[Any, Any] = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none"}


def phases(found: Comparison, size: str, change: str, name: str) -> str:
    """Return the stacked phases of each way as SVG: the whole on the left, its start enlarged on the right."""
    measures = {way: each for way, each in found.of(size, change).items() if each.is_done}
    figure = _figure(11, 1.1 + 0.42 * len(measures))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    used = [phase for phase in PHASES if any(each.phases.get(phase, 0) > 0 for each in measures.values())]
    for axes in (left, right):
        _stack(axes, measures, used)
    live = [each.total for way, each in measures.items() if way_of(way).is_live]
    left.invert_yaxis()  # and the shared axis of `right`
    right.set_xlim(0, 1.1 * max(live, default=1.0))
    left.set_title("seconds to the end of the first new step", loc="left", fontsize=10)
    right.set_title("the same, under a lens", loc="left", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return _svg(figure, name)


def growth(found: Comparison, change: str, name: str) -> str:
    """Return how long training stands still against the size of the model, as SVG with a line for each way."""
    figure = _figure(7, 4)
    axes = figure.subplots()
    sizes = [size for size, each in found.cases() if each == change]
    by_size = {size: found.of(size, change) for size in sizes}
    for way in WAYS:
        points = [
            (each.parameters / 1e6, each.still) for m in by_size.values() if (each := m.get(way.name)) and each.is_done
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=WAY_COLORS[way.name], label=way.title)
    axes.set(xscale="log", yscale="log", xlabel="million parameters", ylabel="training stands still (s)")
    known = sorted({each.parameters / 1e6 for m in by_size.values() for each in m.values() if each.parameters})
    axes.set_xticks(known, [f"{value:.0f}" for value in known])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure, name)


def losses(found: Comparison, size: str, change: str, name: str) -> str:
    """Return the loss curves of all ways through the change, as SVG."""
    figure = _figure(9, 3.6)
    axes = figure.subplots()
    measures = {way: each for way, each in found.of(size, change).items() if each.is_done}
    for number, (way, each) in enumerate(measures.items()):
        steps = sorted(each.losses)
        width = 6.0 - 4.6 * number / max(1, len(measures) - 1)  # curves that agree hide one another
        values = [each.losses[step] for step in steps]
        axes.plot(steps, values, color=WAY_COLORS[way], linewidth=width, label=way_of(way).title, alpha=0.75)
    axes.axvline(found.before + 0.5, color="#444444", linestyle="--", linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure, name)


def _stack(axes: Axes, measures: Mapping[str, Measure], used: Sequence[str]) -> None:
    names = [way_of(way).title for way in measures]
    begin = [0.0] * len(names)
    for phase in used:
        widths = [max(0.0, each.phases.get(phase, 0.0)) for each in measures.values()]
        axes.barh(names, widths, left=begin, color=PHASE_COLORS[phase], label=phase, height=0.7)
        begin = [at + width for at, width in zip(begin, widths, strict=True)]
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # a Figure of its own: no window, no global state

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, name: str) -> str:
    """Return an element to embed in a page: without a prolog, with identifiers that begin with `name`."""
    from matplotlib import rc_context

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({**FONTS, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata=nothing, transparent=False)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", svg)
