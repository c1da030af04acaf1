"""Output of a dry run: text or JSON in the terminal, or one HTML page without scripts that loads nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence

from pydantic import TypeAdapter
from rich.markup import escape
from rich.table import Table

from ds_dynatrain.dry_run.answer import ChangeFigures, DryRunAnswer
from ds_dynatrain.dry_run.change import Question
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
    """Return the figures as (description, value)."""
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


# ---- one HTML page ---------------------------------------------------------------------------------------------------

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #8884; text-align: left; font-weight: normal }
svg { max-width: 100%; height: auto }
"""
NETWORK, NODE, OTHER = "#c2410c", "#1d4ed8", "#64748b"
WIDTH, CELL = 900, 640


def page(found: DryRunAnswer) -> str:
    """Return the whole HTML document."""
    title = f"{found.model}: {Layout.from_dict(found.source)} → {Layout.from_dict(found.target)}"
    verdict = "fits" if found.fits else f"refused: {found.refusal}"
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p><b>{html.escape(verdict)}</b></p>"]
    parts += [f"<p>what would work: {html.escape(way)}</p>" for way in found.ways_out]
    if found.figures is not None:
        rows = (
            f"<tr><th>{html.escape(what)}</th><td>{html.escape(said)}</td></tr>" for what, said in lines(found.figures)
        )
        parts.append(f"<table>{''.join(rows)}</table>")
        phases = [
            (name, value, NETWORK if name == "moves" else OTHER) for name, value in found.figures.seconds.phases.items()
        ]
        parts += ["<h2>Bytes between nodes</h2>", _matrix(found.figures)]
        parts += ["<h2>Expected phases</h2>", _timeline(phases)]
        rounds = []
        for number, each in enumerate(found.figures.rounds, 1):
            where, color = ("between nodes", NETWORK) if each.between_nodes else ("inside nodes", NODE)
            rounds.append((f"round {number}, {where}", each.seconds, color))
        if rounds:
            parts += ["<h2>Rounds of exchanges</h2>", _timeline(rounds)]
    parts += ["<h2>Assumed</h2><ul>", *(f"<li>{html.escape(line)}</li>" for line in found.assumptions), "</ul>"]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _matrix(figures: ChangeFigures) -> str:
    """Return a picture of the bytes between nodes: a row for each sending node, a column for each receiving node."""
    count, most = len(figures.nodes), max((nbytes for _, _, nbytes in figures.pairs), default=0)
    if not most:
        return "<p>No bytes go from node to node.</p>"
    side, names = CELL / count, [node.name for node in figures.nodes]
    cells = []
    for sender, receiver, nbytes in figures.pairs:
        said = html.escape(f"{names[sender]} → {names[receiver]}: {size(nbytes)}")
        place = f'x="{receiver * side:.2f}" y="{sender * side:.2f}" width="{side:.2f}" height="{side:.2f}"'
        fill = f'fill="{NETWORK}" fill-opacity="{0.08 + 0.92 * nbytes / most:.3f}"'
        cells.append(f"<rect {place} {fill}><title>{said}</title></rect>")
    frame = f'<rect width="{CELL}" height="{CELL}" fill="none" stroke="{OTHER}"/>'
    first = html.escape(names[0])
    said = f"<p>Rows send, columns receive: {count} nodes from {first} on; the darkest is {size(most)}.</p>"
    return f'{said}<svg viewBox="0 0 {CELL} {CELL}" width="{CELL}" role="img">{frame}{"".join(cells)}</svg>'


def _timeline(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return a picture of durations that follow one another.

    rows: (name, seconds, color) of each.
    """
    scale, begin, drawn = WIDTH / (sum(seconds for _, seconds, _ in rows) or 1), 0.0, []
    height = max(6.0, min(24.0, 600 / len(rows)))
    for number, (name, seconds, color) in enumerate(rows):
        place = f'x="{begin * scale:.2f}" y="{number * height:.2f}" width="{max(seconds * scale, 0.5):.2f}"'
        said = f"<title>{html.escape(name)}: {seconds:.4f} s</title>"
        drawn.append(f'<rect {place} height="{height - 1:.2f}" fill="{color}">{said}</rect>')
        begin += seconds
    return (
        f"<p>{begin:.3f} s in {len(rows)} steps; point at one for its name.</p>"
        f'<svg viewBox="0 0 {WIDTH} {len(rows) * height:.0f}" width="{WIDTH}" role="img">{"".join(drawn)}</svg>'
    )
