"""Dependencies point one way: between the packages, and between the files of a package, type-checking counted."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import ds_dynatrain

PACKAGE = Path(__file__).parents[1] / "ds_dynatrain"
MOST_IN_A_CIRCLE = 6
MOST_OF_THE_MACHINE = 15
"""Files that what members decide at a boundary may import, itself among them."""
MOST_FOR_TYPES = 10
"""Files that import something for the type checker alone."""

BELOW: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "records": {"errors"},
    "descriptors": {"errors"},
    "elasticity": {"errors"},
    "report": {"space"},
    "config_file": {"errors"},
    "config": {"config_file", "extension"},
    "space": {"records"},
    "plan": {"space"},
    "transfer": {"plan"},
    "exits": {"errors"},
    "terminal": set(),
    "extension": {"errors"},
    "support": {"space", "extension"},
    "dry_run": {"config", "exits", "plan", "support", "terminal"},
    "data": {"transfer", "support"},
    "elastic": {"descriptors", "extension", "report"},
    "monitoring": {"elastic"},
    "checkpoint": {"transfer", "version"},
    "adapters": {"data", "descriptors", "report", "version"},
    "membership": {"adapters", "config", "elastic"},
    "reshard": {"membership", "checkpoint"},
    "engine": {"reshard"},
    "balance": {"engine", "exits"},
    "clocks": {"balance"},
    "exact": {"engine", "exits"},
    "buddies": {"engine"},
    "fallback": {"engine"},
    "weights": {"engine"},
    "": {"engine"},
    "comparison": {"", "exits"},
    "simulate": {"balance", "buddies", "dry_run"},
    "cli": {"comparison", "exact", "simulate"},
    "integrations": {""},
    "run": {"elasticity", "integrations"},
}
"""Package -> those right below it: it may import these, and what is below them. "" is the package itself."""


def modules() -> dict[str, Path]:
    """Every module by its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, wherever in the file, and for whatever reason."""
    names = modules()
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted: list[str] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                wanted += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: imports are absolute"
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted += [each if each in names else str(node.module) for each in whole]
        found[name] = {each for each in wanted if each in names and each != name}
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of more than one module that all reach each other, the largest first."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {frozenset({name, *(each for each in reached[name] if name in reached[each])}) for name in graph}
    return sorted((set(each) for each in found if len(each) > 1), key=len, reverse=True)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found, todo = set[str](), list(graph[start])
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += graph[name]
    return found


def package_of(module: str) -> str:
    """The package of a module, or a module of the root itself."""
    return (module.split(".") + [""])[1]


def test_circles_of_imports_are_small() -> None:
    found = circles(imports())
    assert not found or len(found[0]) <= MOST_IN_A_CIRCLE, f"{len(found[0])} files: {sorted(found[0])}"


def test_the_engine_has_no_circle() -> None:
    found = [
        each
        for each in circles(imports())
        if any(package_of(name) in ("membership", "reshard", "engine") for name in each)
    ]
    assert not found, [sorted(each) for each in found]


def test_packages_import_what_is_below_them() -> None:
    allowed = {name: _reached(BELOW, name) | {name} for name in BELOW}
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in sorted(others)
        if package_of(other) not in allowed[package_of(name)]
    ]
    assert not wrong, wrong


def test_folders_have_no_circle() -> None:
    """A folder has one place in the layout, sub-folders included; a file at the top stands for itself."""
    folder = {name: str(path.parent if path.parent != PACKAGE else path) for name, path in modules().items()}
    graph: dict[str, set[str]] = {each: set() for each in folder.values()}
    for name, others in imports().items():
        graph[folder[name]] |= {folder[other] for other in others} - {folder[name]}
    assert not circles(graph), [sorted(each) for each in circles(graph)]


def test_few_files_import_for_types_alone() -> None:
    found = [name for name, path in modules().items() if "TYPE_CHECKING" in path.read_text(encoding="utf-8")]
    assert len(found) <= MOST_FOR_TYPES, found


def test_every_public_name_is_there() -> None:
    assert all(getattr(ds_dynatrain, name) is not None for name in ds_dynatrain.__all__)


def test_the_boundary_machine_is_pure() -> None:
    """What members decide about a generation needs neither engines nor sockets nor torch."""
    found = {
        "ds_dynatrain.membership.boundary_machine",
        *_reached(imports(), "ds_dynatrain.membership.boundary_machine"),
    }
    assert len(found) <= MOST_OF_THE_MACHINE, sorted(found)
    assert not any("import torch" in modules()[name].read_text(encoding="utf-8") for name in found)
