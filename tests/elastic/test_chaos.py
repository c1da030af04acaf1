"""A short run of `tools/chaos.py`: random events from a seed, and everything that has to be right afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.agents import ROOT
from tests.elastic.kinds import settings


@pytest.mark.full
@pytest.mark.parametrize(("seed", "workers"), [(1, 1), (2, 2)])
def test_random_events(seed: int, workers: int) -> None:
    command = [sys.executable, "tools/chaos.py", "--events=15", "--busy=0", f"--seed={seed}", f"--workers={workers}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.full
def test_random_events_with_two_engines(tmp_path: Path) -> None:
    """DeepSpeed's loop, engines in stages 1 and 3: the steps of each are judged."""
    given = json.dumps(settings(1, fallback={"path": str(tmp_path / "fallback"), "every_steps": 5}))
    variables = [f"SETTINGS={given}", "BESIDE=3", "STEP_SECONDS=0.2", "DS_ACCELERATOR=cpu", f"PYTHONPATH={ROOT}"]
    command = [sys.executable, "tools/chaos.py", "--events=15", "--busy=0", "--script=tests/elastic/several.py"]
    command += ["--steps", "step", "beside", "--set", *variables]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.full
def test_random_events_with_late_switches(tmp_path: Path) -> None:
    """Masters and moments of every change of members follow in the step after it, if that comes."""
    given = json.dumps(settings(1, late=True, fallback={"path": str(tmp_path / "fallback"), "every_steps": 5}))
    variables = [f"SETTINGS={given}", "STEP_SECONDS=0.2", "DS_ACCELERATOR=cpu", f"PYTHONPATH={ROOT}"]
    command = [sys.executable, "tools/chaos.py", "--events=15", "--busy=0", "--script=tests/elastic/training.py"]
    done = subprocess.run([*command, "--set", *variables], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.full
def test_random_deaths_with_buddies() -> None:
    """One at a time, from which all goes on by copies: losses are those, bit for bit, of a run in which nobody dies."""
    command = [sys.executable, "tools/deaths.py", "--stages=2", "--deaths=3", "--seeds=5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
