"""A short run of `tools/chaos.py`: random events from a seed, and everything that has to be right afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.elastic.agents import ROOT


@pytest.mark.full
@pytest.mark.parametrize(("seed", "workers"), [(1, 1), (2, 2)])
def test_random_events(seed: int, workers: int) -> None:
    command = [sys.executable, "tools/chaos.py", "--events=15", "--busy=0", f"--seed={seed}", f"--workers={workers}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
