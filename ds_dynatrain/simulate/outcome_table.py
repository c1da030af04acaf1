"""Shows the outcome of a simulation: a table for readers, JSON for programs, and a picture."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.simulate.outcome import SimulationOutcome
from ds_dynatrain.terminal import stdout_console

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
    """Draw the steps over time, and where the time of each policy went.

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
