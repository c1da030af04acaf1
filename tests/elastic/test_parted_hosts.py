"""Three hosts, two of which hear nothing of each other and reach the coordinator: real agents, a real engine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.elastic.address import Address
from tests.elastic.agents import Job
from tests.elastic.hosts import Hosts, NoHostsError, address
from tests.elastic.runs import Static, check_history, training

pytestmark = pytest.mark.full
VARIABLES = {
    "DYNATRAIN_TOKEN": "parted-hosts-reach-the-coordinator",
    "GLOO_SOCKET_IFNAME": "eth0",
    "STEP_SECONDS": "0.2",
}
BOUND = 45.0
"""Seconds to the next step: twice the silence, two attempts, the change of world; and a busy machine."""


@dataclass
class Parted:
    """A node on each of three hosts, and the coordinator on the first."""

    job: Job
    hosts: Hosts

    def world(self, size: int) -> set[int]:
        """The processes of a world of this size, once all have made a step in it."""

        def found() -> set[int] | None:
            newest = max((row["generation"] for row in self.job.rows("step")), default=0)
            rows = [row for row in self.job.rows("step") if row["generation"] == newest and row["size"] == size]
            pids = {row["pid"] for row in rows}
            return pids if len(pids) == size else None

        return self.job.wait(found, f"steps of {size}")

    def status(self) -> str:
        """What `ds-dynatrain status` prints on the coordinator's host."""
        command = [*self.hosts.inside(1), sys.executable, "-m", "ds_dynatrain.cli", "status", str(self.job.address)]
        environment = {"PATH": "/usr/bin:/bin", **self.job.variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def finish(self, static: Static) -> None:
        """All end by themselves; the samples and losses are those of a run without a change."""
        self.job.end()
        names = ("host1", "host2", "host3", "coordinator")
        assert {name: self.job.code(name) for name in names} == dict.fromkeys(names, 0), self.job.logs()
        check_history(self.job, static, kills=1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Parted]]:
    """Makes such a job; given: see `training`."""
    try:
        hosts = Hosts(3)
    except NoHostsError as reason:
        pytest.skip(str(reason))
    jobs: list[Job] = []

    def make(**given: Any) -> Parted:
        where = Address(address(1), 29400)
        job = training(tmp_path, nodes="1:3", kind=Job, variables=VARIABLES, address=where, **given)
        jobs.append(job)
        job.coordinator("coordinator", host=hosts.inside(1))
        for number in (1, 2, 3):
            inside, name = hosts.inside(number), f"host{number}"
            job.node(name, "--max-restarts=3", host=inside, at=address(number), is_host=0)
        return Parted(job, hosts)

    yield make
    for job in jobs:
        job.clean_up()
    hosts.close()


def test_two_go_on_and_the_third_comes_back(start: Callable[..., Parted], static: Static) -> None:
    """Which of the pair is given up, the order of their ranks says."""
    parted = start(block={"buddies": {"mode": "copy"}})
    before = parted.world(3)
    parted.job.wait(lambda: parted.status().count(" yes ") == 3, "copies of all three")
    parted.hosts.part(2, 3)
    begin = time.monotonic()
    after = parted.world(2)
    assert after < before and time.monotonic() - begin < BOUND
    said = f"{address(2)} and {address(3)} do not reach each other"
    assert said in parted.status().splitlines()
    time.sleep(30)
    assert parted.world(2) == after, "who was given up is there again, and waits"
    parted.hosts.join(2, 3)
    assert after < parted.world(3)
    assert said not in parted.status().splitlines()
    parted.finish(static)


def test_state_that_nobody_keeps_is_waited_for(start: Callable[..., Parted], static: Static) -> None:
    """Without buddies: to go on with two would end the job, and the network comes back."""
    parted = start()
    before = parted.world(3)
    parted.hosts.part(2, 3)
    time.sleep(BOUND)
    assert f"{address(2)} and {address(3)} do not reach each other" in parted.status()
    made = len(parted.job.rows("step"))
    parted.hosts.join(2, 3)
    parted.job.wait(lambda: len(parted.job.rows("step")) > made + 9, "steps")
    assert parted.world(3) == before, "nobody was given up"
    parted.finish(static)
