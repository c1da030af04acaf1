"""Three hosts, and a cable that is pulled: no connection ends, and only silence tells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.member import Ending
from tests.elastic.agents import TIMES, Job, check_history
from tests.elastic.hosts import Hosts, NoHostsError, address

pytestmark = pytest.mark.full
SILENT = TIMES["silent_seconds"]
ENOUGH = ("--max-restarts=3",)
VARIABLES = {"DYNATRAIN_TOKEN": "pulled-cables-are-silent", "GLOO_SOCKET_IFNAME": "eth0", "ORPHAN_SECONDS": "3"}


class Cabled(Job):
    """A node on each of three hosts, and the coordinator on the first."""

    def begin(self, hosts: Hosts) -> None:
        self.coordinator("coordinator", host=hosts.inside(1))
        for number in (1, 2, 3):
            name = f"host{number}"
            self.node(name, *ENOUGH, host=hosts.inside(number), at=address(number), is_host=0)

    def world(self, size: int, without: int = 0) -> set[int]:
        """The processes of a world of this size, once all have made a step in it; `without` is in none."""

        def found() -> set[int] | None:
            newest = max((row["generation"] for row in self.rows("step")), default=0)
            pids = {row["pid"] for row in self.rows("step") if row["generation"] == newest and row["size"] == size}
            return pids if len(pids) == size and without not in pids else None

        return self.wait(found, f"steps of {size} without {without}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts(3)
    except NoHostsError as reason:
        pytest.skip(str(reason))
    yield made
    made.close()


@pytest.fixture
def job(hosts: Hosts, tmp_path: Path) -> Iterator[Cabled]:
    made = Cabled(tmp_path, nodes="1:3", variables=dict(VARIABLES), address=Address(address(1), 29400))
    made.begin(hosts)
    yield made
    made.clean_up()


def cut(job: Cabled, hosts: Hosts) -> tuple[set[int], int]:
    """Pull the cable of the third host; the processes that go on, and the one that was cut off."""
    before = job.world(3)
    lost = next(pid for pid in before if pid in job.workers_of("host3"))
    begin = time.monotonic()
    hosts.pull(3)
    after = job.world(2, without=lost)
    assert after == before - {lost}, "the same processes go on"
    formed = max(row["time"] for row in job.rows("formed") if row["pid"] in after)
    assert SILENT * 0.8 < formed - begin < SILENT + 3, "the heartbeat decides"
    assert "no heartbeat" in job.rows("formed")[-1]["reason"]
    return after, lost


def finish(job: Cabled) -> None:
    job.end()
    names = ("host1", "host2", "host3", "coordinator")
    assert {name: job.code(name) for name in names} == dict.fromkeys(names, 0), job.logs()
    check_history(job)


def test_a_host_that_is_cut_off_for_a_moment_learns_that_it_was_given_up(job: Cabled, hosts: Hosts) -> None:
    """As soon as it, or its agent, hears anything again; it comes back as a newcomer, in another process."""
    after, lost = cut(job, hosts)
    time.sleep(SILENT)
    assert Path(f"/proc/{lost}").exists(), "it has heard nothing yet"
    hosts.plug(3)
    assert after < job.world(3, without=lost)
    said = (job.folder / "host3.log").read_text()
    assert f"code {Ending.GIVEN_UP}" in said or f"the others go on: its process {lost} is ended" in said, said
    finish(job)


def test_a_host_that_stays_cut_off_stops_by_itself(job: Cabled, hosts: Hosts) -> None:
    """Nobody can tell it. Its agent waits for the coordinator, and joins with a new process."""
    after, lost = cut(job, hosts)
    job.wait(lambda: not Path(f"/proc/{lost}").exists(), "the end of the process that was cut off")
    assert f"code {Ending.ORPHANED}" in (job.folder / "host3.log").read_text()
    assert job.world(2) == after
    hosts.plug(3)
    assert after < job.world(3, without=lost)
    finish(job)
