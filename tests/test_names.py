"""Names of the package: one class for a name, hardly a file name twice, and no folder too full to be looked through."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ds_dynatrain"
MOST_FILE_NAMES_TWICE = 5
"""`config`, `extension`, `rows` and `command` are in the package of each capability."""
MOST_FILES_IN_A_FOLDER = 25


def modules() -> list[Path]:
    """Return the files of the package; `integrations` is a link and counts where it lies."""
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" and "integrations" not in path.parts]


def test_a_class_name_occurs_once() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in modules())
    names = Counter(
        node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []


def test_few_file_names_occur_twice() -> None:
    names = Counter(path.name for path in modules())
    assert len([name for name, count in names.items() if count > 1]) <= MOST_FILE_NAMES_TWICE, names.most_common(8)


def test_no_folder_is_too_full() -> None:
    folders = Counter(path.parent for path in modules())
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES_IN_A_FOLDER} == {}
