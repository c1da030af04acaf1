"""The versions of torch that are supported, and that no private name of torch's is used without being listed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from ds_dynatrain.adapters.versions import torch_versions
from ds_dynatrain.adapters.versions.torch_versions import NAMES, OLDEST, TESTED, check_torch, register_in_world

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "ds_dynatrain" / "adapters").glob("*.py"))
LISTED = {f"{module}.{name}" for module, row in NAMES.items() for name in row.split()}
MODULES = {"td": "torch.distributed", "c10d": "torch.distributed.distributed_c10d"}


@pytest.mark.parametrize("version", [*TESTED, "2.11.0+cu130", "2.13.0+cpu", "2.16.0.dev1", "3.0"])
def test_the_oldest_and_all_newer_ones_are_let_in(version: str) -> None:
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1"])
def test_older_ones_are_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError) as found:
        check_torch(version)
    assert all(part in str(found.value) for part in (version, OLDEST, *TESTED))


def test_a_missing_name_is_said_with_both_versions() -> None:
    with pytest.raises(ImportError) as found:
        check_torch(names={"torch.distributed": "ProcessGroup.gone all_reduce", "torch.gone": "it"})
    said = str(found.value)
    assert "torch.distributed.ProcessGroup.gone, torch.gone.it" in said and "all_reduce" not in said
    assert torch.__version__ in said and all(version in said for version in TESTED)


def test_what_makes_a_group_known_has_one_of_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    newer, older = torch_versions.REGISTERING
    for name in torch_versions.REGISTERING:
        monkeypatch.delattr(torch_versions.c10d, name, raising=False)
    with pytest.raises(ImportError, match=newer):
        check_torch()
    monkeypatch.setattr(torch_versions.c10d, older, print, raising=False)
    check_torch()
    assert register_in_world() is print


def test_the_project_names_the_same_versions() -> None:
    assert f'"torch>={OLDEST}",' in (ROOT / "pyproject.toml").read_text()
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] in TESTED
    assert f",{TESTED[0]},$(VERSION)" in (ROOT / "Makefile").read_text()
    row = next(
        line for line in (ROOT / "docs" / "versions.md").read_text().splitlines() if line.startswith("| torch |")
    )
    assert all(version in row for version in (*TESTED, f"{OLDEST} and newer"))


def private(file: Path) -> set[str]:
    """Private names of torch's in a file that are imported, or read off a module or off `ProcessGroup`."""
    tree = ast.parse(file.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in MODULES or root == "torch":
                found.add(f"{MODULES.get(root, root)}.{rest}")
    return {name for name in found if re.search(r"\._[a-z]", name, re.IGNORECASE) and "(" not in name}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_private_name_is_listed(file: Path) -> None:
    modules = {name for module in NAMES for name in (module, module.rpartition(".")[0])}
    missing = {
        name
        for name in private(file) - modules
        if not any(
            listed == name or listed.startswith(f"{name}.") or name.startswith(f"{listed}.") for listed in LISTED
        )
    }
    assert not missing, f"{file.name} relies on these: list them in adapters/versions/torch_versions.py"
