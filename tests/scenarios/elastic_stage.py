"""Where scenarios of elastic launches are played: one launch at a time, one event after the other, each judged."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.scenarios import models
from tests.scenarios.elastic_launch import Launch
from tests.scenarios.elastic_rows import (
    ADDRESS,
    FOLDER,
    Ask,
    Coordinate,
    End,
    Fixed,
    Hit,
    Kill,
    Play,
    Row,
    Start,
    Terminate,
)

BATCH, RATE = 12, 1e-4
CONFIG: Mapping[str, Any] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 6,
    "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "dynatrain": {"timeout_seconds": 20},
}
STEPS_ON = 4
"""So many steps are made after an event before it is judged."""
AHEAD = 5
"""So many steps after the last one that was seen scripts end."""

Era = tuple[int, int]
"""The number of the launch in the play, and the generation."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`, block by block; None takes a key away."""
    both = {**base, **over}
    for key in base.keys() & over.keys():
        if isinstance(base[key], Mapping) and isinstance(over[key], Mapping):
            both[key] = merged(base[key], over[key])
    return {key: value for key, value in both.items() if value is not None}


@dataclass(frozen=True)
class World:
    """Processes that train together, and the step that the furthest of them has made last."""

    era: Era = (0, 0)
    pids: frozenset[int] = frozenset()
    size: int = 0
    layout: str = ""
    step: int = -1

    @property
    def is_whole(self) -> bool:
        """Whether all of its ranks have made a step."""
        return self.size == len(self.pids) > 0


