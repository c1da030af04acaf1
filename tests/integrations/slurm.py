"""A Slurm of a few nodes on one machine, of this user's own: nothing of the system is touched.

Programs are those on PATH, or of packages that were unpacked and not installed (`pytest --slurm FOLDER`):

    apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15
    for each in *.deb; do dpkg -x $each FOLDER; done
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tools.nodes import SECONDS, free_port

PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "sbatch", "scontrol", "scancel", "sinfo", "squeue", "srun")
NODES = ("n1", "n2", "n3", "n4")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes={nodes} Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes={nodes} State=UP PriorityTier=10 PreemptMode=OFF
"""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Programs:
    """Where Slurm's programs are, and what they need in the environment to run there."""

    paths: dict[str, Path]
    plugins: Path | None = None
    """Of packages that are not installed."""

    @classmethod
    def find(cls, unpacked: Path | None) -> Programs | None:
        """Those in a folder of unpacked packages, or on PATH; None if one is missing."""
        if unpacked is None:
            found = {name: shutil.which(name) for name in PROGRAMS if name != "slurmstepd"}
            paths = {name: Path(path) for name, path in found.items() if path is not None}
            return cls(paths) if len(paths) == len(found) else None
        paths = {}
        for name in PROGRAMS:
            here = [path for end in ("", "-wlm") for path in unpacked.glob(f"usr/*bin/{name}{end}") if path.exists()]
            if not here:
                return None
            paths[name] = here[0].absolute()
        return cls(paths, next(unpacked.absolute().glob("usr/lib/*/slurm-wlm")))

    @property
    def variables(self) -> dict[str, str]:
        """Where libraries lie."""
        if self.plugins is None:
            return {}
        return {"LD_LIBRARY_PATH": os.pathsep.join(map(str, (self.plugins, self.plugins.parent)))}


@dataclass
class Cluster:
    """A controller and a daemon for each node, with all their files in a folder; ends with `stop`."""

    folder: Path
    programs: Programs
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            port=free_port(),
            user=getpass.getuser(),
            folder=self.folder,
            nodes=",".join(NODES),
        )
        for node in NODES:
            text += (
                f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2\n"
            )
        if self.programs.plugins is not None:
            text += f"PluginDir={self.programs.plugins}\n"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        commands = self.folder / "bin"
        commands.mkdir()
        for name, path in self.programs.paths.items():
            (commands / name).symlink_to(path)
        self.variables = {
            **os.environ,
            **self.programs.variables,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join((str(commands), os.environ["PATH"])),
        }

    def start(self) -> None:
        """Until all nodes are there."""
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        step = [] if self.programs.plugins is None else ["-d", str(self.programs.paths["slurmstepd"])]
        for node in NODES:
            (self.folder / f"spool.{node}").mkdir()
            self._daemon(node, "slurmd", "-D", "-N", node, *step)
        self.wait(lambda: self.ask("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D") == str(len(NODES)), "nodes")

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(self.programs.paths[program]), *arguments]
            self.daemons.append(subprocess.Popen(command, env=self.variables, stdout=log, stderr=log))

    def stop(self) -> None:
        """End all jobs, and the daemons."""
        self.ask("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
        self.ask("scancel", "--user", getpass.getuser())
        time.sleep(0.5)
        for daemon in self.daemons:
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            daemon.wait(SECONDS)

    def ask(self, program: str, *arguments: str, **variables: str) -> str:
        """What a command prints; empty if it fails."""
        command = [str(self.programs.paths[program]), *arguments]
        run = subprocess.run(
            command, env={**self.variables, **variables}, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return run.stdout.strip()

    def submit(self, script: Path, *options: str, **variables: str) -> str:
        """The number of a job that has been queued. The script asks for no GPUs, as there are none here."""
        lines = [line for line in script.read_text().splitlines(True) if not line.startswith("#SBATCH --gpus")]
        without = self.folder / script.name
        without.write_text("".join(lines))
        job = self.ask("sbatch", "--parsable", *options, str(without), **variables)
        assert job, self.logs()
        return job

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED and the like."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """What Slurm says of a job."""
        words = self.ask("scontrol", "show", "job", job, "--oneliner").split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def pending(self, array: str) -> list[str]:
        """The elements of an array that wait."""
        return self.ask("squeue", "-h", "-t", "PENDING", "-j", array, "-o", "%A").split()

    def urgent(self, nodes: int) -> str:
        """Queue a job that may take nodes from others."""
        options = ["--partition=urgent", "--exclusive", f"--nodes={nodes}", "--output=/dev/null", "--wrap=sleep 600"]
        return self.ask("sbatch", "--parsable", *options)

    def grace(self, seconds: int) -> None:
        """How long jobs that are taken have before Slurm ends them; 0: SIGKILL follows SIGTERM after KillWait, 30 s."""
        self.ask("scontrol", "update", "PartitionName=main", f"GraceTime={seconds}")

    def start_now(self, job: str) -> None:
        """Let a job that was queued again start: Slurm keeps it for two minutes after its end."""

        def runs() -> bool:
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
            return self.state(job) == "RUNNING"

        self.wait(runs, f"the start of {job}")

    def wait(self, holds: Callable[[], Found | None], what: str, seconds: float = SECONDS) -> Found:
        """What it returns, as soon as that is true; TimeoutError with all logs if it never is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.1)
        raise TimeoutError(f"{what} did not come within {seconds:g} s\n{self.logs()}")

    def logs(self) -> str:
        """The end of what all have printed."""
        return "\n".join(f"---- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log")))
