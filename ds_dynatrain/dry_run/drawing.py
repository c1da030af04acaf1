"""HTML page with the result of a dry run. The page is one file without scripts and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ds_dynatrain.dry_run.answer import ChangeFigures, DryRunAnswer
from ds_dynatrain.dry_run.printing import lines, size
from ds_dynatrain.space import Layout

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
    parts = [f"<h1>{escape(title)}</h1>", f"<p><b>{escape(verdict)}</b></p>"]
    parts += [f"<p>what would work: {escape(way)}</p>" for way in found.ways_out]
    if found.figures is not None:
        rows = (f"<tr><th>{escape(what)}</th><td>{escape(said)}</td></tr>" for what, said in lines(found.figures))
        parts.append(f"<table>{''.join(rows)}</table>")
        phases = [
            (name, value, NETWORK if name == "moves" else OTHER) for name, value in found.figures.seconds.phases.items()
        ]
        parts += ["<h2>Bytes between nodes</h2>", _matrix(found.figures)]
        parts += ["<h2>Expected phases</h2>", _timeline(phases)]
        if found.figures.rounds:
            parts += ["<h2>Rounds of exchanges</h2>", _timeline(_rounds(found.figures))]
    parts += ["<h2>Assumed</h2><ul>", *(f"<li>{escape(line)}</li>" for line in found.assumptions), "</ul>"]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _matrix(figures: ChangeFigures) -> str:
    """Return a picture of who sends how much: a row for each sending node, a column for each receiving one."""
    count, most = len(figures.nodes), max((nbytes for _, _, nbytes in figures.pairs), default=0)
    if not most:
        return "<p>No bytes go from node to node.</p>"
    side, names = CELL / count, [node.name for node in figures.nodes]
    cells = []
    for sender, receiver, nbytes in figures.pairs:
        said = escape(f"{names[sender]} → {names[receiver]}: {size(nbytes)}")
        place = f'x="{receiver * side:.2f}" y="{sender * side:.2f}" width="{side:.2f}" height="{side:.2f}"'
        fill = f'fill="{NETWORK}" fill-opacity="{0.08 + 0.92 * nbytes / most:.3f}"'
        cells.append(f"<rect {place} {fill}><title>{said}</title></rect>")
    frame = f'<rect width="{CELL}" height="{CELL}" fill="none" stroke="{OTHER}"/>'
    said = f"<p>Rows send, columns receive: {count} nodes from {escape(names[0])} on; the darkest is {size(most)}.</p>"
    return f'{said}<svg viewBox="0 0 {CELL} {CELL}" width="{CELL}" role="img">{frame}{"".join(cells)}</svg>'


def _rounds(figures: ChangeFigures) -> Iterable[tuple[str, float, str]]:
    for number, each in enumerate(figures.rounds, 1):
        where, color = ("between nodes", NETWORK) if each.between_nodes else ("inside nodes", NODE)
        yield f"round {number}, {where}", each.seconds, color


def _timeline(bars: Iterable[tuple[str, float, str]]) -> str:
    """Return a picture of durations that follow one another, given as (name, seconds, color)."""
    rows = list(bars)
    scale, begin, drawn = WIDTH / (sum(seconds for _, seconds, _ in rows) or 1), 0.0, []
    height = max(6.0, min(24.0, 600 / len(rows)))
    for number, (name, seconds, color) in enumerate(rows):
        place = f'x="{begin * scale:.2f}" y="{number * height:.2f}" width="{max(seconds * scale, 0.5):.2f}"'
        said = f"<title>{escape(name)}: {seconds:.4f} s</title>"
        drawn.append(f'<rect {place} height="{height - 1:.2f}" fill="{color}">{said}</rect>')
        begin += seconds
    return (
        f"<p>{begin:.3f} s in {len(rows)} steps; point at one for its name.</p>"
        f'<svg viewBox="0 0 {WIDTH} {len(rows) * height:.0f}" width="{WIDTH}" role="img">{"".join(drawn)}</svg>'
    )
