"""The figures of a comparison for readers: Markdown tables, charts, and one HTML page that needs nothing else.

The extra `demo` installs matplotlib, which draws the charts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from markdown_it import MarkdownIt
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # a Figure of its own needs no window and no global state

from ds_dynatrain.comparison.job import WAYS
from ds_dynatrain.comparison.results import BAR, PHASES, Comparison, Measure, ratios

Row = Sequence[str]
Measures = Mapping[str, Measure]
"""The measures of one case, keyed by the name of the way."""

HEAD = ("way", "stands still", "longer than live", "moved MB", "written MB", "peak MB", "steps lost", "bit-equal")
NOT_COUNTED = (
    "For a restart, the time runs from the end of the last step before it to the end of the first step after it, as "
    "rank 0 sees them, less one steady step. For a live switch, the time is its longest pause among the members that "
    "go on, proof included; for a late switch, the wait of its first step is added. A restart also needs time that is "
    "not counted here: for the end of the old processes, a scheduler, a container, a slower file system."
)


# ---- tables ----------------------------------------------------------------------------------------------------------


def document(found: Comparison) -> str:
    """Return a Markdown document with the tables of all cases, and an explanation of the figures."""
    cases = [of_case(found, case, "####") for case in found.cases()]
    return "\n\n".join([origin(found), NOT_COUNTED, *cases]) + "\n"


def origin(found: Comparison) -> str:
    """Return a line that names the machine and the command with which the figures were measured."""
    return f"Measured on: {found.machine}. By: `{found.command}`."


def of_case(found: Comparison, case: tuple[str, str], mark: str) -> str:
    """Return a heading and the tables of one case, with a sentence about each live switch and about each failure.

    case: the pair (model size, change).
    mark: the Markdown mark of the heading, for example "##".
    """
    measures = found.of(*case)
    done = [each for each in measures.values() if each.is_done]
    best = min((each.still for each in done if WAYS[each.way].is_live), default=0.0)
    rows = [_row(each, best) for each in measures.values()]
    seconds = [(each, [each.phases.get(phase, 0.0) for phase in PHASES]) for each in done]
    parts = [(_title(each), *(f"{value:.2f}" if value >= 0.005 else "" for value in of)) for each, of in seconds]
    failed = [
        f"{_title(each)}: not possible. `{each.reason.splitlines()[0][:300]}`"
        for each in measures.values()
        if not each.is_done
    ]
    text = [f"{mark} {_model(case[0], measures)}, {case[1]}", _table(HEAD, rows), *verdicts(measures)]
    return "\n\n".join([*text, "Seconds by phase:", _table(("way", *PHASES), parts), *failed])


def short(found: Comparison) -> str:
    """Return one table for a README, with a row for each way to carry out a change and a column for each case."""
    cases = {case: found.of(*case) for case in found.cases()}
    head = (f"{_model(size, measures)}, {change}" for (size, change), measures in cases.items())
    lines = [
        (way.title, *(_still(measures[name]) if name in measures else "" for measures in cases.values()))
        for name, way in WAYS.items()
        if any(name in measures for measures in cases.values())
    ]
    return f"{_table(('training stands still (s)', *head), lines)}\n\nMeasured on: {found.machine}."


def verdicts(measures: Measures) -> list[str]:
    """Return, for each live switch, a sentence with its ratios (see `ratios`) and whether they reach the goal."""
    said = []
    for way, whole, apart in ratios(measures):
        first, second = "with the certificate", "without the certificate"
        if way.is_late:
            first, second = "with what the first step waits", "by the pause alone"
        met = "reached" if whole >= BAR else f"reached {second} ({apart:.0f})" if apart >= BAR else "missed"
        said.append(
            f"DeepSpeed's universal checkpoint and a restart ÷ {way.title}: **{whole:.0f}** {first}, **{apart:.0f}** "
            f"{second}. The goal of {BAR:.0f} is {met}."
        )
    return said


def parameters(measures: Measures) -> int:
    """Return the number of parameters of the measured model; 0 if no measurement succeeded."""
    return max(each.parameters for each in measures.values())


def _model(size: str, measures: Measures) -> str:
    """Return the model's number of parameters as text, such as "30.1M parameters"; `size` if nothing was measured."""
    count = parameters(measures)
    return f"{count / 1e6:.1f}M parameters" if count else size


def _title(each: Measure) -> str:
    return WAYS[each.way].title


