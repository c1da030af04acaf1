"""The pages as text: their blocks, headings, sections and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The code of a page, by language."""
    for _, language, text in FENCE.findall(text_of(page)):
        if language in languages:
            yield text


def section(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next one of its level."""
    text = text_of(page)
    hidden = FENCE.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), text)
    found = list(HEADING.finditer(hidden))
    for number, each in enumerate(found):
        if each[2] == heading:
            ends = (later.start() for later in found[number + 1 :] if len(later[1]) <= len(each[1]))
            return text[each.start() : next(ends, len(text))]
    raise AssertionError(f"{page.name} has no heading {heading!r}")


def linked_from(page: Path) -> set[Path]:
    """The pages that a page links to, and itself."""
    here = {page.resolve()}
    for link in LINK.findall(FENCE.sub("", text_of(page))):
        if not link.startswith(("http://", "https://", "#")):
            here.add((page.parent / link.partition("#")[0]).resolve())
    return here


def in_words(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())
