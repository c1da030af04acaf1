"""Processes of mpirun are members of an elastic job like any others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.agents import ROOT, SECONDS, Job

pytest.importorskip("mpi4py")
MPIRUN = Path(sys.executable).with_name("mpirun")
pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: install the mpich wheel")
SCRIPT = Path(__file__).with_name("mpi_summing.py")


class MpiJob(Job):
    """Nodes that mpirun starts."""

    def mpirun(self, name: str, processes: int, **arguments: object) -> None:
        """Start processes on this host."""
        command = [str(MPIRUN), "-disable-auto-cleanup", "-n", str(processes), sys.executable, str(SCRIPT)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, json.dumps(arguments)],
                env={**os.environ, **self.variables},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MpiJob]:
    made = MpiJob(tmp_path, nodes="1:3")
    yield made
    made.clean_up()


@pytest.mark.full
def test_process_0_hosts_the_coordinator(job: MpiJob) -> None:
    job.mpirun("a", 2)
    job.wait(lambda: job.steps(1) > 4, "a world of two")
    assert {row["size"] for row in job.rows("step")} == {2}
    job.end()
    assert job.code("a") == 0, job.logs()


@pytest.mark.full
def test_a_second_mpirun_joins(job: MpiJob) -> None:
    job.coordinator("coordinator")
    job.wait(job.status, "the coordinator")
    job.mpirun("a", 2, endpoint=str(job.address))
    first = job.settled(2)
    assert {one.member.rpartition("/")[2] for one in first.members} == {"0", "1"}
    assert len({one.member.rpartition("/")[0] for one in first.members}) == 1, "both are on one node"
    job.mpirun("b", 1, endpoint=str(job.address))
    second = job.settled(3, after=first.generation)
    before = {one.pid for one in first.members}
    assert before < {one.pid for one in second.members}, "the first two are who they were"
    job.kill("b")
    job.settled(2, after=second.generation)
    job.end()
    assert job.code("a") == 0, job.logs()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"endpoint": "nowhere:x"}, "'nowhere:x' is no address"),
        pytest.param({"min_nodes": 3, "max_nodes": 2}, "nodes=3:2", marks=pytest.mark.full),
    ],
)
def test_errors_reach_all(job: MpiJob, arguments: dict[str, object], words: str) -> None:
    job.mpirun("a", 2, **arguments)
    assert job.processes["a"].wait(SECONDS) != 0
    assert (job.folder / "a.log").read_text().count(words) >= 2
