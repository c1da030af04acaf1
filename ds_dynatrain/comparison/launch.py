"""Starting ranks under torchrun, and the converter; whatever ends this process ends them too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_dynatrain.comparison.job import Task
from ds_dynatrain.comparison.notes import Read
from ds_dynatrain.errors import DynatrainError

ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
}
"""Unless the user's has them: several ranks share the cores, and only CPU members can switch."""
END_SECONDS = 10.0


class LaunchError(DynatrainError):
    """A launch ended with an error, or not in time. The message is the first rank's own, if it had one."""


@dataclass(frozen=True)
class Launched:
    """A launch that is over: when it was started (the machine's clock) and what its ranks noted, by member."""

    at: float
    notes: Mapping[int, Read]


def launch(task: Task, processes: int, notes: Path, limit_seconds: float) -> Launched:
    """Run a task in `processes` ranks, notes into a new folder. LaunchError with the reason if that fails."""
    notes.mkdir(parents=True)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "ds_dynatrain.comparison.worker", str(notes), task.to_json()]
    return _run(command, notes, limit_seconds, f"{task.program}, {task.part}, {processes} ranks")


def convert(folder: Path, notes: Path, limit_seconds: float) -> tuple[float, Launched]:
    """Convert DeepSpeed's checkpoint; (seconds, notes)."""
    notes.mkdir(parents=True)
    done = _run(
        ["-m", "ds_dynatrain.comparison.converter", str(folder), str(notes)], notes, limit_seconds, "the converter"
    )
    return time.monotonic() - done.at, done


def _run(arguments: Sequence[str], notes: Path, limit_seconds: float, what: str) -> Launched:
    begin, output = time.monotonic(), notes / "output"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**ENVIRONMENT, **os.environ},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{what}: not done after {limit_seconds:.0f} s; give a larger --limit-seconds") from None
        finally:
            _end(process)
    read = Read.all_of(notes)
    if status:
        raise LaunchError(
            _reason(read, output)
            or f"{what}: exit status {status} without a word; look for the kernel's killer in dmesg"
        )
    return Launched(begin, read)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launch and all that it started, if there is any left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _reason(read: Mapping[int, Read], output: Path) -> str:
    """Why a launch failed: what a rank noted, else its last line."""
    errors = [record["text"] for rank in read.values() for record in rank.every("error")]
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return str(errors[0]) if errors else lines[-1] if lines else ""
