"""Stock torchrun agents for tests: nodes that are started, told to end, killed and waited for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.messages import Status
from ds_dynatrain.elastic.query import ask_status

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("summing.py")
SECONDS = 40.0
"""How long anything may take on a busy machine."""
TIMES = {"debounce_seconds": 0.05, "beat_seconds": 0.2, "silent_seconds": 2.0, "recovery_seconds": 1.0}


def metadata(folder: Path) -> Path:
    """What an installation would write about the package, its entry points among it, in a folder for PYTHONPATH."""
    code = "import setuptools; setuptools.setup()"
    command = [sys.executable, "-c", code, "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@dataclass
class Job:
    """Nodes with one coordinator; everything lies in `folder`."""

    folder: Path
    nodes: str = "1:4"
    workers: int = 1
    backend: str = "dynatrain"
    variables: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = Address("127.0.0.1", probe.getsockname()[1])
        (self.folder / "metadata").mkdir()
        path = [str(ROOT), str(metadata(self.folder / "metadata"))]
        self.variables |= {"PYTHONPATH": os.pathsep.join(path), "OUT": str(self.folder), "OMP_NUM_THREADS": "1"}

    def node(self, name: str, *options: str, **settings: object) -> None:
        """Start an agent."""
        conf = ",".join(f"{key}={value}" for key, value in {**TIMES, **settings}.items())
        command = ["torch.distributed.run", f"--nnodes={self.nodes}", f"--nproc-per-node={self.workers}"]
        command += [f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={self.address}", "--rdzv-id=job"]
        command += [f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", *options, str(SCRIPT)]
        self._start(name, command)

    def coordinator(self, name: str) -> None:
        """Start a coordinator of its own."""
        times = [f"--{key.replace('_', '-')}={TIMES[key]}" for key in ("silent_seconds", "recovery_seconds")]
        command = ["ds_dynatrain.cli", "coordinator", str(self.address), f"--nnodes={self.nodes}", *times]
        self._start(name, command)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**os.environ, **self.variables},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to an agent or a coordinator."""
        self.processes[name].send_signal(number)

    def code(self, name: str) -> int:
        """Its exit code, once it has ended."""
        return self.processes[name].wait(SECONDS)

    def status(self) -> Status | None:
        """The coordinator's, if there is one."""
        try:
            return ask_status(self.address, seconds=2.0)
        except OSError:
            return None

    def settled(self, size: int, after: int = 0) -> Status:
        """The status once a world of this size, of a generation later than `after`, trains."""

        def trains() -> Status | None:
            status = self.status()
            if status is None or status.generation <= after or len(status.ranks) != size:
                return None
            working = [one for one in status.members if one.rank is not None]
            is_in = all(one.entered == status.generation for one in working) and len(working) == size
            return status if is_in and self.steps(status.generation) >= size else None

        return self.wait(trains, f"a world of {size} after generation {after}")

    def wait(self, holds: Callable[[], Any], what: str) -> Any:
        """What it returns, as soon as that is true."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.05)
        raise AssertionError(f"{what} did not come within {SECONDS:g} s\n{self.logs()}")

    def rows(self, event: str = "") -> list[dict[str, Any]]:
        """All that the scripts wrote, or all of one kind."""
        lines = [line for file in self.folder.glob("*.jsonl") for line in file.read_text().splitlines(keepends=True)]
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if not event or row["event"] == event]

    def steps(self, generation: int) -> int:
        """Number of steps that were made in a generation, over all members."""
        return sum(row["generation"] == generation for row in self.rows("step"))

    def end(self) -> None:
        """Let the scripts end."""
        (self.folder / "stop").touch()

    def clean_up(self) -> None:
        """End whatever is left; workers end with their agents."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def logs(self) -> str:
        """The end of everything that was printed, and of what the scripts wrote."""
        parts = [f"---- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log"))]
        events = [str(row) for row in self.rows() if row["event"] != "step"]
        return "\n".join([*parts, *events])
