"""Scripts with two engines under a real torchrun: how they end, and SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 100.0


def launch(folder: Path, steps: int, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, str(ROOT / "tests/engine/scripts/several.py"), str(folder), str(steps), how],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(job: subprocess.Popen[str]) -> str:
    try:
        return job.communicate(timeout=SECONDS)[0]
    finally:
        job.kill()


MORE = ("destroys", "takes down", "loader workers")


@pytest.mark.full  # `test_endings` has it with one engine
@pytest.mark.parametrize("how", ["ends", *MORE])
def test_a_script_that_ends(tmp_path: Path, how: str) -> None:
    job = launch(tmp_path, 6, how)
    output = ended(job)
    assert job.returncode == 0 and "Traceback" not in output, output[-6000:]
    assert output.count("end 6 6 of 2: data=2 zero_stage=3") == 2, output[-6000:]


@pytest.mark.full
def test_an_error_ends_the_job(tmp_path: Path) -> None:
    job = launch(tmp_path, 10**6, "raises")
    output = ended(job)
    assert job.returncode != 0 and "ValueError: wrong on member 1" in output, output[-6000:]


@pytest.mark.full
def test_sigterm_saves_both_at_one_step(tmp_path: Path) -> None:
    """The same command goes on from there, with both."""
    job = launch(tmp_path, 10**6, "sigterm")
    end, worker = time.monotonic() + SECONDS, tmp_path / "1.pid"
    while not worker.exists() and job.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(int(worker.read_text()), signal.SIGTERM)
    output = ended(job)
    assert job.returncode != 0 and "SIGTERM: all working members save" in output, output[-4000:]
    steps = [int((tmp_path / name / "latest").read_text().removeprefix("step")) for name in ("actor", "critic")]
    assert steps[0] > 0 and steps[0] - steps[1] in (0, 1), steps
    again = launch(tmp_path, steps[0] + 2, "ends")
    output = ended(again)
    assert again.returncode == 0, output[-4000:]
    assert set(re.findall(r"begin (\d+) (\d+)", output)) == {(str(steps[0]), str(steps[1]))}
