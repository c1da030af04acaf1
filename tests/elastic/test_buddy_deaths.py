"""Members die under ZeRO, and no checkpoint is there: all go on from copies that members keep of each other.

A spare takes the place of who has died. So every world is of three, and the losses must be those, bit for bit, of a run
in which nobody dies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import processes
from tests.elastic.runs import Losses, Samples, Static, finish, gated, history, open_gate, steps_on, training, worker

STEPS = 120
NODES = ("a", "b", "c")


class Undisturbed:
    """Runs of three in which nobody dies, one for each stage that is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, dict[int, Static]()

    def of(self, stage: int) -> tuple[Losses, Samples]:
        if stage not in self._runs:
            layout = {"data": 3, "zero_stage": stage}
            self._runs[stage] = Static(self._folder / str(stage), [layout], STEPS=str(STEPS))
        return self._runs[stage].losses, self._runs[stage].samples


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


class Deaths:
    """A job of three nodes and spares that are warm. buddies: more of its block; faults: node -> `$FAULT`."""

    def __init__(
        self, folder: Path, stage: int, faults: dict[str, str], spares: int = 1, block: dict[str, Any] | None = None
    ) -> None:
        self.stage, self.faults = stage, faults
        variables = {"STEP_SECONDS": "0.3"}
        block = {"buddies": {"mode": "copy"}, **(block or {})}
        self.job = training(folder, stage=stage, block=block, variables=variables, nodes="3:3")
        self.job.coordinator("coordinator")
        for node in NODES:
            gated(self.job, node, "gate-all", **({"FAULT": faults[node]} if node in faults else {}))
        self.spares = [f"spare{number}" for number in range(spares)]
        for spare in self.spares:
            gated(self.job, spare)
        for name in (*NODES, *self.spares):
            worker(self.job, name)
        open_gate(self.job, "gate-all")
        self.first = self.job.settled(3)
        for spare in self.spares:
            open_gate(self.job, spare)
        count = 3 + spares
        self.job.wait(lambda: (status := self.job.status()) and len(status.members) == count, "the spares")

    def tell(self, file: str = "dies", ahead: int = 3) -> int:
        """The step at which it happens: a few from now on."""
        step = 1 + ahead + max(row["step"] for row in self.job.rows("step"))
        (self.job.folder / "telling").write_text(str(step))
        (self.job.folder / "telling").rename(self.job.folder / file)
        return step

    def check(self, undisturbed: Undisturbed, most_again: int = 1) -> None:
        """The losses are those of the undisturbed run; nobody makes more than so many steps again in all."""
        steps_on(self.job)
        finish(self.job)
        losses, samples = history(self.job.rows("step"))
        wanted, wanted_samples = undisturbed.of(self.stage)
        assert sorted(losses) == list(range(len(losses))) and len(losses) <= STEPS
        assert samples == {step: wanted_samples[step] for step in losses}
        assert losses == {step: wanted[step] for step in losses}
        for pid in {row["pid"] for row in self.job.rows("step")}:
            made = [row["step"] for row in self.job.rows("step") if row["pid"] == pid]
            assert len(made) - len(set(made)) <= most_again, made


@pytest.mark.parametrize(
    ("stage", "instant"),
    [
        (1, "forward"),
        (2, "update"),
        (3, "ship"),
        *(
            pytest.param(stage, instant, marks=pytest.mark.full)
            for stage in (1, 2, 3)
            for instant in ("forward", "backward", "step", "update", "boundary", "ship")
            if (stage, instant) not in ((1, "forward"), (2, "update"), (3, "ship"))
        ),
    ],
)
def test_one_dies_and_a_spare_takes_its_place(
    tmp_path: Path, undisturbed: Undisturbed, stage: int, instant: str
) -> None:
    deaths = Deaths(tmp_path, stage, {"b": f"{instant} dies kill"})
    try:
        deaths.tell()
        settled = deaths.job.settled(3, deaths.first.generation)
        assert len(set(processes(settled)) - set(processes(deaths.first))) == 1
        deaths.check(undisturbed, most_again=2 if instant == "ship" else 1)
    finally:
        deaths.job.clean_up()
