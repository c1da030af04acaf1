"""A launch on this machine: nodes, each a torchrun, their coordinator, and what their scripts have written."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.scenarios import warm

SECONDS = 60.0
"""How long anything may take on a busy machine."""
TIMES = {"debounce-seconds": 0.05, "beat-seconds": 0.2, "silent-seconds": 5.0, "recovery-seconds": 1.0}
COORDINATOR_TIMES = ("silent-seconds", "recovery-seconds")
SCRIPT = Path(__file__).with_name("elastic_worker.py")
"""Beside other scripts that nodes run."""

Row = dict[str, Any]
Found = TypeVar("Found")


class Launch:
    """Processes that are started by name; each prints into a file of that name in `folder`."""

    def __init__(self, folder: Path, nodes: str) -> None:
        folder.mkdir()
        self.folder, self.nodes = folder, nodes
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.processes: dict[str, BaseProcess] = {}
        self._read: dict[Path, int] = {}
        self._rows: list[Row] = []

    # ---- what is started -----------------------------------------------------------------------------------------

    def coordinator(self, name: str = "coordinator") -> None:
        """Start a coordinator of its own, so that no node is special."""
        times = [f"--{name}={TIMES[name]}" for name in COORDINATOR_TIMES]
        self._start(name, ["ds-dynatrain", "coordinator", self.address, f"--nnodes={self.nodes}", *times], {})

    def node(self, name: str, settings: Mapping[str, Any], conf: str, options: Sequence[str], **env: str) -> None:
        """Start a torchrun of the elastic launch, with further settings of the rendezvous, options and variables."""
        times = ",".join(f"{key.replace('-', '_')}={value}" for key, value in TIMES.items())
        where = ["--rdzv-backend=dynatrain", f"--rdzv-endpoint={self.address}", "--rdzv-id=job"]
        where += [f"--nnodes={self.nodes}", f"--rdzv-conf={times},{conf}", "--local-addr=127.0.0.1", *options]
        self._torchrun(name, settings, where, env)

    def fixed(self, name: str, settings: Mapping[str, Any]) -> None:
        """Start a torchrun whose number of processes never changes."""
        self._torchrun(name, settings, ["--standalone"], {})

    def _torchrun(self, name: str, settings: Mapping[str, Any], options: list[str], env: Mapping[str, str]) -> None:
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(settings))
        script = [str(SCRIPT.with_name(settings["script"])), str(file), str(self.folder)]
        self._start(name, ["torchrun", *options, f"--nproc-per-node={settings['workers']}", *script], env)

    def _start(self, name: str, command: list[str], env: Mapping[str, str]) -> None:
        log = self.folder / f"{name}.log"
        log.touch()
        self.processes[name] = warm.start(command, env, log)

    # ---- what is done to it --------------------------------------------------------------------------------------

    def terminate(self, *names: str) -> None:
        """Send SIGTERM to agents, as a scheduler does that takes their nodes away."""
        for name in names:
            self.processes[name].terminate()

    def kill(self, *names: str) -> None:
        """End agents or coordinators by SIGKILL, and all that they have started, as when their machines are gone."""
        doomed = [pid for name in names for pid in (self.processes[name].pid, *self.workers_of(name)) if pid]
        for pid in doomed:
            send(pid, signal.SIGKILL)

    def hit(self, name: str, number: int) -> None:
        """Send a signal to the only worker of a node."""
        (pid,) = self.workers_of(name)
        send(pid, number)

    def command(self, *words: str, **env: str) -> tuple[int, str]:
        """Run `ds-dynatrain`; return its exit code and all that it has printed."""
        log = self.folder / "command.log"
        log.unlink(missing_ok=True)
        process = warm.start(["ds-dynatrain", *words], {"COLUMNS": "200", **env}, log)
        process.join(SECONDS)
        code = process.exitcode
        if code is None:
            process.kill()
            raise TimeoutError(f"ds-dynatrain {' '.join(words)}: no end within {SECONDS:g} s\n{log.read_text()}")
        return code, log.read_text()

    def stop_at(self, step: int) -> None:
        """Let all scripts end after this step."""
        (self.folder / "stopping").write_text(str(step))
        (self.folder / "stopping").rename(self.folder / "stop")

    def clean_up(self) -> None:
        """End whatever is left."""
        for name, process in self.processes.items():
            self.kill(name)
            process.join()

    # ---- what has become of it -----------------------------------------------------------------------------------

    def workers_of(self, name: str) -> list[int]:
        """Return the processes that an agent has started and that are still there."""
        pid = self.processes[name].pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(child) for child in children.read_text().split()] if children.exists() else []

    def code(self, name: str) -> int:
        """Return the exit code of an agent or a coordinator once it has ended."""
        self.wait(lambda: self.processes[name].exitcode is not None, f"the end of {name}")
        code = self.processes[name].exitcode
        assert code is not None
        return code

    def said(self, name: str) -> str:
        """Return all that it and its workers have printed, or all that anything has ("any")."""
        pattern = "*.log" if name == "any" else f"{name}.log"
        return "\n".join(file.read_text() for file in self.folder.glob(pattern))

    def rows(self, event: str = "") -> list[Row]:
        """Return the lines that scripts have written so far, or those of one kind; nothing is read twice."""
        for file in self.folder.glob("*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                new = lines.read()
            new = new[: new.rfind(b"\n") + 1]  # a line may be half there
            self._read[file] = self._read.get(file, 0) + len(new)
            self._rows += map(json.loads, new.splitlines())
        return [row for row in self._rows if not event or row["event"] == event]

    def wait(self, holds: Callable[[], Found], what: str) -> Found:
        """Return what it returns once that is true; raise TimeoutError with all that was printed if it never is."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{what} did not come within {SECONDS:g} s\n{self.logs()}")

    def logs(self) -> str:
        """Return the end of everything that was printed, and of what the scripts wrote."""
        parts = [f"---- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log"))]
        return "\n".join([*parts, *(str(row) for row in self.rows()[-20:])])


def send(pid: int, number: int) -> None:
    """Send a signal, unless the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
