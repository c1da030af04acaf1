"""The outcome of a trace under each policy: plain data, a table, and a picture.

docs/reference has the JSON schema.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.markup import escape
from rich.table import Table

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.terminal import stdout_console


class PolicyOutcome(BaseModel):
    """The outcome of a trace under one policy.

    goodput: the steps that count, divided by the steps that all members would have made in the same time without
        events.
    ettr: effective training time ratio: the seconds of steps that count, divided by the seconds with at least one
        member.
    ettr_without_starts: the same ratio, without the seconds of starts in which no member had the state.
    steps: the number of steps that count. A step that trains a part of the batch counts as that part.
    lost_steps: the number of steps that were trained and later lost.
    changes: how often training paused to change the world.
    useful, lost, paused, starting, waiting: seconds of steps that count, of steps that were lost, of pauses for changes
        and checkpoints, of starts when no member had the state, and without enough members. Their sum is the length of
        the trace.
    member_hours: hours for which members belonged to the world, summed over members, whether they trained or paused.
    course: progress over time: (seconds since the start, number of steps so far that count) at each event.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str
    goodput: float
    ettr: float
    ettr_without_starts: float
    steps: float
    lost_steps: float
    changes: int
    useful: float
    lost: float
    paused: float
    starting: float
    waiting: float
    member_hours: float
    course: list[tuple[float, float]]


class SimulationOutcome(BaseModel):
    """The outcome of a trace for all policies.

    seconds: the length of the trace.
    events: the number of events of each kind.
    reference_seconds: the time of a step if all members train.
    empty_seconds: seconds without any member.
    assumptions: what was assumed, because the profile, the cluster file and the trace do not say it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    events: dict[str, int]
    reference_seconds: float
    empty_seconds: float
    policies: list[PolicyOutcome]
    assumptions: list[str]


# ---- for readers -----------------------------------------------------------------------------------------------------

COLORS = {"useful": "#15803d", "lost": "#b91c1c", "paused": "#d97706", "starting": "#1d4ed8", "waiting": "#cbd5e1"}


def show(found: SimulationOutcome, as_json: bool) -> None:
    """Print an outcome as text or as one JSON object."""
    if as_json:
        print(found.model_dump_json(indent=1))
        return
    console = stdout_console()
    events = ", ".join(f"{count} × {name}" for name, count in found.events.items()) or "no events"
    console.print(
        f"{found.seconds / 3600:.2f} hours, of which {found.empty_seconds / 3600:.2f} without a member; {events}; "
        f"a step of all members: {1e3 * found.reference_seconds:.4g} ms",
        soft_wrap=True,
    )
    table = Table("policy", box=None, padding=(0, 2, 0, 0))
    for title in ("goodput", "ETTR", "without starts", "steps", "lost", "pauses", "paused s", "member-hours"):
        table.add_column(title, justify="right")
    for each in found.policies:
        shares = (f"{share:.3f}" for share in (each.goodput, each.ettr, each.ettr_without_starts))
        counts = f"{each.steps:.0f}", f"{each.lost_steps:.0f}", f"{each.changes}"
        table.add_row(each.policy, *shares, *counts, f"{each.paused:.0f}", f"{each.member_hours:.1f}")
    console.print(table)
    console.print("\nassumed")
    for line in found.assumptions:
        console.print(f"  {escape(line)}", soft_wrap=True)


def draw_picture(found: SimulationOutcome, file: Path) -> None:
    """Draw the number of steps over time, and how each policy spent the time.

    Raises ConfigError if matplotlib is missing, or cannot write such a file.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib") from error
    figure = Figure((11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    begins = [0.0] * len(found.policies)
    for each in found.policies:
        left.plot(*zip(*((at / 3600, steps) for at, steps in each.course), strict=True), label=each.policy)
    left.set(xlabel="hours", ylabel="steps that count")
    left.legend(frameon=False, fontsize=8)
    for name, color in COLORS.items():
        widths = [getattr(each, name) / found.seconds if found.seconds else 0.0 for each in found.policies]
        right.barh([each.policy for each in found.policies], widths, left=begins, color=color, label=name)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    right.invert_yaxis()
    right.set(xlabel="share of the time", xlim=(0, 1))
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "simulate"}):
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except ValueError as error:
        raise ConfigError(f"--picture {file}: {error}") from None
