"""Stock torchrun agents on this machine, which can be started, told to end, killed and waited for.

Each worker runs a script that writes lines of JSON, with a field `event`, into `$OUT/PID.jsonl` until `$OUT/stop`
exists. The default script is `tests/elastic/summing.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from io import BufferedWriter
from pathlib import Path
from typing import Any, TypeVar

from ds_dynatrain.elastic.address import Address, Announced, Endpoint
from ds_dynatrain.elastic.connection import ask_status
from ds_dynatrain.elastic.environment import job_token
from ds_dynatrain.elastic.messages import Status

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "elastic" / "summing.py"
SECONDS = 90.0
"""Time limit of each wait on a busy machine."""
TIMES = {"debounce_seconds": 0.05, "beat_seconds": 0.2, "silent_seconds": 2.0, "recovery_seconds": 1.0}
COORDINATOR_TIMES = ("silent_seconds", "stuck_seconds", "recovery_seconds")

Row = dict[str, Any]
Found = TypeVar("Found")


def metadata(folder: Path) -> Path:
    """Write the metadata that an installation would have, such as entry points, into a folder for PYTHONPATH.

    Writes nothing if the package is installed.
    """
    folder.mkdir()
    if entry_points(group="torchrun.handlers", name="dynatrain"):
        return folder
    code = "import setuptools; setuptools.setup()"
    command = [sys.executable, "-c", code, "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


class Journal:
    """The lines that the scripts of a job have written so far. Each line is read only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()
        self._rows: list[Row] = []
        self.steps: Counter[int] = Counter()
        """Number of steps made in each generation, over all members."""

    def rows(self) -> list[Row]:
        """Return all lines, those of each file in order."""
        for file in self._folder.glob("*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._read[file])
                new = lines.read()
            new = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
            self._read[file] += len(new)
            for row in map(json.loads, new.splitlines()):
                self._rows.append(row)
                self.steps[row["generation"]] += row["event"] == "step"
        return self._rows


@dataclass
class Job:
    """Nodes with one coordinator. All files are in `folder`.

    seconds: the time limit of each wait.
    address: the coordinator's address; by default a free port of this machine.
    announce: a file in which coordinators announce their addresses, instead of `address`.
    """

    folder: Path
    nodes: str = "1:4"
    workers: int = 1
    backend: str = "dynatrain"
    variables: dict[str, str] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=lambda: dict(TIMES))
    script: Path = SCRIPT
    seconds: float = SECONDS
    address: Address = field(default_factory=lambda: Address("127.0.0.1", free_port()))
    announce: Path | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = [str(ROOT), str(metadata(self.folder / "metadata"))]
        ours = {"PYTHONPATH": os.pathsep.join(path), "OUT": str(self.folder), "OMP_NUM_THREADS": "1"}
        ours["RES_OPTIONS"] = "timeout:1 attempts:1"  # as in launch.py
        self.variables = {**self.variables, **ours}
        self.journal = Journal(self.folder)

    def node(self, name: str, *options: str, host: Sequence[str] = (), at: str = "127.0.0.1", **conf: object) -> None:
        """Start an agent.

        host: a command that runs the agent on another host, whose address is `at`.
        """
        settings = {**(self.times if self.backend in ("dynatrain", "c10d") and self._is_ours else {}), **conf}
        command = ["torch.distributed.run", f"--nnodes={self.nodes}", f"--nproc-per-node={self.workers}"]
        command += [f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=job"]
        command += [f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}"] if settings else []
        command += [f"--local-addr={at}", *options, str(self.script)]
        self._start(name, command, host)

    def coordinator(self, name: str, *options: str, host: Sequence[str] = ()) -> None:
        """Start a coordinator in a process of its own."""
        times = [f"--{key.replace('_', '-')}={self.times[key]}" for key in COORDINATOR_TIMES if key in self.times]
        where = [str(self.address)] if self.announce is None else ["127.0.0.1:0", f"--announce={self.announce}"]
        command = ["ds_dynatrain.cli", "coordinator", *where, f"--nnodes={self.nodes}", *times, *options]
        self._start(name, command, host)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of the job's coordinator."""
        return self.address if self.announce is None else Announced(self.announce)

    @property
    def _is_ours(self) -> bool:
        return self.backend == "dynatrain" or self.variables.get("DYNATRAIN_REPLACE_C10D") == "1"

    def _start(self, name: str, command: list[str], host: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = self._open(command, host, {**os.environ, **self.variables}, log)

    def _open(
        self, command: list[str], host: Sequence[str], env: dict[str, str], log: BufferedWriter
    ) -> subprocess.Popen[bytes]:
        """Start a Python process that runs a module."""
        return subprocess.Popen(
            [*host, sys.executable, "-m", *command],
            env=env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to an agent or a coordinator."""
        self.processes[name].send_signal(number)

    def code(self, name: str) -> int:
        """Wait until a process has ended, and return its exit code."""
        return self.processes[name].wait(self.seconds)

    def workers_of(self, name: str) -> list[int]:
        """Return the processes that an agent has started and that still run."""
        children = Path(f"/proc/{self.processes[name].pid}/task/{self.processes[name].pid}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    def status(self) -> Status | None:
        """Return the coordinator's status; None if there is no coordinator."""
        try:
            token, _ = job_token(self.endpoint, {**os.environ, **self.variables})
            return ask_status(self.endpoint, token, seconds=2.0)
        except OSError:
            return None

    def settled(self, size: int, after: int = 0) -> Status:
        """Wait until a world of this size trains, in a generation later than `after`. Return the status."""

        def trains() -> Status | None:
            status = self.status()
            if status is None or status.generation <= after or len(status.ranks) != size:
                return None
            working = [one for one in status.members if one.rank is not None]
            is_in = all(one.entered == status.generation for one in working) and len(working) == size
            return status if is_in and self.steps(status.generation) >= size else None

        return self.wait(trains, f"a world of {size} after generation {after}")

    def wait(self, holds: Callable[[], Found | None], what: str, seconds: float = 0.0) -> Found:
        """Wait until `holds` returns a true value, and return it. Raises TimeoutError with all output if it never does.

        what: a description of what is waited for.
        seconds: the time limit; by default that of the job.
        """
        seconds = seconds or self.seconds
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{what} did not come within {seconds:g} s\n{self.logs()}")

    def rows(self, event: str = "") -> list[Row]:
        """Return all lines that the scripts wrote, or all with this event."""
        return [row for row in self.journal.rows() if not event or row["event"] == event]

    def steps(self, generation: int) -> int:
        """Return the number of steps that all members made in a generation."""
        self.journal.rows()
        return self.journal.steps[generation]

    def end(self, ahead: int | None = None) -> None:
        """Let the scripts end.

        ahead: the number of steps until then, for scripts that have to end at the same step.
        """
        stop = self.folder / "stop"
        if ahead is not None:
            last = max((row["step"] for row in self.rows("step")), default=0)
            (self.folder / "stopping").write_text(str(last + ahead))
            (self.folder / "stopping").rename(stop)
        stop.touch()

    def clean_up(self) -> None:
        """End everything that is left. Workers end with their agents."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def logs(self) -> str:
        """Return the end of each process's output, and of what the scripts wrote."""
        parts = [f"---- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log"))]
        events = [str(row) for row in self.rows() if row["event"] != "step"]
        return "\n".join([*parts, *events[-60:]])


def training(
    folder: Path,
    stage: int,
    block: dict[str, Any],
    nodes: str,
    step_seconds: float,
    script: str = "training.py",
    **variables: str,
) -> Job:
    """Return a job of `tests/elastic/training.py`, which trains a small model with DeepSpeed.

    block: entries of the `dynatrain` block.
    script: another script in the same folder.
    """
    from tests.elastic.kinds import settings

    given = {"SETTINGS": json.dumps(settings(stage, **block)), "DS_ACCELERATOR": "cpu", **variables}
    given["STEP_SECONDS"] = str(step_seconds)
    times = {**TIMES, "silent_seconds": 5.0}
    return Job(folder, nodes, variables=given, times=times, script=SCRIPT.with_name(script))


def processes(status: Status) -> list[int]:
    """Return the processes of the world, in the order of their ranks."""
    return [one.pid for one in status.members if one.rank is not None]


def free_port() -> int:
    """Return a TCP port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
