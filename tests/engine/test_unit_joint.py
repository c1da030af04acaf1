"""Joint checkpoints of several engines: which tags all of them have, and what is removed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.fallback import joint_tags as joint
from ds_dynatrain.membership.control import Control


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Those of two engines; what has a record counts as whole."""
    monkeypatch.setattr(joint, "is_there", lambda path: (path / RECORD).is_file())
    found = [tmp_path / "actor", tmp_path / "critic"]
    for path in found:
        path.mkdir()
    return found


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"step{step}").mkdir()
        (folder / f"step{step}" / RECORD).touch()
        os.utime(folder / f"step{step}" / RECORD, ns=(step, step))


def saved(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_it_is_whole_where_all_have_it(folders: list[Path]) -> None:
    save(folders[0], 10, 20, 30)
    save(folders[1], 10, 30)
    assert joint.joint_tags(folders) == ["step30", "step10"]


def test_what_one_engine_could_not_save_pushes_no_whole_one_out(folders: list[Path]) -> None:
    save(folders[0], 5, 10, 20, 30, 40)
    save(folders[1], 5, 10, 40)
    joint.forget_old(folders, 2)
    assert saved(folders[0]) == {"step10", "step20", "step30", "step40"} and saved(folders[1]) == {"step10", "step40"}
    joint.forget_old(folders, 3)
    assert len(saved(folders[0])) == 4, "fewer whole ones than are to be kept"
    joint.forget_old(folders, 1)
    assert saved(folders[0]) == saved(folders[1]) == {"step40"}


def test_a_tag_is_free_in_all(folders: list[Path]) -> None:
    save(folders[0], 10)
    (folders[1] / "step10-2").mkdir()
    tag = joint.free_in_all(folders, "step10")
    assert not any((path / tag).exists() for path in folders)
    assert joint.free_in_all(folders, "step20") == "step20"


def test_a_folder_that_cannot_be_written_is_an_error_on_all_members(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, tag: str) -> None:
        raise OSError(f"{tag} is on a read-only disk")

    for path in folders:
        save(path, 10, 20)
    monkeypatch.setattr(joint.folder, "remove", refuse)
    board = Control(HashStore(), "board", 0, 5.0)
    with pytest.raises(CheckpointError, match="member 0: step10 is on a read-only disk"):
        joint.next_tag(engine_of(board), folders, 1, "fallback/1.0/30")
    other = Control(board._base, "board", 1, 5.0)
    with pytest.raises(CheckpointError, match="member 0: step10 is on a read-only disk"):
        joint.next_tag(engine_of(other), folders, 1, "fallback/1.0/30")


def engine_of(board: Any) -> Any:
    """An engine whose rank 0 is member 0, as far as it is asked."""
    return SimpleNamespace(control=board, members=(0, 1), global_steps=30)
