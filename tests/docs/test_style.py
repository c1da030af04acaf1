"""Pages and the cells of their tables are short; docstrings have a subject."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, README, ROOT, text_of

DOCS = ROOT / "docs"
MOST_LINES, MOST_LINES_OF_DEVELOPERS, MOST_LINES_OF_FIGURES = 150, 150, 540
WRITTEN = {"support.md": 270}
"""Pages that tools write -> the most lines that they may have. Figures have a limit for all of them together, and the
reference has none."""
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name not in ("figures", "reference"))
MOST_WORDS = 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    most = MOST_LINES_OF_DEVELOPERS if page.parent.name == "dev" else WRITTEN.get(page.name, MOST_LINES)
    assert len(text_of(page).splitlines()) <= most


def test_the_figures_are_short() -> None:
    pages = list((DOCS / "figures").glob("*.md"))
    assert len(pages) <= 2
    assert sum(len(text_of(page).splitlines()) for page in pages) <= MOST_LINES_OF_FIGURES


@pytest.mark.parametrize("page", [README, *sorted(DOCS.rglob("*.md"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_cells_are_short(page: Path) -> None:
    """A link counts as its text, and a word between blanks as one word."""
    rows = [line for line in FENCE.sub("", text_of(page)).splitlines() if line.startswith("|")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell) for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > MOST_WORDS] == []


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
