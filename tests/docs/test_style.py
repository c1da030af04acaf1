"""Pages are short; docstrings have a subject."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, text_of

MOST_LINES = 200
WRITTEN = ("figures", "reference")
"""Folders of pages that tools write; so are the tables of `support.md` and `feasibility.md`."""
PAGES = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if page.parent.name not in WRITTEN and page.name not in ("support.md", "feasibility.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    assert len(text_of(page).splitlines()) <= MOST_LINES


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
