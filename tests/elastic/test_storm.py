"""`tools/storm.py` says so if state was lost because no coordinator was there in time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ds_dynatrain.elastic.member import Ending, end_process
from tools.nodes import Job

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from storm import Storm


def test_a_worker_without_a_coordinator_ends_the_storm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    end_process(Ending.ORPHANED, "n1-1/0: no coordinator for 30 s")
    (tmp_path / "n1.log").write_text(caplog.text)
    storm = Storm(Job(tmp_path), seed=0, rest_seconds=1.0)
    storm.agents.append("n1")
    with pytest.raises(RuntimeError, match=r"n1-1/0: no coordinator for 30 s; .* less busy"):
        storm.settle()
