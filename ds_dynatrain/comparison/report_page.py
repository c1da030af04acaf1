"""One self-contained HTML page with the figures of a comparison: no script, no other files, nothing from a network."""

from __future__ import annotations

from html import escape

from markdown_it import MarkdownIt

from ds_dynatrain.comparison import charts, tables
from ds_dynatrain.comparison.results import BAR, Comparison, ratios

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .9rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd }
figure { margin: 1rem 0; overflow-x: auto }
figure svg { width: 100%; min-width: 40rem; max-width: max-content; height: auto }
"""
HEAD = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>ds_dynatrain: live and by checkpoint</title><style>{STYLE}</style></head>\n<body>\n"
)


def page(found: Comparison) -> str:
    """Return the whole HTML document, with all tables and charts."""
    html, cases = MarkdownIt("commonmark", {"html": False}).enable("table").render, found.cases()
    body = html(f"# The same change, live and by checkpoint\n\n{tables.NOT_COUNTED}\n\n{_best(found)}")
    for number, change in enumerate(dict.fromkeys(change for _, change in cases)):
        if sum(each == change for _, each in cases) > 1:
            body += html(f"## Against the size of the model: {change}")
            body += _figure(charts.growth(found, change, f"growth{number}"), "Both axes are logarithmic.")
    for number, case in enumerate(cases):
        measures = found.of(*case)
        body += html(tables.of_case(found, case, "##"))
        if any(each.is_done for each in measures.values()):
            caption = "Losses through the change (dashed)."
            if "dcp" in measures and measures["dcp"].is_done:
                caption += " FSDP2 rounds differently from DeepSpeed, so its curve is its own."
            body += _figure(charts.phases(measures, f"phases{number}"), "Phases, as rank 0 sees them.")
            body += _figure(charts.losses(measures, found.before, f"losses{number}"), caption)
    return f"{HEAD}{body}{html(tables.origin(found))}</body></html>\n"


def _best(found: Comparison) -> str:
    """Return a sentence with the best ratios of all cases; "" if there are none."""
    all_of = [each for case in found.cases() for each in ratios(found.of(*case))]
    if not all_of:
        return ""
    whole, apart = max(each[1] for each in all_of), max(each[2] for each in all_of)
    text = f"DeepSpeed's universal checkpoint and a restart take up to {whole:.0f} times as long as a live switch, "
    return f"**{text}{apart:.0f} times without the certificate (goal: {BAR:.0f}).**"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"
