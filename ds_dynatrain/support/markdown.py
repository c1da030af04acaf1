"""The support table as Markdown, and pages of the docs with their tables brought up to date.

    python -m ds_dynatrain.support.markdown docs/features.md docs/gpu.md docs/fit.md README.md

rewrites the tables between a page's `<!-- table: NAME -->` and `<!-- end -->` marks and leaves the rest alone.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.support import proved
from ds_dynatrain.support.keys import CONFIG_TABLES
from ds_dynatrain.support.row import NOT_TRIED, OFF, REMOVE, Row, Verdict
from ds_dynatrain.support.walk import all_tables

_MARKED = re.compile(r"<!-- table: (?P<name>[\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
PROOFS = {"proved": proved.table, "gpus": proved.status}
"""Functions that say where the package has run: the full table of docs/gpu.md, and the short answer on several
pages."""


def markdown(name: str) -> str:
    """Return one table as Markdown; neighbouring rows that say the same share a line."""
    lines = [_line(name, list(same)) for _, same in itertools.groupby(all_tables()[name], _what_is_said)]
    head = "what" if name not in CONFIG_TABLES else "key"
    return "\n".join([f"| {head} | | why, and what to do |", "|---|---|---|", *lines])


def filled(pages: Sequence[str]) -> list[str]:
    """Return pages with all their tables rewritten.

    Raise ConfigError if any page has tables of the support table and the pages together do not have each of them once.
    """
    there = [found["name"] for page in pages for found in _MARKED.finditer(page) if found["name"] not in PROOFS]
    wrong = sorted(set(there) ^ set(all_tables())) or [name for name in there if there.count(name) > 1]
    if there and wrong:
        raise ConfigError(
            f"docs/features.md has these tables not once: {', '.join(wrong)}; give the page, "
            "with the marks of each once"
        )
    return [_MARKED.sub(_anew, page) for page in pages]


def _anew(found: re.Match[str]) -> str:
    name = found["name"]
    return f"<!-- table: {name} -->\n{PROOFS[name]() if name in PROOFS else markdown(name)}\n<!-- end -->"


def note(row: Row) -> str:
    """Return the reason or note of a row, what to do, and which values are accepted all the same."""
    why = "" if row.why == NOT_TRIED else row.why
    instead = "" if row.instead == REMOVE else row.instead
    said = "; ".join(part for part in (why, instead) if part)
    fine = [str(value).lower() if isinstance(value, bool) else str(value) for value in row.off if value not in OFF]
    if row.verdict is Verdict.AT_START and fine:
        said = "; ".join(part for part in (said, f"`{'`, `'.join(fine)}` may stand there") if part)
    return said


def _what_is_said(row: Row) -> tuple[object, ...]:
    section = "" if row.values else row.key.rpartition(".")[0]
    return (section, row.key if row.values else "", row.verdict, note(row))


def _line(name: str, rows: Sequence[Row]) -> str:
    return f"| {', '.join(_names(name, rows))} | {rows[0].verdict.value} | {note(rows[0])} |"


def _names(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the keys of one table line: the first with its section (`zero_optimization.stage`), the others alone."""
    for place, row in enumerate(rows):
        if name not in CONFIG_TABLES:
            yield row.key
        elif row.values:
            yield f"`{row.key}`: " + ", ".join(f"`{value}`" for value in row.values)
        else:
            yield f"`{row.key if place == 0 else '.' * ('.' in row.key) + row.key.rpartition('.')[2]}`"


def main(files: Sequence[Path]) -> None:
    """Rewrite the tables of these pages in place."""
    for file, text in zip(files, filled([file.read_text(encoding="utf-8") for file in files]), strict=True):
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
