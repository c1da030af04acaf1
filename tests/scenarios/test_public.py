"""The table stays as it is while the package changes inside: it uses nothing but public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PUBLIC = ("ds_dynatrain", "ds_dynatrain.report", "ds_dynatrain.integrations")
"""The package itself and the modules that the reference names; of integrations all modules right in it."""
FILES = sorted(Path(__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_internal_is_imported(path: Path) -> None:
    found = [name for name in imported(path) if name.startswith("ds_dynatrain") and not is_public(name)]
    others = [name for name in imported(path) if name.startswith("tests") and not name.startswith("tests.scenarios")]
    assert not found + others


def imported(path: Path) -> list[str]:
    """Return the modules that a file imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
    return names


def is_public(module: str) -> bool:
    """Return whether a script may import this module of the package."""
    return module in PUBLIC or module.rpartition(".")[0] == "ds_dynatrain.integrations"
