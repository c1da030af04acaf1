"""A machine that stops at any point of a save: the checkpoint before it is whole, and `latest` names a whole one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.checkpoint import folder
from tests.checkpoint.test_damage import read_all, whole

EVERY = {"open": 1, "fsync": 1, "rename": 1, "mkdir": 1, "pwrite": 16}
"""Of so many calls one is a point to stop at."""


def stopping(point: int) -> None:
    """Have this process kill itself at the point-th of these calls."""
    seen = dict.fromkeys(EVERY, 0)
    passed = 0

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal passed
            seen[name] += 1
            if seen[name] % EVERY[name] == 0:
                if passed == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                passed += 1
            return call(*arguments, **named)

        return counted

    for name in EVERY:
        setattr(os, name, wrapped(name, getattr(os, name)))


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
    if where == "data":
        monkeypatch.setattr(os, "pwrite", full)
    else:
        monkeypatch.setattr(folder, "write", full)
    with pytest.raises(OSError, match="No space left"):
        whole(tmp_path, "after")
    monkeypatch.undo()
    assert folder.latest(tmp_path) == "before" and read_all(tmp_path / "before")
    whole(tmp_path, "after")
    assert folder.latest(tmp_path) == "after"


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")
