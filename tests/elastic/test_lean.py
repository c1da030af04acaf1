"""What is not there yet in a job whose members come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic import runs


@pytest.mark.full
def test_lean_switches_are_refused(tmp_path: Path) -> None:
    job = runs.training(tmp_path, block={"safety": "lean", "fallback": {"path": str(tmp_path / "kept")}}, nodes="1:2")
    try:
        job.node("one")
        assert job.code("one") != 0
        assert "lean switches where members come and go" in job.logs()
    finally:
        job.clean_up()
