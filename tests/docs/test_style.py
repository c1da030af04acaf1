"""Pages are short, and so are their sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT, text_of

MOST_LINES = 200
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    assert len(text_of(page).splitlines()) <= MOST_LINES


OF_TABLES = ("api", "cli", "feasibility", "figures", "support")
"""Pages that commands have written, for the most part: what their names begin with, or their folder's."""
READ = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(page for page in PAGES if not page.name.startswith(OF_TABLES) and page.parent.name not in OF_TABLES),
)
MOST_WORDS, SHARE = 25, 0.95


def sentences(page: Path) -> list[str]:
    """Of the running text: no code, tables, headings or figures; an item of a list is a text of its own."""
    text = FENCE.sub("\n", text_of(page))
    text = re.sub(r"^(#+ .*|\|.*|!\[.*|<!--.*)$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("\n>", "\n")
    texts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    found = [each for text in texts for each in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[(\"'“a-z])", " ".join(text.split()))]
    return [each for each in found if len(each.split()) > 1]


def test_sentences_are_short() -> None:
    every = [(page, each) for page in READ for each in sentences(page)]
    long = [f"{page.relative_to(ROOT)}: {each}" for page, each in every if len(each.split()) > MOST_WORDS]
    assert len(every) > 2000 and len(long) <= (1 - SHARE) * len(every), "\n".join(long)
