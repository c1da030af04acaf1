"""The support table as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ds_dynatrain.support.keys import CONFIG_TABLES
from ds_dynatrain.support.row import NOT_TRIED, OFF, REMOVE, Row, Verdict
from ds_dynatrain.support.walk import CONFIG_ROWS, all_tables

MOST_KEYS = 12
"""Maximum number of keys in a cell of a table."""


def markdown(*names: str) -> str:
    """Return the rows of these tables as one table. Rows with the same note share a line.

    Keys without a note, and lists of keys that are too long for a cell, follow as paragraphs.
    """
    groups: dict[tuple[Verdict, str], list[Row]] = {}
    for row in itertools.chain.from_iterable(all_tables()[name] for name in names):
        groups.setdefault((row.verdict, note(row)), []).append(row)
    lines, paragraphs = [], []
    for (verdict, said), rows in groups.items():
        keys = list(_names(rows))
        if said and len(keys) <= MOST_KEYS:
            lines.append(f"| {', '.join(keys)} | {verdict.value} | {said} |")
        else:
            paragraphs.append(f"*{verdict.value.capitalize()}*{said and f' ({said})'}: {', '.join(keys)}.")
    head = "key" if names[0] in CONFIG_TABLES else "what"
    return "\n\n".join(["\n".join([f"| {head} | | why, and what to do |", "|---|---|---|", *lines]), *paragraphs])


def note(row: Row) -> str:
    """Return the reason or note of a row, what to do, and which values are still accepted."""
    why = "" if row.why == NOT_TRIED else row.why
    instead = "" if row.instead == REMOVE else row.instead
    said = "; ".join(part for part in (why, instead) if part)
    fine = [str(value).lower() if isinstance(value, bool) else str(value) for value in row.off if value not in OFF]
    fine = [value for value in fine if value not in instead]
    if row.verdict is Verdict.AT_START and fine:
        said = "; ".join(
            part for part in (said, f"`{'`, `'.join(fine)}` {'are' if len(fine) > 1 else 'is'} accepted") if part
        )
    return said


def _names(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the keys of one line.

    A key is shown without its section (`.stage`) if the previous key has the same one.
    """
    before = ""
    for row in rows:
        section, _, name = row.key.rpartition(".")
        shown = f".{name}" if section and section == before else row.key
        before = section
        is_key = row.key in CONFIG_ROWS
        values = f" ({', '.join(f'`{value}`' for value in row.values)})" if row.values else ""
        yield f"`{shown}`{values}" if is_key else row.key
