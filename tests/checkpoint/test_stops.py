"""A machine that stops at any point of a save: the checkpoint before it is whole, and `latest` names a whole one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.checkpoint.arrow import ArrowValues
from tests.checkpoint.test_damage import read_all, whole

POINTS: dict[str, Any] = dict.fromkeys(("open", "fsync", "rename", "mkdir"), os)
POINTS |= dict.fromkeys(("__init__", "write", "close"), ArrowValues)
"""The calls that are points to stop at, and where they are."""


def stopping(point: int) -> None:
    """Have this process kill itself at the point-th of these calls."""
    passed = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal passed
            if passed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1
            return call(*arguments, **named)

        return counted

    for name, place in POINTS.items():
        setattr(place, name, wrapped(getattr(place, name)))


def saves(path: Path, tag: str, point: int) -> bool:
    """Save in a process of its own, which stops at a point; whether it came to the end."""
    child = os.fork()
    if child == 0:
        try:
            stopping(point)
            with folder.locked(path):
                whole(path, tag)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_stop_at_any_point(tmp_path: Path) -> None:
    whole(tmp_path, "before")
    points, kept = 0, set()
    while True:
        done = saves(tmp_path, "after", points)
        named = folder.latest(tmp_path)
        kept.add(named)
        assert read_all(tmp_path / "before") and read_all(tmp_path / named)
        assert {each.path.name for each in folder.newest(tmp_path)} >= {"before", named}
        if done:
            break
        if (tmp_path / "after").exists():
            assert read_all(tmp_path / "after"), "it has its name only when it is whole"
            shutil.rmtree(tmp_path / "after")
            (tmp_path / "latest").write_text("before")
        points += 1
    assert points > 20 and kept == {"before", "after"}
    hidden = [each.name for each in tmp_path.iterdir() if each.name.startswith(".")]
    assert hidden == [".lock"], "the next save has tidied up"


@pytest.mark.parametrize("where", ["data", "manifest"])
def test_a_full_disk(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the system, and what was there before."""
    whole(tmp_path, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if where == "data":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    else:
        monkeypatch.setattr(folder, "write", full)
    try:
        with pytest.raises(OSError, match="File too large" if where == "data" else "No space left"):
            whole(tmp_path, "after")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert folder.latest(tmp_path) == "before" and read_all(tmp_path / "before")
    whole(tmp_path, "after")
    assert folder.latest(tmp_path) == "after"


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")
