"""Pages are short, and so are their sentences; docstrings have a subject."""

from __future__ import annotations

import ast
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
    assert len(every) > 1700 and len(long) <= (1 - SHARE) * len(every), "\n".join(long)


WITHOUT_SUBJECT = frozenset(
    "of that those these as for in on at by to with what who whoever where when which whose from into after before "
    "between until likewise nothing nobody none so such all both each it its they theirs his".split()
)
FEWEST_WORDS = 4


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]


@pytest.mark.parametrize("folder", ["ds_dynatrain", "integrations"])
def test_docstrings_have_a_subject(folder: str) -> None:
    """A docstring begins with a verb, a noun or an article, and says more than three words."""
    odd = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for text in docstrings(path):
            first = re.sub(r"[^a-z]", "", text.split()[0].lower())
            if first in WITHOUT_SUBJECT or len(text.split()) < FEWEST_WORDS:
                odd.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not odd, "\n".join(odd)
