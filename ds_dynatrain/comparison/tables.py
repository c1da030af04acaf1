"""Markdown tables of the figures of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ds_dynatrain.comparison.job import WAYS
from ds_dynatrain.comparison.results import BAR, PHASES, Comparison, Measure, ratios

Row = Sequence[str]

HEAD = ("way", "stands still", "longer than live", "moved MB", "written MB", "peak MB", "steps lost", "bit-equal")
NOT_COUNTED = (
    "For a restart, the time runs from the end of the last step before it to the end of the first step after it, as "
    "rank 0 sees them, less one steady step. For a live switch, the time is its longest pause among the members that "
    "go on, proof included; for a late switch, the wait of its first step is added. A restart also needs time that is "
    "not counted here: for the end of the old processes, a scheduler, a container, a slower file system."
)


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
    live = [each.still for name, each in measures.items() if each.is_done and WAYS[name].is_live]
    rows = [_row(each, min(live, default=0.0)) for each in measures.values()]
    parts = [
        (
            WAYS[name].title,
            *(f"{value:.2f}" if (value := each.phases.get(phase, 0.0)) >= 0.005 else "" for phase in PHASES),
        )
        for name, each in measures.items()
        if each.is_done
    ]
    failed = [
        f"{WAYS[name].title}: not possible. `{each.reason.splitlines()[0][:300]}`"
        for name, each in measures.items()
        if not each.is_done
    ]
    text = [f"{mark} {_title(case[0], measures)}, {case[1]}", _table(HEAD, rows), *verdicts(measures)]
    return "\n\n".join([*text, "Seconds by phase:", _table(("way", *PHASES), parts), *failed])


def short(found: Comparison) -> str:
    """Return one table for a README, with a row for each way to carry out a change and a column for each case."""
    cases = {case: found.of(*case) for case in found.cases()}
    names = {each.way for each in found.measures}
    head = (f"{_title(size, measures)}, {change}" for (size, change), measures in cases.items())
    lines = [
        (way.title, *(_still(measures[way.name]) if way.name in measures else "" for measures in cases.values()))
        for way in WAYS.values()
        if way.name in names
    ]
    return f"{_table(('training stands still (s)', *head), lines)}\n\nMeasured on: {found.machine}."


def verdicts(measures: Mapping[str, Measure]) -> list[str]:
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


def parameters(measures: Mapping[str, Measure]) -> int:
    """Return the number of parameters of the measured model; 0 if no measurement succeeded."""
    return max(each.parameters for each in measures.values())


def _title(size: str, measures: Mapping[str, Measure]) -> str:
    """Return a description of a model's number of parameters, or its size's name if no measurement succeeded."""
    count = parameters(measures)
    return f"{count / 1e6:.1f}M parameters" if count else size


def _table(head: Row, lines: Iterable[Row]) -> str:
    """Return a Markdown table in which all columns except the first are aligned to the right."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


def _row(each: Measure, best: float) -> Row:
    """Return the table row of one measure.

    best: the shortest time for which training stopped in a live switch; 0.0 if none succeeded.
    """
    way, still = WAYS[each.way], each.still
    if not each.is_done:
        return (way.title, "not possible", *[""] * (len(HEAD) - 2))
    return (
        way.title,
        f"{_still(each)} s",
        f"{still / best:.0f} ×" if best and not way.is_live else "",
        f"{each.moved / 1e6:.0f}" if each.pause is not None else "",
        f"{each.written / 1e6:.0f}" if each.written else "",
        f"{each.peak / 1e6:.0f}",
        f"{each.steps_lost}" + (f", {each.samples_lost} samples" if each.samples_lost else ""),
        "yes" if each.is_equal else "no",
    )


def _still(each: Measure) -> str:
    return f"{each.still:.{1 if each.still >= 2 else 2}f}" if each.is_done else "not possible"
