"""SIGTERM under `fallback.on_sigterm`: all save at one step and end, and the same command goes on from there."""

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
SECONDS = 120.0


def launch(folder: Path, processes: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [*command, str(ROOT / "tests/engine/scripts/told_to_end.py"), str(folder), str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
@pytest.mark.parametrize("who", ["torchrun", "one worker"])
def test_a_save_at_one_step(tmp_path: Path, who: str) -> None:
    job = launch(tmp_path, 2, 10**6)
    try:
        end, worker = time.monotonic() + SECONDS, tmp_path / "1.pid"
        while not worker.exists() and job.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if who == "torchrun":
            job.send_signal(signal.SIGTERM)
        else:
            os.kill(int(worker.read_text()), signal.SIGTERM)
        output, _ = job.communicate(timeout=SECONDS)
    finally:
        job.kill()
    assert job.returncode != 0 and "SIGTERM: all working members save" in output, output[-4000:]
    step = int((tmp_path / "kept" / "latest").read_text().removeprefix("step"))
    assert step > 0 and 'Traceback (most recent call last):\n  File "' + str(ROOT / "tests") not in output
    again = launch(tmp_path, 3, step + 2)
    output, _ = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, output[-4000:]
    assert set(map(int, re.findall(r"begin (\d+)", output))) == {step}
