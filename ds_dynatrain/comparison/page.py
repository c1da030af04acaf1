"""The figures as one self-contained HTML page: no script, no further files, nothing from a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ds_dynatrain.comparison import charts, markdown
from ds_dynatrain.comparison.results import BAR, PHASES, Comparison, ratios

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
figure { margin: 1rem 0; overflow-x: auto }
figure svg { width: 100%; min-width: 40rem; max-width: max-content; height: auto }
figcaption, .small { color: #666; font-size: .85rem } code { font-size: .85em } .wide { overflow-x: auto }
.figure { font-size: 1.1rem; background: #f4f7f8; border-left: 4px solid #0b6e99; padding: .5rem 1rem }
"""


def page(found: Comparison) -> str:
    """Return the whole document; ImportError without matplotlib."""
    changes = list(dict.fromkeys(change for _, change in found.cases()))
    body = [
        "<h1>The same change, live and by checkpoint</h1>",
        f"<p>{escape(markdown.NOT_COUNTED)}</p>",
        *_best(found),
    ]
    for number, change in enumerate(changes):
        if len({size for size, each in found.cases() if each == change}) > 1:
            body.append(f"<h2>Against the size of the model: {escape(change)}</h2>")
            body.append(_figure(charts.growth(found, change, f"growth{number}"), "Both axes are logarithmic."))
    for number, case in enumerate(found.cases()):
        body += _case(found, *case, number)
    body.append(f'<p class="small">Measured on: {escape(found.machine)}. By <code>{escape(found.command)}</code>.</p>')
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>ds_dynatrain: live and by checkpoint</title><style>{STYLE}</style>"
    inside = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{inside}\n</body></html>\n'


def _case(found: Comparison, size: str, change: str, number: int) -> list[str]:
    measures = found.of(size, change)
    body = [f"<h2>{escape(f'{markdown.title(size, measures)}, {change}')}</h2>"]
    body += [f'<p class="figure">{_sentence(line)}</p>' for line in markdown.verdicts(measures)]
    is_any_done = any(each.is_done for each in measures.values())
    if is_any_done:
        body.append(_figure(charts.phases(found, size, change, f"phases{number}"), "Phases, as rank 0 sees them."))
    body.append(_table(markdown.HEAD, markdown.rows(measures)))
    if is_any_done:
        body.append("<details><summary>seconds by phase</summary>")
        body += [_table(("way", *PHASES), markdown.phase_rows(measures)), "</details>"]
    body += [f"<p>{_sentence(line)}</p>" for line in markdown.reasons(measures)]
    if is_any_done:
        caption = "Losses through the change (dashed)."
        if "dcp" in measures and measures["dcp"].is_done:
            caption += " FSDP2 rounds differently from DeepSpeed, so its curve is its own."
        body.append(_figure(charts.losses(found, size, change, f"losses{number}"), caption))
    return body


def _best(found: Comparison) -> list[str]:
    """Return a paragraph on how far the goal is reached, over all cases."""
    all_of = [each for case in found.cases() for each in ratios(found.of(*case))]
    if not all_of:
        return []
    whole, apart = max(each[1] for each in all_of), max(each[2] for each in all_of)
    text = f"DeepSpeed's universal checkpoint and a restart take up to {whole:.0f} times as long as a live switch, "
    return [f'<p class="figure">{text}{apart:.0f} times without the certificate (goal: {BAR:.0f}).</p>']


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div>'


def _sentence(text: str) -> str:
    """Turn Markdown's bold and code into HTML."""
    for mark, tag in (("**", "b"), ("`", "code")):
        parts = enumerate(text.split(mark))
        text = "".join(f"\0{tag}\1{part}\0/{tag}\1" if number % 2 else part for number, part in parts)
    return escape(text).replace("\0", "<").replace("\1", ">")
