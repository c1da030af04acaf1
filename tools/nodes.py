"""Stock torchrun agents on this machine: nodes that are started, told to end, killed and waited for.

Each worker runs a script that writes lines of JSON into `$OUT/PID.jsonl`, `event` among their fields, until `$OUT/stop`
is there. `tests/elastic/summing.py` is such a script, and the default.
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
"""How long anything may take on a busy machine."""
TIMES = {"debounce_seconds": 0.05, "beat_seconds": 0.2, "silent_seconds": 2.0, "recovery_seconds": 1.0}
COORDINATOR_TIMES = ("silent_seconds", "stuck_seconds", "recovery_seconds")

Row = dict[str, Any]
Found = TypeVar("Found")


def metadata(folder: Path) -> Path:
    """What an installation would write about the package, its entry points among it, in a folder for PYTHONPATH.

    Nothing where the package is installed.
    """
    folder.mkdir()
    if entry_points(group="torchrun.handlers", name="dynatrain"):
        return folder
    code = "import setuptools; setuptools.setup()"
    command = [sys.executable, "-c", code, "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


class Journal:
    """What the scripts of a job have written so far; nothing is read twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()
        self._rows: list[Row] = []
        self.steps: Counter[int] = Counter()
        """Number of steps that were made in a generation, over all members."""

    def rows(self) -> list[Row]:
        """All lines, each file's in their order."""
        for file in self._folder.glob("*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._read[file])
                new = lines.read()
            new = new[: new.rfind(b"\n") + 1]  # a line may be half there
            self._read[file] += len(new)
            for row in map(json.loads, new.splitlines()):
                self._rows.append(row)
                self.steps[row["generation"]] += row["event"] == "step"
        return self._rows


@dataclass
class Job:
    """Nodes with one coordinator; everything lies in `folder`.

    seconds: how long anything may take. address: the coordinator's; by default a free port of this machine. announce: a
    file instead, in which coordinators announce themselves, each at a port of its own.
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
        """Start an agent, by `host` if given: a command that runs one on another host, whose address is `at`."""
        settings = {**(self.times if self.backend in ("dynatrain", "c10d") and self._is_ours else {}), **conf}
        command = ["torch.distributed.run", f"--nnodes={self.nodes}", f"--nproc-per-node={self.workers}"]
        command += [f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=job"]
        command += [f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}"] if settings else []
        command += [f"--local-addr={at}", *options, str(self.script)]
        self._start(name, command, host)

    def coordinator(self, name: str, *options: str, host: Sequence[str] = ()) -> None:
        """Start a coordinator of its own."""
        times = [f"--{key.replace('_', '-')}={self.times[key]}" for key in COORDINATOR_TIMES if key in self.times]
        where = [str(self.address)] if self.announce is None else ["127.0.0.1:0", f"--announce={self.announce}"]
        command = ["ds_dynatrain.cli", "coordinator", *where, f"--nnodes={self.nodes}", *times, *options]
        self._start(name, command, host)

    @property
    def endpoint(self) -> Endpoint:
        """Where its coordinator is found."""
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
        """A new Python that runs a module."""
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
        """Its exit code, once it has ended."""
        return self.processes[name].wait(self.seconds)

    def workers_of(self, name: str) -> list[int]:
        """The processes that an agent has started, and that are still there."""
        children = Path(f"/proc/{self.processes[name].pid}/task/{self.processes[name].pid}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    def status(self) -> Status | None:
        """The coordinator's, if there is one."""
        try:
            token, _ = job_token(self.endpoint, {**os.environ, **self.variables})
            return ask_status(self.endpoint, token, seconds=2.0)
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

    def wait(self, holds: Callable[[], Found | None], what: str, seconds: float = 0.0) -> Found:
        """What it returns, as soon as that is true; TimeoutError with all that was printed if it never is.

        seconds: for how long to wait; by default the job's.
        """
        seconds = seconds or self.seconds
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{what} did not come within {seconds:g} s\n{self.logs()}")

    def rows(self, event: str = "") -> list[Row]:
        """All that the scripts wrote, or all of one kind."""
        return [row for row in self.journal.rows() if not event or row["event"] == event]

    def steps(self, generation: int) -> int:
        """Number of steps that were made in a generation, over all members."""
        self.journal.rows()
        return self.journal.steps[generation]

    def end(self, ahead: int | None = None) -> None:
        """Let the scripts end; ahead: so many steps from now, of scripts that have to do so at the same step."""
        stop = self.folder / "stop"
        if ahead is not None:
            last = max((row["step"] for row in self.rows("step")), default=0)
            (self.folder / "stopping").write_text(str(last + ahead))
            (self.folder / "stopping").rename(stop)
        stop.touch()

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
    """A job of `tests/elastic/training.py`: DeepSpeed's loop, a small model. block: of dynatrain's configuration.

    script: another one beside it.
    """
    from tests.elastic.kinds import settings

    given = {"SETTINGS": json.dumps(settings(stage, **block)), "DS_ACCELERATOR": "cpu", **variables}
    given["STEP_SECONDS"] = str(step_seconds)
    times = {**TIMES, "silent_seconds": 5.0}
    return Job(folder, nodes, variables=given, times=times, script=SCRIPT.with_name(script))


def processes(status: Status) -> list[int]:
    """The processes of the world, in the order of their ranks."""
    return [one.pid for one in status.members if one.rank is not None]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
