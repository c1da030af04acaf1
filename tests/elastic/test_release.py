"""Members that are not needed go home, and nodes that come are used: a pipeline of layers, on nodes of one process.

All ranks of a pipeline have the loss of the whole batch, so losses are compared bit by bit with a run in which all
members stay.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Job
from tests.elastic.runs import Losses, Static, finish_together, steps_on, training
from tests.elastic.test_buddy_pipelines import UNCLIPPED

SCRIPT = Path(__file__).with_name("releasing.py")
STAGES = {str(size): {"data": 1, "pipe": size, "zero_stage": 1} for size in (1, 2, 4)}
MANY = {**UNCLIPPED, "train_micro_batch_size_per_gpu": 1}
RELEASE = {
    **{"mode": "act", "every_steps": 4, "safety": 0.0, "least_gain": 0.2, "slow_ratio": None},
    **{"members": "release", "at_most_slower": 1.0},
}
"""Fewer members are enough here whatever layers take, and noise of a busy machine does not count as other costs."""
GONE_SECONDS = 5.0
UNTIED = {"KIND": "pipeline", "PIPELINE": "uneven"}
"""Gradients of tied weights are added up in another order where one stage has both."""


class Releasing:
    """A job of nodes that come one after the other, of which all but the first are sent home in time."""

    def __init__(
        self, folder: Path, nodes: str = "1:4", balance: dict[str, Any] = RELEASE, first: str = "a", **given: str
    ) -> None:
        block = {"layout": STAGES["1"], "layouts": STAGES, "balance": balance}
        variables = {**UNTIED, "STEP_SECONDS": "0.02", **given}
        self.job: Job = training(folder, 1, block, MANY, script=SCRIPT, nodes=nodes, variables=variables)
        self.job.coordinator("coordinator")
        try:
            self.start(*first)  # if "a" comes alone, it has rank 0 and stays
            self.used("a")
        except BaseException:
            self.job.clean_up()
            raise

    def start(self, *names: str) -> None:
        for name in names:
            self.job.node(name, is_host=0)

    def used(self, name: str) -> int:
        """Wait until the node's worker has made a step, and return the worker's process."""
        (pid,) = self.job.wait(lambda: self.job.workers_of(name), f"the worker of {name}")
        self.job.wait(lambda: any(row["pid"] == pid for row in self.job.rows("step")), f"a step of {name}")
        return pid

    def goes(self, name: str) -> None:
        """Wait until the node has gone home with code 0, soon after it was told to and with nothing left of it."""
        agent = self.job.processes[name].pid
        pids, files = family(agent), set[str]()
        told = f"{self.job.folder.joinpath(f'{name}.log')}"
        while "its node was told to leave" not in Path(told).read_text():
            pids |= family(agent)
            files |= {file for pid in pids for file in scratch(pid, self.job.folder)}
            assert self.job.processes[name].poll() is None, self.job.logs()
            time.sleep(0.1)
        begin = time.monotonic()
        assert self.job.code(name) == 0, self.job.logs()
        assert time.monotonic() - begin <= GONE_SECONDS
        assert not [pid for pid in pids if is_alive(pid)], pids
        others = {file for pid in family(os.getpid()) for file in scratch(pid, self.job.folder)}
        left = [file for file in files - others if Path(file).exists()]
        assert not left, left

    def finish(self, wanted: Losses) -> None:
        """The losses are those of a run in which all stay."""
        steps_on(self.job)
        finish_together(self.job)
        rows = self.job.rows("step")
        assert {row["step"] for row in rows} == set(range(1 + max(row["step"] for row in rows)))
        wrong = [row for row in rows if row["step"] in wanted and row["loss"] != wanted[row["step"]]]
        assert not wrong, wrong[:3]


def family(pid: int) -> set[int]:
    """A process and all that it has started."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {each for child in task.read_text().split() for each in family(int(child))}
        except OSError:  # it has ended meanwhile
            continue
    return found


def scratch(pid: int, folder: Path) -> set[str]:
    """Temporary files and shared memory that a process has open or mapped, outside of the job's folder."""
    found = set[str]()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found.add(os.readlink(link))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found.add(line.split(maxsplit=5)[-1])
    except OSError:
        pass
    return {file for file in found if file.startswith(("/tmp/", "/dev/shm/")) and not file.startswith(str(folder))}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="module")
def all_stay(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses of a run in which two members work all the time."""
    return Static(tmp_path_factory.mktemp("static"), [STAGES["2"]], MANY, **UNTIED, STEPS="120").losses


def test_a_node_goes_home_and_another_is_used(tmp_path: Path, all_stay: Losses) -> None:
    releasing = Releasing(tmp_path)
    try:
        releasing.start("b")
        releasing.used("b")
        releasing.goes("b")
        releasing.start("c")
        releasing.used("c")
        assert "balance: nodes without work leave" in releasing.job.logs()
        assert max(row["saved"] for row in releasing.job.rows("saved")) > 0
        releasing.finish(all_stay)
    finally:
        releasing.job.clean_up()


@pytest.mark.full
def test_twenty_times(tmp_path: Path, all_stay: Losses) -> None:
    releasing = Releasing(tmp_path)
    try:
        for number in range(20):
            name = f"n{number}"
            releasing.start(name)
            releasing.used(name)
            releasing.goes(name)
        releasing.finish(all_stay)
    finally:
        releasing.job.clean_up()


@pytest.mark.full
def test_no_fewer_nodes_than_min(tmp_path: Path) -> None:
    """Of four nodes two stay, one of them idle; one goes home."""
    releasing = Releasing(tmp_path, nodes="2:4", balance={**RELEASE, "members": "release"}, first="ab")
    try:
        releasing.start("c", "d")
        job = releasing.job
        job.wait(lambda: sum(job.processes[name].poll() == 0 for name in "abcd") == 2 or None, "two nodes to go")
        steps_on(job, 30)
        assert sum(job.processes[name].poll() is None for name in "abcd") == 2
        finish_together(job)
    finally:
        releasing.job.clean_up()


@pytest.mark.full
@pytest.mark.parametrize("phase", ["told", "said", "passed over", "ending", "goodbye"])
def test_a_leaver_is_killed(tmp_path: Path, all_stay: Losses, phase: str) -> None:
    """The others go on, and the next node is used."""
    releasing = Releasing(tmp_path, KILLED=phase)
    try:
        releasing.start("b")
        pid = releasing.used("b")
        releasing.job.wait(lambda: not is_alive(pid) or None, "the leaver to be killed")
        assert releasing.job.code("b") != 0
        releasing.job.kill("b", signal.SIGKILL) if releasing.job.processes["b"].poll() is None else None
        releasing.job.variables.pop("KILLED")
        releasing.start("c")
        releasing.used("c")
        releasing.goes("c")
        releasing.finish(all_stay)
    finally:
        releasing.job.clean_up()
