"""Checkpoints of several engines: which moments all of them have, and what is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.checkpoints import moments


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Those of two engines; what has a record counts as whole."""
    monkeypatch.setattr(moments, "_is_there", lambda path: (path / RECORD).is_file())
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


def test_a_moment_is_what_all_have(folders: list[Path]) -> None:
    save(folders[0], 10, 20, 30)
    save(folders[1], 10, 30)
    assert moments.moments(folders) == ["step30", "step10"]


def test_what_one_engine_could_not_save_pushes_no_whole_moment_out(folders: list[Path]) -> None:
    save(folders[0], 5, 10, 20, 30, 40)
    save(folders[1], 5, 10, 40)
    moments._forget_old(folders, 2)
    assert saved(folders[0]) == {"step10", "step20", "step30", "step40"} and saved(folders[1]) == {"step10", "step40"}
    moments._forget_old(folders, 3)
    assert len(saved(folders[0])) == 4, "fewer whole moments than are to be kept"
    moments._forget_old(folders, 1)
    assert saved(folders[0]) == saved(folders[1]) == {"step40"}


def test_a_tag_is_free_in_all(folders: list[Path]) -> None:
    save(folders[0], 10)
    (folders[1] / "step10-2").mkdir()
    tag = moments.free_in_all(folders, "step10")
    assert not any((path / tag).exists() for path in folders)
    assert moments.free_in_all(folders, "step20") == "step20"
