"""Names of tensors and kinds are no paths, whatever a stranger has called them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ds_dynatrain.checkpoint.manifest import ManifestRow
from tests.checkpoint.strangers import FORMATS, checkpoint, rewritten, with_rows
from tests.checkpoint.test_damage import whole

TENSORS = ("../../pwned", "{tmp}/pwned", "a/../../../pwned", "a/./b", "..", "", "a\\..\\b", "a\nb", "a//b")
KINDS = ("../../../victim", "{tmp}/in/victim", "..", "a/b", "\0")


def renamed(path: Path, tensor: str = "a", kind: str = "exp_avg") -> Path:
    """Tensor `a` by another name; its `exp_avg` as another kind."""

    def other(row: ManifestRow) -> ManifestRow:
        if row.tensor != "a":
            return row
        return replace(row, tensor=tensor, kind=kind if row.kind == "exp_avg" else row.kind)

    def say(said: Any) -> None:
        said["tensors"][0][0] = tensor
        said["kinds"] = list(dict.fromkeys([*said["kinds"], kind]))

    with_rows(path, other)
    rewritten(path, say)
    return path


def check_refused(folder: Path, path: Path, to: str, word: str) -> None:
    """Nothing is written, neither there nor elsewhere in the folder."""
    (folder / "in" / "deep").mkdir(parents=True)
    (folder / "in" / "victim.pt").write_bytes(b"mine")
    before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    code, text = checkpoint("convert", path, folder / "in" / "deep" / "out", "--to", to)
    assert code == 2 and word in text, text
    assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before
    assert list((folder / "in" / "deep").iterdir()) == []


@pytest.mark.parametrize("to", FORMATS)
def test_a_path_is_no_name(tmp_path: Path, to: str) -> None:
    ours = whole(tmp_path / "ours")
    for number, name in enumerate(TENSORS + KINDS):
        folder = tmp_path / str(number)
        name = name.format(tmp=folder)
        path = shutil.copytree(ours, folder / "ours")
        if number < len(TENSORS):
            check_refused(folder, renamed(path, tensor=name), to, "which is a path and no name")
        else:
            check_refused(folder, renamed(path, kind=name), to, "a state kind is named")


NO_FILES = [
    *((name, "exp_avg") for name in ("a/b", ".a", "optimizer_state.pt", "x" * 300)),
    *(("a", kind) for kind in ("fp32", "step")),
]


def test_names_that_files_of_deepspeeds_format_cannot_have(tmp_path: Path) -> None:
    """Where they are keys they are what they are."""
    ours = whole(tmp_path / "ours")
    for number, names in enumerate(NO_FILES):
        folder = tmp_path / str(number)
        path = renamed(shutil.copytree(ours, folder / "ours"), *names)
        check_refused(folder, path, "deepspeed-universal", "would be the name of a file")
        assert checkpoint("convert", path, folder / "x.safetensors")[0] == 0


def test_a_name_from_another_tool(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"../../pwned": torch.ones(3)}, tmp_path / "in" / "x.safetensors")
    code, text = checkpoint("convert", tmp_path / "in" / "x.safetensors", tmp_path / "in" / "ours", "--to", "universal")
    assert code == 2 and "'../../pwned', which is a path" in text
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == ["x.safetensors"]
