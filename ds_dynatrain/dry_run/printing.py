"""Output of a dry run in the terminal, as text or as JSON."""

from __future__ import annotations

from pydantic import TypeAdapter
from rich.markup import escape
from rich.table import Table

from ds_dynatrain.dry_run.answer import ChangeFigures, DryRunAnswer
from ds_dynatrain.dry_run.asked import Question
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import Layout
from ds_dynatrain.terminal import stdout_console

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(number: float) -> str:
    """Return a number of bytes with a unit, such as "12.3 GB"."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if number >= scale), (1.0, "B"))
    return f"{number / scale:.3g} {unit}" if number < 1000 * scale else f"{number / scale:,.0f} {unit}"


def answer(found: DryRunAnswer, as_json: bool) -> None:
    """Print an answer as text or as one JSON object."""
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    console = stdout_console()
    console.print(
        f"[bold]{escape(found.model)}[/]: {Layout.from_dict(found.source)} → {Layout.from_dict(found.target)}"
    )
    said = "[bold green]fits[/]" if found.fits else f"[bold red]refused[/]: {escape(found.refusal)}"
    console.print(said, soft_wrap=True)
    for way in found.ways_out:
        console.print(f"  what would work: {escape(way)}", soft_wrap=True)
    if found.figures is not None:
        table = Table(box=None, show_header=False, padding=(0, 2))
        for what, number in lines(found.figures):
            table.add_row(what, escape(number))
        console.print(table)
    console.print("\nassumed")
    for line in found.assumptions:
        console.print(f"  {escape(line)}", soft_wrap=True)


def suggestions(found: list[DryRunAnswer], as_json: bool) -> None:
    """Print suggested layouts, cheapest to reach first."""
    if as_json:
        print(TypeAdapter(list[DryRunAnswer]).dump_json(found, indent=2).decode())
        return
    table = Table("layout", "expected", "floor", "sent", "between nodes", "peak", box=None)
    for each in found:
        if (figures := each.figures) is not None:
            seconds, moved = figures.seconds, figures.bytes
            cells = f"{seconds.expected:.2f} s", f"{seconds.floor:.3f} s", size(moved.sent), size(moved.between_nodes)
            table.add_row(str(Layout.from_dict(each.target)), *cells, size(figures.memory.peak))
    stdout_console().print(table)


def estimate(
    question: Question,
    refused: SwitchRefused | None,
    held: list[tuple[Layout, dict[str, int]]],
    switches: list[DryRunAnswer],
) -> None:
    """Print the memory of a layout's state in each ZeRO stage, and what switches from the layout cost."""
    console = stdout_console()
    console.print(f"[bold]{escape(question.job.model.name)}[/]: {question.source}")
    if refused is not None:
        console.print(f"[bold red]refused[/]: {escape(refused.reason)}", soft_wrap=True)
        if refused.way_out:
            console.print(f"  what would work: {escape(refused.way_out)}", soft_wrap=True)
        return
    kinds = list(dict.fromkeys(kind for _, row in held for kind in row))
    table = Table("memory of a rank", *kinds, box=None)
    for layout, row in held:
        table.add_row(str(layout), *(size(row[kind]) if kind in row else "" for kind in kinds))
    console.print(table)
    console.print("\nswitches from there, on as many ranks")
    suggestions(switches, as_json=False)
    console.print("\nactivations, gradients and padding come on top; assumed")
    for line in question.job.assumed:
        console.print(f"  {escape(line)}", soft_wrap=True)


def lines(figures: ChangeFigures) -> list[tuple[str, str]]:
    """Return the figures as (what, how much)."""
    moved, memory, seconds, busiest = figures.bytes, figures.memory, figures.seconds, figures.busiest
    device = "" if memory.device is None else f" of {size(memory.device)}"
    freed = f"{len(figures.freed)}: {', '.join(figures.freed[:8])}" if figures.freed else "none"
    excess = ", ".join(f"{size(number)} {cause}" for cause, number in moved.excess.items() if number)
    phases = ", ".join(f"{name} {value:.3f}" for name, value in seconds.phases.items())
    return [
        ("kept", size(moved.kept)),
        ("cast from masters", size(moved.cast)),
        ("sent", f"{size(moved.sent)} ({size(moved.between_nodes)} between nodes)"),
        ("minimum", f"{size(moved.minimum)} with rank 0 and the nodes of ranks as they are, proved"),
        ("beyond what the sizes need", excess),
        (
            "busiest member",
            f"{busiest.member} on {busiest.node}: sends {size(busiest.sent)}, receives {size(busiest.received)}",
        ),
        (
            "peak memory",
            f"{size(memory.peak)}{device} on member {memory.member}: {size(memory.before)} before, "
            f"{size(memory.after)} after; lean {size(memory.lean)}",
        ),
        (
            "seconds, at least",
            f"{seconds.floor:.3f} (memory {seconds.memory:.3f}, node {seconds.node:.3f}, "
            f"network {seconds.network:.3f})",
        ),
        ("seconds, expected", f"{seconds.expected:.2f} ({phases})"),
        ("nodes that become free", freed),
    ]
