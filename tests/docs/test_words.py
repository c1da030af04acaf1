"""Words that a reader has to translate stand neither on a page nor in a message; docs/dev/style.md lists them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ds_dynatrain.cli.main import app
from tests.docs.pages import FENCE, ROOT, section, text_of

WORDS = [
    row[0]
    for row in re.findall(
        r'^\| "([^"]+)" \| (.+) \|$', section(ROOT / "docs" / "dev" / "style.md", "Words"), re.MULTILINE
    )
]
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(re.escape(word) for word in WORDS)})\b", re.IGNORECASE)
PAGES = sorted(
    page
    for page in (
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
    )
    if page.name not in ("figures.md", "feasibility.md", "style.md") and page.parent.name != "figures"
)
LOGGING = {"debug", "info", "warning", "error"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    text = " ".join(FENCE.sub("", text_of(page)).split())
    assert [text[max(found.start() - 40, 0) : found.end() + 40] for found in FORBIDDEN.finditer(text)] == []


def messages() -> Iterator[tuple[str, str]]:
    """Text in errors that are raised and in what is logged."""
    for file in sorted((ROOT / "ds_dynatrain").rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(file))):
            is_logged = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGING
            )
            if isinstance(node, ast.Raise) or is_logged:
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield f"{file.relative_to(ROOT)}:{part.lineno}", part.value


def test_messages() -> None:
    assert WORDS
    assert [f"{where} {text}" for where, text in messages() if FORBIDDEN.search(text)] == []


def test_each_command_has_an_example_that_it_understands() -> None:
    for words, command in every_command():
        (example,) = re.findall(r"Example: ds-dynatrain (.*)", command.help or "")
        rest = example.split()
        assert rest[: len(words)] == words
        known = {option for one in command.params for option in one.opts}
        assert {word for word in rest if word.startswith("--")} <= known, example


def every_command() -> Iterator[tuple[list[str], Any]]:
    """Each with its words."""
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        for below, each in [(below, each) for below, each in inner.items()] if inner else [("", command)]:
            yield [name, below] if below else [name], each


def test_help() -> None:
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for text in (command.help, *(getattr(one, "help", "") for one in command.params)):
            assert not FORBIDDEN.search(text or ""), text
