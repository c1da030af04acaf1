"""The figures of a comparison as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_dynatrain.comparison.job import WAYS, Way
from ds_dynatrain.comparison.results import BAR, PHASES, Comparison, Measure, ratios, way_of

Row = Sequence[str]

HEAD = ("way", "stands still", "longer than live", "moved MB", "written MB", "peak MB", "steps lost", "bit-equal")
NOT_COUNTED = (
    "For a restart, the time runs from the end of the last step before it to the end of the first step after it, as "
    "rank 0 sees them, less one steady step. For a live switch, the time is its longest pause among the members that "
    "go on, proof included; for a late switch, the wait of its first step is added. A restart also needs time that is "
    "not counted here: for the end of the old processes, a scheduler, a container, a slower file system."
)


def document(found: Comparison) -> str:
    """Return all tables, case by case, with an explanation of the figures."""
    text = [f"Measured on: {found.machine}. By: `{found.command}`.", NOT_COUNTED]
    for size, change in found.cases():
        measures = found.of(size, change)
        text += [f"#### {title(size, measures)}, {change}", table(HEAD, rows(measures))]
        text += [*verdicts(measures), "Seconds by phase:", table(("way", *PHASES), phase_rows(measures))]
        text += reasons(measures)
    return "\n\n".join(text) + "\n"


def short(found: Comparison) -> str:
    """Return one table for a README: a row for each way, a column for each case."""
    cases = found.cases()
    names = {each.way for each in found.measures}
    ways = [way for way in WAYS if way.name in names]
    sizes = {case: title(case[0], found.of(*case)) for case in cases}
    head = ("training stands still (s)", *(f"{sizes[case]}, {case[1]}" for case in cases))
    lines = [(way.title, *(_still(found.of(*case).get(way.name)) for case in cases)) for way in ways]
    return f"{table(head, lines)}\n\nMeasured on: {found.machine}."


def title(size: str, measures: dict[str, Measure]) -> str:
    """Return the name of a model by its number of parameters."""
    count = max((each.parameters for each in measures.values()), default=0)
    return f"{count / 1e6:.1f}M parameters" if count else size


def rows(measures: dict[str, Measure]) -> list[Row]:
    """Return a row of the main table for each way."""
    live = [each.still for name, each in measures.items() if each.is_done and way_of(name).is_live]
    best = min(live, default=0.0)
    return [_row(way_of(name), each, best) for name, each in measures.items()]


def phase_rows(measures: dict[str, Measure]) -> list[Row]:
    """Return a row for each way, with a column for each phase."""
    done = [(way_of(name), each) for name, each in measures.items() if each.is_done]
    return [(way.title, *(_seconds(each.phases.get(phase, 0.0)) for phase in PHASES)) for way, each in done]


def verdicts(measures: dict[str, Measure]) -> list[str]:
    """Return a sentence for each live way: (total - one steady step) ÷ pause, compared with its bar."""
    said = []
    for way, whole, apart in ratios(measures):
        first, second = "with what the first step waits", "by the pause alone"
        if not way.late:
            first, second = "with the certificate", "without the certificate"
        met = "reached" if whole >= BAR else f"reached {second} ({apart:.0f})" if apart >= BAR else "missed"
        said.append(
            f"DeepSpeed's universal checkpoint and a restart ÷ {way.title}: **{whole:.0f}** {first}, **{apart:.0f}** "
            f"{second}. The goal of {BAR:.0f} is {met}."
        )
    return said


def reasons(measures: dict[str, Measure]) -> list[str]:
    """Return a sentence for each way that failed, with the reason."""
    return [
        f"{way_of(name).title}: not possible. `{each.reason.splitlines()[0][:300]}`"
        for name, each in measures.items()
        if not each.is_done
    ]


def table(head: Row, lines: Iterable[Row]) -> str:
    """Return a Markdown table, with numbers aligned to the right."""
    marks = ["---" if not column else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


def _row(way: Way, each: Measure, best: float) -> Row:
    if not each.is_done:
        return (way.title, "not possible", *[""] * (len(HEAD) - 2))
    still = each.still
    return (
        way.title,
        _time(still),
        f"{still / best:.0f} ×" if best and not way.is_live else "",
        f"{each.moved / 1e6:.0f}" if each.pause is not None else "",
        f"{each.written / 1e6:.0f}" if each.written else "",
        f"{each.peak / 1e6:.0f}",
        f"{each.steps_lost}" + (f", {each.samples_lost} samples" if each.samples_lost else ""),
        "yes" if each.is_equal else "no",
    )


def _still(each: Measure | None) -> str:
    if each is None:
        return ""
    return _time(each.still).removesuffix(" s") if each.is_done else "not possible"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 2 else f"{seconds:.2f} s"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else ""
