"""Runs a script of this folder under torchrun, and reads the lines that its ranks wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
    "RES_OPTIONS": "timeout:1 attempts:1",
}
"""Environment of the ranks. The last entry avoids a look-up by a name server at each connection of torch's stores,
whose delay would be measured."""


def launch(
    script: str, processes: int, limit_seconds: float, accelerator: str = "cpu", **arguments: Any
) -> dict[int, list[dict[str, Any]]]:
    """Run `script` in `processes` ranks, as `script OUT ARGUMENTS`. Return the lines that each member wrote.

    accelerator: DeepSpeed's name of the device.
    arguments: passed to the script as JSON.

    Raises SystemExit, with the end of the output, if a rank fails or the time is up.
    """
    with tempfile.TemporaryDirectory(prefix="dynatrain-bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [str(HERE / script), folder, json.dumps(arguments)]
        status, output = _run(command, limit_seconds, accelerator)
        if status:
            raise SystemExit(f"{script} ended with {status}:\n{output[-12000:]}")
        return {int(file.stem): _lines(file) for file in sorted(Path(folder).glob("*.jsonl"))}


def _run(command: list[str], limit_seconds: float, accelerator: str) -> tuple[int, str]:
    """Run a command, and return (exit status, output). If this process ends, the command ends too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment = {**os.environ, **ENVIRONMENT, "DS_ACCELERATOR": accelerator}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=limit_seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        return 124, output
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)


class Notes:
    """The lines of one member, which `launch` returns."""

    def __init__(self, folder: str, member: int) -> None:
        self._file = Path(folder) / f"{member}.jsonl"

    def write(self, record: dict[str, Any]) -> None:
        """Write a line."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
