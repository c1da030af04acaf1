"""The pages: links lead somewhere, commands and options are there, scripts are whole."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from ds_dynatrain.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / folder / "README.md" for folder in ("ds_dynatrain", "examples", "examples/elastic", "tools")),
    ]
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHELL = ("bash", "text", "")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for _, language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def anchors(page: Path) -> set[str]:
    """Of all headings, as forges make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every `ds-dynatrain` command of a page, in its blocks and in its text."""
    lines = [line for block in blocks(page, *SHELL) for line in block.replace("\\\n", " ").splitlines()]
    for line in lines + re.findall(r"`([^`\n]+)`", prose(page)):
        found = re.match(r"(?:\$ )?(?:\.venv/bin/)?ds-dynatrain((?: .*)?)$", line.strip())
        if found:
            yield shlex.split(found[1], comments=True)


def scripts(page: Path) -> dict[str, str]:
    """Complete files on a page, by the name in their first line."""
    found = (re.match(r"# (\w+\.py)\n", text) and text for text in blocks(page, "python"))
    return {text.split()[1]: text for text in found if text}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(link)
    assert not dead


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    linked = {link.partition("#")[0] for link in LINK.findall(prose(docs / "index.md"))}
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_pages_name(page: Path) -> None:
    for words in commands(page):
        command = typer.main.get_command(app)
        rest = iter(words)
        while below := getattr(command, "commands", {}):
            name = next(rest, None)
            if name is None or name.startswith("--"):
                break
            assert name in below, f"ds-dynatrain {shlex.join(words)}: no command {name!r}"
            command = below[name]
        known = {"--help", *(option for given in command.params for option in given.opts)}
        asked = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert asked <= known, f"ds-dynatrain {shlex.join(words)}: no {asked - known}"


def test_scripts_are_whole_and_have_one_name_each() -> None:
    named = [(name, text) for page in PAGES for name, text in scripts(page).items()]
    assert len({name for name, _ in named}) == len(named) > 10
    for name, text in named:
        ast.parse(text, name)
    modules = {name.removesuffix(".py") for name, _ in named}
    assert "toy" in modules
    here = {path.name for path in (ROOT / "examples").rglob("*.py")} | {"train.py"}
    for page in PAGES:
        for block in blocks(page, "bash", "text"):
            for line in block.replace("\\\n", " ").splitlines():
                if "torchrun" in line and (found := re.search(r"(\w+\.py)\b", line)):
                    assert found[1] in {name for name, _ in named} | here, line


def test_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets, page
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    listed = re.search(r"`make help` lists the other targets: ([a-z, -]+)\.", page)
    assert listed and set(listed[1].split(", ")) == targets - {"demo", "test", "help"}


def test_tests_that_pages_name_are_there() -> None:
    named = re.findall(r"`(test_\w+)::(test_\w+)`", (ROOT / "docs" / "dev" / "elastic-protocol.md").read_text())
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / "elastic" / f"{file}.py").read_text(), (file, name)
