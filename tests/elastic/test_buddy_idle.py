"""Idle members are no buddies, and take the places of the dead; no checkpoint is there.

Where an idle member takes the place of who has died the worlds are of one size, and the losses must be those, bit for
bit, of a run in which nobody dies.
"""

from __future__ import annotations

import json
import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import processes
from tests.elastic.deaths import STEPS, Undisturbed, protected
from tests.elastic.runs import Static, check_history, finish, gated, history, open_gate, steps_on, training, worker

SCRIPT = Path(__file__).with_name("idling.py")


class Idle:
    """A job of some nodes, of whose members some work. layouts: as in the configuration; fault: of all nodes."""

    def __init__(
        self,
        folder: Path,
        stage: int,
        layouts: dict[str, Any],
        nodes: str,
        fault: str = "",
        script: Path = SCRIPT,
        **given: str,
    ) -> None:
        self.stage, self.nodes, variables = stage, nodes, {"STEP_SECONDS": "0.2", **given}
        least = min(map(int, layouts))
        layout = {"zero_stage": stage, **layouts[str(least)]}
        block = {"buddies": {"mode": "copy"}, "layouts": layouts, "layout": layout}
        count = f"{least}:{len(nodes)}"
        self.job = training(folder, stage, block, script=script, nodes=count, variables=variables)
        try:
            self.job.coordinator("coordinator")
            for node in nodes:
                gated(self.job, node, **({"FAULT": fault.format(node=node)} if fault else {}))
            self.pids = {node: worker(self.job, node) for node in nodes}
            for number, node in enumerate(nodes, 1):  # those that may begin, and then one after the other
                open_gate(self.job, node)
                if number >= least:
                    self.first = self.job.settled(number)
        except BaseException:
            self.job.clean_up()
            raise

    @property
    def working(self) -> list[str]:
        """The nodes whose members have made the last steps in the newest generation, by rank."""
        rows = self.job.rows("step")
        generation, last = max(((row["generation"], row["step"]) for row in rows), default=(0, 0))
        there = [row for row in rows if row["generation"] == generation and row["step"] >= last - 1]
        ranks = {row["pid"]: row["rank"] for row in there}  # of the very last one others may not have written
        found = {ranks[pid]: node for node, pid in self.pids.items() if pid in ranks}
        return [found[rank] for rank in sorted(found)]

    @property
    def idle(self) -> list[str]:
        """All others that live."""
        status = self.job.status()
        there = [] if status is None else processes(status)
        return [node for node in self.nodes if node not in self.working and self.pids[node] in there]

    def buddies(self) -> dict[str, list[int]]:
        """By what those that work say, once all copies are whole."""
        rows = self.job.rows("protection")
        last: dict[str, Any] = rows[-1]["of"] if rows else {"buddies": {}, "is_protected": False}
        return last["buddies"] if last["is_protected"] else {}

    def keeping(self) -> set[int]:
        """The members that keep copies by that."""
        return {each for keepers in self.buddies().values() for each in keepers}

    def wait_for_keepers(self, *members: int) -> None:
        """Until exactly these do."""
        self.job.wait(lambda: self.keeping() == {*members}, f"copies with {members}")
        steps_on(self.job, 2)

    def tell(self, file: str, ahead: int = 3, more: str = "") -> int:
        """See `Deaths.tell`."""
        step = 1 + ahead + max(row["step"] for row in self.job.rows("step"))
        (self.job.folder / "telling").write_text(f"{step} {more}".strip())
        (self.job.folder / "telling").rename(self.job.folder / file)
        return step

    def kill(self, node: str) -> None:
        """It loses power."""
        self.job.kill(node, signal.SIGKILL)
        os.kill(self.pids[node], signal.SIGKILL)

    def check(self, undisturbed: Undisturbed, most_again: int = 1, **layout: int) -> None:
        """The losses are those of an undisturbed run; nobody makes more steps again than so many."""
        steps_on(self.job)
        finish(self.job)
        wanted, samples = undisturbed.of(zero_stage=self.stage, **layout)
        losses, found = history(self.job.rows("step"))
        assert sorted(losses) == list(range(len(losses))) and len(losses) <= STEPS
        assert found == {step: samples[step] for step in losses}
        assert losses == {step: wanted[step] for step in losses}
        for pid in {row["pid"] for row in self.job.rows("step")}:
            made = [row["step"] for row in self.job.rows("step") if row["pid"] == pid]
            assert len(made) - len(set(made)) <= most_again, made

    def log(self, *nodes: str) -> str:
        """What these nodes have written."""
        return "".join((self.job.folder / f"{node}.log").read_text() for node in nodes)


def test_one_that_works_alone_has_no_copies(tmp_path: Path) -> None:
    """The idle one has nothing to go on from: the job ends."""
    idle = Idle(tmp_path, 1, {"1": {"data": 1}}, "ab")
    try:
        steps_on(idle.job)
        (waits,) = idle.idle
        assert protected(idle.job.status()) is None
        idle.kill(*idle.working)
        assert idle.job.code(waits) != 0
        assert "from copies that members keep" not in idle.log(waits)
    finally:
        idle.job.clean_up()


TWO_WORK = {"2": {"data": 2}}
INSTANTS = ("forward", "backward", "update", "boundary", "ship")


@pytest.mark.full
@pytest.mark.parametrize(("stage", "instant", "rank"), product((1, 2, 3), INSTANTS, (0, 1)))
def test_one_who_works_dies(tmp_path: Path, undisturbed: Undisturbed, stage: int, instant: str, rank: int) -> None:
    """An idle one takes its place; the other one that works has both copies."""
    idle = Idle(tmp_path, stage, TWO_WORK, "abc", instant + " dies-{node} kill")
    try:
        idle.wait_for_keepers(0, 1)
        dying = idle.working[rank]
        idle.tell(f"dies-{dying}")
        idle.job.settled(2, idle.first.generation)
        assert dying not in idle.working and "from copies that members keep" in idle.job.logs()
        idle.check(undisturbed, most_again=2 if instant == "ship" else 1, data=2)
    finally:
        idle.job.clean_up()


@pytest.mark.full
def test_the_idle_one_dies(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Nobody waits for it, and no step is made again."""
    idle = Idle(tmp_path, 2, TWO_WORK, "abc")
    try:
        idle.wait_for_keepers(0, 1)
        idle.kill(*idle.idle)
        idle.check(undisturbed, most_again=0, data=2)
        assert idle.keeping() == {0, 1}
    finally:
        idle.job.clean_up()


@pytest.mark.full
def test_a_switch_puts_it_to_work_and_back(tmp_path: Path, static: Static) -> None:
    """All three work, then two, and one of these dies."""
    idle = Idle(tmp_path, 1, TWO_WORK, "abc")
    try:
        idle.wait_for_keepers(0, 1)
        for size, keepers in ((3, (0, 1, 2)), (2, (0, 1))):
            idle.tell("switches", more=json.dumps({"data": size}))
            idle.job.wait(lambda size=size: len(idle.working) == size, f"{size} that work")  # type: ignore[misc]
            idle.wait_for_keepers(*keepers)
        idle.kill(idle.working[0])
        idle.job.settled(2, idle.first.generation)
        steps_on(idle.job)
        finish(idle.job)
        check_history(idle.job, static, kills=1)
    finally:
        idle.job.clean_up()
