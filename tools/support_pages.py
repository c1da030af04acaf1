"""Rewrite the tables of pages that are made from the support table, and from records of runs.

python tools/support_pages.py docs/support.md docs/gpu.md docs/fit.md docs/versions.md README.md

The table of frameworks is made from docs/figures/frameworks.json.

It rewrites what is between a page's `<!-- table: NAME ... -->` and `<!-- end -->` marks, and leaves the rest alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.support import all_tables
from ds_dynatrain.support.markdown import markdown
from ds_dynatrain.support.proved import HARDWARE, PARTS, standing

_MARKED = re.compile(r"<!-- table: (?P<names>[\w ]+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(pages: Sequence[str]) -> list[str]:
    """Return pages with all their tables rewritten.

    Raises ConfigError if any page has tables of the support table, unless the pages together have each table exactly
    once.
    """
    marked = [name for page in pages for found in _MARKED.finditer(page) for name in found["names"].split()]
    there = [name for name in marked if name not in PROOFS]
    wrong = sorted(set(there) ^ set(all_tables())) or [name for name in there if there.count(name) > 1]
    if there and wrong:
        raise ConfigError(
            f"docs/support.md has these tables not once: {', '.join(wrong)}; give the page, with the marks of each once"
        )
    return [_MARKED.sub(_anew, page) for page in pages]


def _anew(found: re.Match[str]) -> str:
    names = found["names"]
    return f"<!-- table: {names} -->\n{PROOFS[names]() if names in PROOFS else markdown(*names.split())}\n<!-- end -->"


def status() -> str:
    """Return the answer to "does it run on GPUs" as Markdown. All pages that answer this question include it."""
    proofs = [proof for (accelerator, _), proof in HARDWARE.items() if accelerator == "cuda"]
    cards = sorted({proof.where for proof in proofs})
    is_several = any("1 ×" not in where for where in cards)
    never = [
        words
        for words, has_run in (
            ("over NCCL", ("cuda", "groups") in HARDWARE),
            ("on several cards", is_several),
            ("on a card with nodes that come and go", ("cuda", "elastic") in HARDWARE),
        )
        if not has_run
    ]
    ran = f"Jobs of a fixed size have run on GPUs: {', '.join(cards)}, the last on {max(each.date for each in proofs)}."
    return f"{ran} **No job has run {', '.join(never[:-1])}{', or ' * (len(never) > 1)}{never[-1]}.**" if never else ran


def table() -> str:
    """Return a Markdown table of all parts."""
    lines = ["| part | on CUDA | on other accelerators |", "|---|---|---|"]
    lines += [f"| {name} | {standing('cuda', part)} | {standing('other', part)} |" for part, name in PARTS.items()]
    return "\n".join(lines)


FRAMEWORKS = Path(__file__).parents[1] / "docs" / "figures" / "frameworks.json"
TRIED = ("static", "switch", "elastic", "resume")
"""Columns of the table of frameworks that say how it went."""


def frameworks() -> str:
    """Return a Markdown table of the frameworks that were tried, and of what their own requirements pin."""
    rows: list[dict[str, Any]] = json.loads(FRAMEWORKS.read_text(encoding="utf-8"))
    columns = ("framework", "what it pins", *TRIED, "tried by")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        by = ", ".join(f"[{Path(each).stem}](../{each})" if "/" in each else each for each in row["by"])
        lines.append(f"| {' | '.join((row['what'], row['pin'], *(row[name] for name in TRIED), by))} |")
    return "\n".join(lines)


PROOFS = {"proved": table, "gpus": status, "frameworks": frameworks}
"""Tables of where the package has run: the full one of docs/gpu.md, the short answer on several pages, frameworks."""


def main(files: Sequence[Path]) -> None:
    """Rewrite the tables of these pages in place."""
    for file, text in zip(files, filled([file.read_text(encoding="utf-8") for file in files]), strict=True):
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
