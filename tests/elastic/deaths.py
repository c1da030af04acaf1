"""Jobs in which members with buddies die, and spares take their places: every world is as large as the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_dynatrain.elastic.messages import Status
from tests.elastic.agents import processes
from tests.elastic.runs import (
    SCRIPT,
    Losses,
    Samples,
    Static,
    finish,
    gated,
    history,
    node_of,
    open_gate,
    steps_on,
    training,
    worker,
)

STEPS = 80
NODES = ("a", "b", "c")


class Undisturbed:
    """Runs in which nobody dies, one for each layout that is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, dict[str, Static]()

    def of(self, **layout: int) -> tuple[Losses, Samples]:
        """Its losses and samples, by step."""
        name = repr(layout)
        if name not in self._runs:
            self._runs[name] = Static(self._folder / str(len(self._runs)), [layout], STEPS=str(STEPS))
        return self._runs[name].losses, self._runs[name].samples


class Deaths:
    """A job of some nodes, and spares that are warm. faults: node -> `$FAULT`; block, own: see `settings`; least: so
    few nodes can train, by default no fewer."""

    def __init__(
        self,
        folder: Path,
        stage: int,
        faults: dict[str, str],
        nodes: tuple[str, ...] = NODES,
        spares: int = 1,
        block: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        script: Path = SCRIPT,
        least: int = 0,
        **given: str,
    ) -> None:
        self.stage, self.size = stage, len(nodes)
        variables = {"STEP_SECONDS": "0.3", **given}
        block = {"buddies": {"mode": "copy"}, **(block or {})}
        count = f"{least or len(nodes)}:{len(nodes)}"
        self.job = training(folder, stage, block, own, variables=variables, nodes=count, script=script)
        self.spares = [f"spare{number}" for number in range(spares)]
        try:
            self._start(nodes, faults)
        except BaseException:
            self.job.clean_up()
            raise

    def _start(self, nodes: tuple[str, ...], faults: dict[str, str]) -> None:
        self.job.coordinator("coordinator")
        for node in nodes:
            gated(self.job, node, "gate-all", **({"FAULT": faults[node]} if node in faults else {}))
        for spare in self.spares:
            gated(self.job, spare)
        for name in (*nodes, *self.spares):
            worker(self.job, name)
        open_gate(self.job, "gate-all")
        self.first = self.job.settled(self.size)
        for spare in self.spares:
            open_gate(self.job, spare)
        every = self.size + len(self.spares)
        self.job.wait(lambda: (status := self.job.status()) and len(status.members) == every, "the spares")

    def tell(self, file: str = "dies", ahead: int = 3, more: str = "") -> int:
        """The step at which it happens: a few from now on. more: what stands behind it in the file."""
        step = 1 + ahead + max(row["step"] for row in self.job.rows("step"))
        (self.job.folder / "telling").write_text(f"{step} {more}".strip())
        (self.job.folder / "telling").rename(self.job.folder / file)
        return step

    def numbers(self, node: str) -> list[int]:
        """Of a node's processes: its workers, then its agent."""
        return [*self.job.workers_of(node), self.job.processes[node].pid]

    def of_another_pair(self, node: str) -> str:
        """A node of four, in two pairs by their ranks, which are as they came, that is not the buddy of this one."""
        by_rank = [node_of(self.job, self.first, rank) for rank in range(4)]
        return by_rank[(by_rank.index(node) + 2) % 4]

    def check(self, undisturbed: Undisturbed, most_again: int = 1) -> None:
        """The losses are those of the undisturbed run; nobody makes more than so many steps again in all."""
        steps_on(self.job)
        finish(self.job)
        self.compare(*undisturbed.of(data=self.size, zero_stage=self.stage), most_again)

    def check_spare(self, undisturbed: Undisturbed, most_again: int) -> None:
        """One of three dies, and the fourth takes its place; see `check`."""
        self.tell()
        settled = self.job.settled(3, self.first.generation)
        assert len(set(processes(settled)) - set(processes(self.first))) == 1
        self.check(undisturbed, most_again)

    def compare(self, wanted: Losses, wanted_samples: Samples, most_again: int, event: str = "step") -> None:
        """The history, once the scripts have ended. event: what they call a step of the engine that is meant."""
        rows = self.job.rows(event)
        losses, samples = history(rows)
        assert sorted(losses) == list(range(len(losses))) and len(losses) <= STEPS
        assert samples == {step: wanted_samples[step] for step in losses}
        assert losses == {step: wanted[step] for step in losses}
        for pid in {row["pid"] for row in rows}:
            made = [row["step"] for row in rows if row["pid"] == pid]
            assert len(made) - len(set(made)) <= most_again, made

    def log(self, *nodes: str) -> str:
        """What these nodes have written."""
        return "".join((self.job.folder / f"{node}.log").read_text() for node in nodes)


def protected(status: Status | None) -> Status | None:
    """The status, if all that work are protected."""
    working = [] if status is None else [one for one in status.members if one.rank is not None]
    return status if working and all(one.protected == "yes" for one in working) else None
