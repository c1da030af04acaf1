"""The architecture page and the packages' docstrings: names, paths and arrows in them are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, section, text_of
from tests.test_layering import BELOW, PACKAGE

PAGE = PACKAGE / "README.md"
MOST_LINES, MOST_WORDS = 200, 25
PUBLIC_NAMES = "the package's public names"
JOURNEYS = ("A switch", "A join", "A death")
FILE = re.compile(r"`([\w/]+\.py)`")


def rows(title: str) -> list[list[str]]:
    """Return the rows of a section's table, without its head."""
    found = re.findall(r"^\| (.+) \|$", section(PAGE, title), re.MULTILINE)
    return [row.split(" | ") for row in found[1:]]


@cache
def defined(path: Path) -> set[str]:
    """Return functions and classes of a file's top level, and methods with the names of their classes."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_the_page_is_short() -> None:
    assert len(text_of(PAGE).splitlines()) <= MOST_LINES
    cells = [cell for line in text_of(PAGE).splitlines() if line.startswith("| ") for cell in line.split(" | ")]
    assert not [cell for cell in cells if len(cell.strip("| ").split()) > MOST_WORDS]


def test_folders_are_those_of_the_code() -> None:
    said = {name.strip("`/"): (may.split(", "), start.strip("`")) for name, _, may, start in rows("Folders")}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert said.keys() == folders
    for name, (may, start) in said.items():
        assert {"" if each == PUBLIC_NAMES else each for each in may} == BELOW[name], name
        assert (PACKAGE / name / start).exists(), (name, start)


@pytest.mark.parametrize("title", JOURNEYS)
def test_journeys_name_functions_of_the_code(title: str) -> None:
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`: (.+)$", section(PAGE, title), re.MULTILINE)
    assert len(steps) == len(re.findall(r"^\d+\. ", section(PAGE, title), re.MULTILINE)) > 10
    everywhere = set[str]().union(*(defined(path) for path in PACKAGE.rglob("*.py")))
    for file, text in steps:
        first, *others = re.findall(r"`([\w.]+)`", text)
        assert first in defined(PACKAGE / file), (file, first)
        assert {*others} <= everywhere, (file, others)
    named = re.findall(r"`([A-Z]\w+\.\w+)`", section(PAGE, title))
    assert {*named} <= everywhere


def test_every_path_is_there() -> None:
    for file in FILE.findall(text_of(PAGE)):
        starts = [PACKAGE / row[0].strip("`") / file for row in rows("Folders")]
        assert any(path.exists() for path in (PACKAGE / file, ROOT / file, *starts)), file


def test_invariants_are_numbered_and_have_a_place_and_a_test() -> None:
    found = rows("Invariants")
    assert [row[0] for row in found] == [f"I{number}" for number in range(1, len(found) + 1)]
    for number, _, places, tests in found:
        assert all((PACKAGE / file).exists() for file in FILE.findall(places)) and FILE.findall(places), number
        assert all((ROOT / file).exists() for file in FILE.findall(tests)) and FILE.findall(tests), number


def test_what_to_write_names_objects_of_the_code() -> None:
    for _, text in rows("What you write for something new"):
        files = [PACKAGE / file for file in FILE.findall(text)]
        code = "\n".join(path.read_text(encoding="utf-8") for path in files)
        for name in re.findall(r"`(\w+)`", text):
            assert not files or re.search(rf"\b{name}\b", code), (name, files)


@pytest.mark.parametrize("init", sorted(PACKAGE.rglob("__init__.py")), ids=lambda init: init.parent.name)
def test_docstrings_of_folders_name_files_that_are_there(init: Path) -> None:
    """The first cell of a row names files of the folder; `start with` names one, too."""
    text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    assert text
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    named = {name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)}
    named |= {*re.findall(r"[Ss]tart\s+with `([\w/]+)`", text)}
    there = {str(path.relative_to(init.parent).with_suffix("")) for path in init.parent.rglob("*")}
    there |= {path.split("/")[-1] for path in there}
    assert {name.rstrip("/") for name in named} <= there
