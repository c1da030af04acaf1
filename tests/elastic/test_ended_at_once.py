"""All nodes are told to end at once, at whatever instant; the next launch, of another size, goes on where they ended.

One folder of checkpoints goes through several launches. Over all of them each sample is used once, in its step, and the
losses are those of a run in a world that never changes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.checkpoint.folder import latest
from tests.elastic.agents import Job, Row
from tests.elastic.runs import Static, check_history, gated, open_gate, steps_on, training, worker

DURABLE_SECONDS = 30.0
"""After SIGTERM torchrun gives its workers so long."""
SCRIPT = Path(__file__).with_name("doing.py")
NAMES = "abcd"


@dataclass
class Launches:
    """One after the other. stage: of ZeRO; history: of all that are over, with generations that go on rising."""

    folder: Path
    stage: int
    history: list[Row] = field(default_factory=list)
    count: int = 0
    job: Job | None = None

    @property
    def kept(self) -> Path:
        """The checkpoints."""
        return self.folder / "kept"

    def rows(self, event: str) -> list[Row]:
        """As a job has them."""
        return [row for row in self.history if row["event"] == event]

    @property
    def steps(self) -> int:
        """So many were made by all launches that are over."""
        return max((row["step"] + 1 for row in self.history), default=0)

    def start(
        self,
        size: int,
        fault: str = "",
        nodes: str = "",
        more: int = 0,
        block: dict[str, Any] | None = None,
        **given: str,
    ) -> Job:
        """Another launch, of so many nodes, the first of which has a fault; more: so many others come when told to.

        given: environment variables.
        """
        self.count += 1
        folder = self.folder / f"launch{self.count}"
        folder.mkdir()
        fallback = {"path": str(self.kept), "every_steps": 1000, **(block or {}).pop("fallback", {})}
        block = {"fallback": fallback, "resume": {"path": str(self.kept)}, **(block or {})}
        variables = {"STEP_SECONDS": "0.1", **given}
        self.job = job = training(
            folder, stage=self.stage, block=block, nodes=nodes or f"{size}:4", variables=variables, script=SCRIPT
        )
        job.coordinator("coordinator")
        for name in NAMES[: size + more]:
            gated(
                job,
                name,
                "gate-all" if name in NAMES[:size] else f"gate-{name}",
                **({"FAULT": fault} if name == "a" and fault else {}),
            )
        for name in NAMES[: size + more]:
            worker(job, name)
        agents = [str(job.processes[name].pid) for name in NAMES[: size + more]]
        (folder / "agents").write_text(" ".join(agents))
        return job

    def tell(self, file: str = "ends", ahead: int = 3, more: str = "") -> None:
        """The step at which something happens: a few from now on."""
        assert self.job is not None
        made = [row["step"] for row in self.job.rows("step")]
        (self.job.folder / "telling").write_text(f"{1 + ahead + max(made, default=self.steps - 1)} {more}".strip())
        (self.job.folder / "telling").rename(self.job.folder / file)

    def end_all(self) -> None:
        """SIGTERM to all agents."""
        assert self.job is not None
        (self.job.folder / "ended").touch()
        for name in self.job.processes.keys() - {"coordinator"}:
            if self.job.processes[name].poll() is None:
                self.job.kill(name, signal.SIGTERM)

    def over(self) -> float:
        """All have ended, and the last step that was made is kept; seconds from SIGTERM until it was."""
        job = self.job
        assert job is not None
        for name in job.processes.keys() - {"coordinator"}:
            job.code(name)
        job.clean_up()  # the coordinator waits for who comes next
        self.history += [{**row, "generation": row["generation"] + 1000 * self.count} for row in job.rows("step")]
        tag = latest(self.kept)
        assert tag is not None and tag.partition("-")[0] == f"step{self.steps}", (
            f"{tag} is kept, not step{self.steps}\n{job.logs()}"
        )
        seconds = (self.kept / "latest").stat().st_mtime - (job.folder / "ended").stat().st_mtime
        assert seconds < DURABLE_SECONDS, f"kept after {seconds:.1f} s\n{job.logs()}"
        return seconds


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Callable[[int], Launches]]:
    """Makes them, and leaves nothing behind."""
    every: list[Launches] = []

    def make(stage: int) -> Launches:
        every.append(Launches(tmp_path, stage))
        return every[-1]

    yield make
    for one in every:
        if one.job is not None:
            one.job.clean_up()


def at_instant(launches: Launches, size: int, instant: str, act: str = "end") -> float:
    """In a call of one of them."""
    job = launches.start(size, f"{instant} ends {act}")
    open_gate(job, "gate-all")
    job.settled(size)
    launches.tell()
    return launches.over()


def in_the_first_step(launches: Launches, size: int) -> float:
    """A long first call."""
    job = launches.start(size, "forward ends linger")
    launches.tell(ahead=-1)
    open_gate(job, "gate-all")
    return launches.over()


def in_an_evaluation(launches: Launches, size: int) -> float:
    """Nobody is in a step."""
    job = launches.start(size)
    open_gate(job, "gate-all")
    job.settled(size)
    launches.tell("evaluates")
    job.wait(lambda: job.rows("evaluating"), "an evaluation")
    launches.end_all()
    return launches.over()


def in_a_save(launches: Launches, size: int) -> float:
    """On a slow disk."""
    job = launches.start(size, "save ends linger", block={"fallback": {"every_steps": 7}})
    launches.tell(ahead=0)
    open_gate(job, "gate-all")
    return launches.over()


def in_a_switch(launches: Launches, size: int) -> float:
    """That the script has asked for."""
    job = launches.start(size, "move ends end")
    open_gate(job, "gate-all")
    job.settled(size)
    launches.tell("switches", more='{"zero_stage": 2}')
    launches.tell(ahead=0)
    seconds = launches.over()
    assert job.rows("switch"), "the switch took place"
    return seconds


def in_a_change(launches: Launches, size: int, phase: str = "move") -> float:
    """Another node comes just then."""
    job = launches.start(size, f"{phase} ends end", more=1)
    open_gate(job, "gate-all")
    job.settled(size)
    launches.tell(ahead=0)
    open_gate(job, NAMES[size])
    return launches.over()


def below_min(launches: Launches, size: int) -> float:
    """One has gone, and the others wait for another one."""
    job = launches.start(size)
    open_gate(job, "gate-all")
    job.settled(size)
    job.kill("a", signal.SIGTERM)
    paused = job.wait(lambda: (status := job.status()) and status.paused and status, "the pause")
    job.wait(lambda: [one for one in job.status().members if one.entered == paused.generation], "a smaller world")
    launches.end_all()
    return launches.over()


def as_a_world_is_formed(launches: Launches, size: int) -> float:
    """One was killed, and the others are about to restore what it had."""
    block = {"buddies": {"mode": "copy"}}
    job = launches.start(size, "forming ends end", nodes=f"{size - 1}:{size}", block=block)
    open_gate(job, "gate-all")
    job.settled(size)
    steps_on(job)
    launches.tell(ahead=-2)
    job.kill(NAMES[size - 1], signal.SIGKILL)
    return launches.over()


def as_the_first_world_is_formed(launches: Launches, size: int) -> float:
    """No engine is there."""
    job = launches.start(size, "starting ends end")
    (job.folder / "ends").write_text("-1")
    open_gate(job, "gate-all")
    return launches.over()


def while_one_is_idle(launches: Launches, size: int) -> float:
    """There is no place for one of them."""
    job = launches.start(size, block={"layouts": {str(size - 1): {"data": size - 1}}})
    open_gate(job, "gate-all")
    job.wait(lambda: len(job.rows("step")) > 4 * size, "steps")
    launches.end_all()
    return launches.over()


INSTANTS: dict[str, Callable[[Launches, int], float]] = {
    "forward": lambda launches, size: at_instant(launches, size, "forward"),
    "backward": lambda launches, size: at_instant(launches, size, "backward"),
    "update": lambda launches, size: at_instant(launches, size, "update"),
    "loader": lambda launches, size: at_instant(launches, size, "loader"),
    "compile": in_the_first_step,
    "evaluation": in_an_evaluation,
    "save": in_a_save,
    "switch": in_a_switch,
    "change": in_a_change,
    "below min": below_min,
    "forming": as_a_world_is_formed,
    "idle": while_one_is_idle,
    "starting": as_the_first_world_is_formed,
}
CHAINS = (
    ("update", "save"),
    ("change", "evaluation"),
    ("forward", "compile"),
    ("switch", "below min"),
    ("backward", "forming"),
    ("idle", "starting"),
)
CASES = [(stage, chain) for stage in (1, 3) for chain in CHAINS]


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "chain"),
    [pytest.param(*case, id=f"{case[0]}-{case[1][0]}") for case in CASES],
)
def test_a_launch_of_another_size_goes_on(
    launches: Callable[[int], Launches], static: Static, stage: int, chain: tuple[str, ...]
) -> None:
    """Sizes 2, 3 and 1; the last launch is ended in its loader."""
    run = launches(stage)
    for number, instant in enumerate(chain):
        INSTANTS[instant](run, 2 + number)
    INSTANTS["loader"](run, 1)
    check_history(run, static, kills=int("forming" in chain))
