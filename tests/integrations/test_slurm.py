"""The scripts of `examples/slurm` in a real Slurm: nodes are taken and given back, jobs queue themselves again.

Skipped where there is no Slurm; `tests/integrations/slurm.py` says how to get one without an installation.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.elastic.agents import ROOT, check_history
from tests.integrations.slurm import Cluster, Programs
from tools.history import sums_of_samples
from tools.nodes import SCRIPT, Job

EXAMPLES = ROOT / "examples" / "slurm"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    programs = Programs.find(request.config.option.slurm)
    if programs is None:
        pytest.skip("no Slurm on PATH, and no --slurm FOLDER")
    made = Cluster(tmp_path_factory.mktemp("slurm"), programs)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def variables(tmp_path: Path, cluster: Cluster) -> Iterator[dict[str, str]]:
    """What the examples are told by the environment. At the end nothing runs any more."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    yield {"OUT": str(tmp_path), "PROCESSES": "1", "NODES": "1:4", "DYNATRAIN_TOKEN_FILE": str(token)}
    for job in cluster.ask("squeue", "-h", "-o", "%A").split():
        cluster.ask("scancel", "--full", "--signal=KILL", job)
        cluster.ask("scancel", job)
    cluster.grace(0)
    cluster.wait(lambda: not cluster.ask("squeue", "-h"), "the end of all jobs")


@pytest.fixture
def job(tmp_path: Path, variables: dict[str, str]) -> Job:
    """What the nodes write, and the status of their coordinator."""
    token = Path(variables["DYNATRAIN_TOKEN_FILE"]).read_text()
    return Job(tmp_path, announce=tmp_path / "coordinator", variables={"DYNATRAIN_TOKEN": token})


def here(folder: Path, name: str) -> str:
    """Where a job's output goes, so that it is shown if a test fails."""
    return f"--output={folder / name}.%a.log"


STEP = """#!/bin/bash
{start} bash -c 'trap "echo TERM; sleep 1; exit 1" TERM; echo started; while true; do sleep 0.1; done'
exit $?
"""


@pytest.mark.parametrize(("start", "is_told"), [("srun", True), ("exec", False)])
def test_a_grace_time_is_for_steps(
    cluster: Cluster, variables: dict[str, str], tmp_path: Path, start: str, is_told: bool
) -> None:
    """Who ends in it is not queued again, and the batch script itself is not told: what the examples reckon with."""
    cluster.grace(5)
    script, out = tmp_path / "script", tmp_path / "out.log"
    script.write_text(STEP.format(start=start))
    job = cluster.submit(script, "--requeue", "--exclusive", "--nodes=4", f"--output={out}")
    cluster.wait(lambda: out.exists() and "started" in out.read_text(), "the step")
    urgent = cluster.urgent(1)
    if is_told:
        cluster.wait(lambda: cluster.state(job) == "FAILED", "the end of a job that was told")
        assert "TERM" in out.read_text() and cluster.field(job, "Restarts") == "0"
    cluster.wait(lambda: cluster.state(urgent) == "RUNNING", "the urgent job")
    if not is_told:
        assert cluster.state(job) == "PENDING" and cluster.field(job, "Restarts") == "1"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_elements_of_an_array_come_and_go(cluster: Cluster, job: Job, variables: dict[str, str]) -> None:
    given = {**job.variables, **variables, "SCRIPT": str(SCRIPT)}
    coordinator = cluster.submit(
        EXAMPLES / "coordinator.sbatch", "--partition=urgent", here(job.folder, "coordinator"), **given
    )
    array = cluster.submit(EXAMPLES / "elements.sbatch", "--array=0-2", here(job.folder, "element"), **given)
    before = job.settled(3)
    for grace in (0, 60):  # Slurm queues it again; it has to do so itself
        cluster.grace(grace)
        urgent = cluster.urgent(1)
        fewer = job.settled(2, after=before.generation)
        cluster.wait(lambda: cluster.state(urgent) == "RUNNING", "the urgent job")  # noqa: B023
        taken = cluster.wait(lambda: cluster.pending(array), "the node that was taken, in the queue")
        assert len(taken) == 1
        cluster.ask("scancel", urgent)
        cluster.start_now(taken[0])
        before = job.settled(3, after=fewer.generation)
    assert {row["change"] for row in job.rows("formed")} == {"planned"}, "nobody was lost"
    cluster.ask("scancel", f"{array}_1")
    job.settled(2, after=before.generation)
    job.end()
    cluster.wait(lambda: not cluster.ask("squeue", "-h"), "the end")
    assert [cluster.state(f"{array}_{number}") for number in range(3)] == ["COMPLETED", "CANCELLED", "COMPLETED"]
    assert cluster.state(coordinator) == "COMPLETED" and not (job.folder / "coordinator").exists()
    check_history(job)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_coordinator_that_is_started_elsewhere(cluster: Cluster, job: Job, variables: dict[str, str]) -> None:
    given = {**job.variables, **variables, "SCRIPT": str(SCRIPT)}
    first = cluster.submit(EXAMPLES / "coordinator.sbatch", "--nodelist=n1", here(job.folder, "first"), **given)
    array = cluster.submit(EXAMPLES / "elements.sbatch", "--array=0-1", here(job.folder, "element"), **given)
    before = job.settled(2)
    second = cluster.submit(EXAMPLES / "coordinator.sbatch", "--nodelist=n1", here(job.folder, "second"), **given)
    cluster.wait(lambda: cluster.state(first) == "FAILED", "the end of the first")
    cluster.ask("scancel", f"{array}_1")
    after = job.settled(1, after=before.generation)
    assert after.members[0].pid in {one.pid for one in before.members}
    job.end()
    cluster.wait(lambda: cluster.state(second) == "COMPLETED", "the end")
    check_history(job)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_fixed_job_goes_on_where_it_was(cluster: Cluster, job: Job, variables: dict[str, str]) -> None:
    """On two nodes until one of them is wanted elsewhere, then on the one that is left, from the newest snapshot."""
    given = {**job.variables, **variables, "SCRIPT": str(SCRIPT)}
    cluster.grace(60)
    fixed = cluster.submit(EXAMPLES / "fixed.sbatch", "--nodes=1-2", here(job.folder, "fixed"), **given)
    cluster.wait(lambda: len(job.rows("step")) > 20, "twenty steps")
    urgent = cluster.urgent(3)
    cluster.wait(lambda: cluster.state(fixed) == "PENDING", "the job in the queue again")
    cluster.wait(lambda: cluster.state(urgent) == "RUNNING", "the urgent job")
    assert {row["size"] for row in job.rows("step")} == {2} and cluster.field(fixed, "Restarts") == "1"
    made = max(row["step"] for row in job.rows("step"))
    cluster.start_now(fixed)
    cluster.wait(lambda: max(row["step"] for row in job.rows("step")) > made + 10, "ten steps more")
    job.end()
    cluster.wait(lambda: cluster.state(fixed) == "COMPLETED", "the end")
    after = [row for row in job.rows("step") if row["size"] == 1]
    assert after[0]["step"] in (made, made + 1), "the snapshot is of the last step that all have made"
    right = list(islice(sums_of_samples(), after[-1]["step"]))
    assert all(row["sum"] == right[row["step"] - 1] for row in after), "no sample is missing or used twice"