def _table(head: Row, lines: Iterable[Row]) -> str:
    """Return a Markdown table in which all columns except the first are aligned to the right."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


def _row(each: Measure, best: float) -> Row:
    """Return the table row of one measure.

    best: the shortest time for which training stopped in a live switch; 0.0 if none succeeded.
    """
    if not each.is_done:
        return (_title(each), "not possible", *[""] * (len(HEAD) - 2))
    return (
        _title(each),
        f"{_still(each)} s",
        f"{each.still / best:.0f} ×" if best and not WAYS[each.way].is_live else "",
        f"{each.moved / 1e6:.0f}" if each.pause is not None else "",
        f"{each.written / 1e6:.0f}" if each.written else "",
        f"{each.peak / 1e6:.0f}",
        f"{each.steps_lost}" + (f", {each.samples_lost} samples" if each.samples_lost else ""),
        "yes" if each.is_equal else "no",
    )


def _still(each: Measure) -> str:
    return f"{each.still:.{1 if each.still >= 2 else 2}f}" if each.is_done else "not possible"


# ---- charts ----------------------------------------------------------------------------------------------------------

PHASE_COLORS = dict(zip(PHASES, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
WAY_COLORS = {name: f"C{number}" for number, name in enumerate(WAYS)}
STYLE: dict[Any, Any] = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none"}


def phases(found: Measures, name: str) -> str:
    """Return an SVG chart with a bar of stacked phases for each way (method) to carry out a change.

    The left half shows the whole bars. The right half shows, enlarged, the part from 0 to the longest live switch.

    name: a prefix for identifiers, unique in the page.
    """
    measures = [each for each in found.values() if each.is_done]
    titles = [_title(each) for each in measures]
    figure = Figure((11, 1.1 + 0.42 * len(measures)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes in (left, right):
        begin = np.zeros(len(measures))
        for phase, color in PHASE_COLORS.items():
            widths = np.array([max(0.0, each.phases.get(phase, 0.0)) for each in measures])
            if widths.any():
                axes.barh(titles, widths, left=begin, color=color, label=phase, height=0.7)
                begin = begin + widths
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    left.invert_yaxis()  # also hides the shared axis of `right`
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
    for way, color in WAY_COLORS.items():
        points = sorted((each.parameters / 1e6, each.still) for each in every if each.way == way and each.is_done)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=WAYS[way].title)
    axes.set(xscale="log", yscale="log")
    known = sorted({each.parameters / 1e6 for each in every if each.parameters})
    axes.set_xticks(known, [f"{value:.0f}" for value in known])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure, name)


def losses(found: Measures, before: int, name: str) -> str:
    """Return an SVG chart of the training loss before and after the change, with a curve for each way (method).

    before: the last step before the change.
    name: a prefix for identifiers, unique in the page.
    """
    figure, axes = _chart((9, 3.6), xlabel="optimizer step", ylabel="loss")
    measures = [each for each in found.values() if each.is_done]
    widths = np.linspace(6.0, 1.4, len(measures))  # curves that agree hide one another
    for each, width in zip(measures, widths, strict=True):
        points = zip(*sorted(each.losses.items()), strict=True)
        axes.plot(*points, color=WAY_COLORS[each.way], linewidth=width, label=_title(each), alpha=0.75)
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


# ---- the page --------------------------------------------------------------------------------------------------------

PAGE_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>ds_dynatrain: live and by checkpoint</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .9rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd }
figure { margin: 1rem 0; overflow-x: auto }
figure svg { width: 100%; min-width: 40rem; max-width: max-content; height: auto }
</style></head>
<body>
"""


def page(found: Comparison) -> str:
    """Return one self-contained HTML document with all tables and charts. It has no scripts and loads nothing."""
    html, cases = MarkdownIt("commonmark", {"html": False}).enable("table").render, found.cases()
    body = html(f"# The same change, live and by checkpoint\n\n{NOT_COUNTED}\n\n{_best(found)}")
    for number, change in enumerate(dict.fromkeys(change for _, change in cases)):
        if sum(each == change for _, each in cases) > 1:
            body += html(f"## Against the size of the model: {change}")
            body += _figure(growth(found, change, f"growth{number}"), "Both axes are logarithmic.")
    for number, case in enumerate(cases):
        measures = found.of(*case)
        body += html(of_case(found, case, "##"))
        if any(each.is_done for each in measures.values()):
            caption = "Losses through the change (dashed)."
            if "dcp" in measures and measures["dcp"].is_done:
                caption += " FSDP2 rounds differently from DeepSpeed, so its curve is its own."
            body += _figure(phases(measures, f"phases{number}"), "Phases, as rank 0 sees them.")
            body += _figure(losses(measures, found.before, f"losses{number}"), caption)
    return f"{PAGE_HEAD}{body}{html(origin(found))}</body></html>\n"


def _best(found: Comparison) -> str:
    """Return a sentence with the best ratios of all cases; "" if there are none."""
    both = [each[1:] for case in found.cases() for each in ratios(found.of(*case))]
    if not both:
        return ""
    whole, apart = np.max(both, axis=0)
    text = f"DeepSpeed's universal checkpoint and a restart take up to {whole:.0f} times as long as a live switch, "
    return f"**{text}{apart:.0f} times without the certificate (goal: {BAR:.0f}).**"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"