class Stage:
    """One play that is under way."""

    def __init__(self, play: Play, folder: Path) -> None:
        self.play, self.launch, self.run = play, Launch(folder, play.nodes), 0
        alone = {**self._settings({}), "config": CONFIG}
        self.undisturbed = Alone(folder, alone) if play.is_held_to_launch else Plain(play.model)
        self.played: set[str] = set()
        self.failed = ""
        """Which row has failed, if one has."""
        self.gone: set[str] = set()
        """Agents and coordinators that are meant to end."""
        self.struck: set[int] = set()
        """Workers that something has happened to."""

    # ---- what happens --------------------------------------------------------------------------------------------

    def perform(self, row: Row) -> None:
        """Play all rows up to this one that were not played yet; AssertionError where one does not go as it says."""
        for each in self.play.rows[: self.play.rows.index(row) + 1]:
            assert not self.failed, self.failed
            if each.name not in self.played:
                self.played.add(each.name)
                self.failed = f"{each.name!r} has failed before"
                self._perform(each)
                self.failed = ""

    def _perform(self, row: Row) -> None:
        before, redone = self.world(), self.redone()
        self._act(row)
        if row.members or (row.members is None and before.pids and not isinstance(row.act, End)):
            self._await_world(row, before)
        for name, code in row.ends.items():
            assert (ended := self.launch.code(name)) == code, f"{name} ended with {ended}\n{self.launch.logs()}"
        for name, text in row.says.items():
            self.launch.wait(partial(self._has_said, name, text), f"{text!r} of {name}")
        if row.status:
            self.launch.wait(lambda: row.status in self.launch.command("status", self.launch.address)[1], row.status)
        after = self.world()
        if row.members and before.era[0] == after.era[0]:
            assert before.pids - self.struck <= after.pids, f"of {before} there are left {after}"
        assert self.redone() - redone <= row.redone, f"{self.redone() - redone} steps were made again"
        self._judge()

    def _has_said(self, name: str, text: str) -> bool:
        return re.search(text, self.launch.said(name)) is not None

    def _act(self, row: Row) -> None:
        """Do what the row says."""
        launch, act = self.launch, row.act
        names = getattr(act, "nodes", getattr(act, "node", "")).split()
        known = {*names, *row.ends} & launch.processes.keys()
        self.struck |= {pid for name in known for pid in launch.workers_of(name)}
        self.gone |= {*row.ends} | ({*names} if isinstance(act, Kill | Terminate) else set())
        match act:
            case Start():
                if act.coordinator:
                    launch.coordinator(act.coordinator)
                if act.coordinator or act.is_anew:
                    self._begin()
                for name in names:
                    launch.node(name, self._settings(act.settings), act.conf, act.options, **act.env)
            case Fixed():
                self._begin()
                launch.fixed(act.node, self._settings({"workers": act.workers, **act.settings}))
            case Coordinate():
                launch.coordinator(act.name)
            case Terminate():
                launch.terminate(*names)
            case Kill():
                launch.kill(*names)
            case Hit():
                launch.hit(act.node, act.number)
            case Ask():
                self._ask(act)
            case End():
                launch.stop_at(self.world().step + AHEAD)

    def _begin(self) -> None:
        """Begin another job in the same folder."""
        self.run += 1
        (self.launch.folder / "stop").unlink(missing_ok=True)

    def _settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a script is told."""
        play = self.play
        settings = {"model": play.model, "config": merged(CONFIG, play.config), "seed": 7, "epochs": play.epochs}
        settings |= {"pause": play.pause, "script": play.script, "workers": play.workers, "run": self.run}
        text = json.dumps(merged(settings, changes))
        return dict(json.loads(text.replace(FOLDER, str(self.launch.folder))))

    def _ask(self, act: Ask) -> None:
        words = [self._filled(word) for word in act.words]

        def holds() -> bool:
            code, text = self.launch.command(*words, **act.env)
            return code == act.code and all(part in text for part in act.prints)

        self.launch.wait(holds, f"{act.prints} with code {act.code} of {words}")

    def _filled(self, word: str) -> str:
        """Return a word of a command with what is known only now."""
        word = word.replace(ADDRESS, self.launch.address).replace(FOLDER, str(self.launch.folder))
        for name in re.findall(r"\$NODE\((\w+)\)", word):
            pid = self.launch.workers_of(name)[0]
            said = json.loads(self.launch.command("status", self.launch.address, "--json")[1])
            (member,) = [one["member"] for one in said["members"] if one["pid"] == pid]
            word = word.replace(f"$NODE({name})", member.rpartition("/")[0])
        return word

    def _await_world(self, row: Row, before: World) -> None:
        """Wait until the world is the one that is expected, and has made steps that nobody had made before."""

        def holds() -> bool:
            lost = {name for name, one in self.launch.processes.items() if one.exitcode is not None} - self.gone
            assert not lost, f"{lost} ended\n{self.launch.logs()}"
            now = self.world()
            is_it = now.is_whole and now.step >= before.step + STEPS_ON
            if row.members is None:
                return is_it
            return is_it and now.era > before.era and now.size == row.members and row.layout in now.layout

        self.launch.wait(holds, f"a world of {row.members} with {row.layout!r} after {before}")

    # ---- what has come of it -------------------------------------------------------------------------------------

    def world(self) -> World:
        """Return the newest world that has made a step."""
        steps = self.launch.rows("step")
        newest = max((era(row) for row in steps), default=(0, 0))
        mine = [row for row in steps if era(row) == newest]
        if not mine:
            return World()
        furthest = max(mine, key=lambda row: row["step"])
        pids = frozenset(row["pid"] for row in mine)
        return World(newest, pids, furthest["size"], furthest["layout"], furthest["step"])

    def redone(self) -> int:
        """Return how many steps were made again, by whichever processes."""
        eras: defaultdict[int, set[Era]] = defaultdict(set)
        for row in self.launch.rows("step"):
            eras[row["step"]].add(era(row))
        return sum(len(each) - 1 for each in eras.values())

    def _judge(self) -> None:
        """Hold all steps that were made against the run without events."""
        made: dict[int, Era] = {}
        for row in self.launch.rows("step"):
            made[row["step"]] = max(era(row), made.get(row["step"], (0, 0)))
        assert sorted(made) == list(range(len(made))), (
            f"steps {sorted(set(range(max(made))) - set(made))} were left out"
        )
        told = trained(row for row in self.launch.rows("batch") if era(row) == made.get(row["step"]))
        for step in range(len(made) - 1):  # of the last one others may not have told yet
            (loss, samples), (right, numbers) = told[step], self.undisturbed.step(step)
            assert samples == numbers, f"step {step} has trained samples {samples}, not {numbers}"
            assert abs(loss - right) <= self.play.bound * right, f"the loss of step {step} is {loss}, not {right}"


def era(row: Mapping[str, Any]) -> Era:
    """Return when a row of a script was written."""
    return row["run"], row["generation"]


class Plain:
    """The same training on one process, in plain PyTorch: no DeepSpeed, and nothing happens to it."""

    def __init__(self, name: str) -> None:
        self.kind = models.MODELS[name]
        self.model: nn.Module = Layers() if self.kind.is_pipeline else models.build(name)
        trained = [held for held in self.model.parameters() if held.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE)
        self.order = torch.randperm(models.SAMPLES, generator=torch.Generator().manual_seed(0))
        self.done: list[tuple[float, list[int]]] = []

    def step(self, number: int) -> tuple[float, list[int]]:
        """Return the loss of a step, and its samples; of a pipeline, which does not tell any, none."""
        data = models.Texts()
        while len(self.done) <= number:
            first = len(self.done) * BATCH % models.SAMPLES
            picked = self.order[first : first + BATCH]
            loss = self.kind.loss(self.model, data.inputs[picked], data.targets[picked])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.done.append((loss.item(), [] if self.kind.is_pipeline else sorted(picked.tolist())))
        return self.done[number]


class Alone:
    """The same script on one process to which nothing happens; of a Trainer of Hugging Face a stock one."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self.done: list[tuple[float, list[int]]] = []

    def step(self, number: int) -> tuple[float, list[int]]:
        """Return the loss of a step, and its samples; of a Trainer, which does not tell any, none."""
        if number >= len(self.done):
            steps = 2 * max(number, 50)
            launch = Launch(self.folder / f"alone{steps}", "1")
            try:
                launch.fixed("alone", {**self.settings, "workers": 1, "pause": 0, "steps": steps})
                assert launch.code("alone") == 0, launch.logs()
                self.done = [told for _, told in sorted(trained(launch.rows("batch")).items())]
            finally:
                launch.clean_up()
        return self.done[number]


def trained(batches: Iterable[Mapping[str, Any]]) -> dict[int, tuple[float, list[int]]]:
    """Return the mean loss of each step, and its samples; a row without samples is of the whole batch."""
    told: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in batches:
        told[row["step"]].append(row)
    return {step: (mean(rows), sorted(each for row in rows for each in row["samples"])) for step, rows in told.items()}


def mean(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the mean loss of micro-batches, over their samples."""
    weighed = [(row["loss"], len(row["samples"]) or BATCH) for row in rows]
    return math.fsum(loss * weight for loss, weight in weighed) / sum(weight for _, weight in weighed)


class Layers(nn.Module):
    """The layers of `models.pipeline`, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        for layer in (models.Words, *[models.Block] * 4, models.Words):
            layer()  # a PipelineModule builds each layer once before, to count what it holds
        self.words = models.Words()
        blocks = [models.Block() for _ in range(4)]
        self.layers = nn.Sequential(*blocks, nn.LayerNorm(models.WIDTH - 1))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return models.token_loss(models.logits(self.words, self.layers(self.words(inputs))), targets)
