"""Help texts show an example of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from ds_dynatrain.cli.main import app


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
