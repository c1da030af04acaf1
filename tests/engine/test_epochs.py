"""Plain loops over epochs, `for epoch in range(n)`, of which a member that comes late has more left than the others."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynatrain.cli import checkpoints
from ds_dynatrain.membership.control import Control
from tests.engine import jobs
from tests.engine.models import Sequences
from tests.engine.pool import RankPool

EPOCHS = 4
STEPS = 3
"""Of an epoch: 12 samples each."""


class Numbered(Sequences):
    """Sample i with its number."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:  # type: ignore[override]
        return *super().__getitem__(index), index


class Script:
    """A user's script. schedule: data sizes by step; what it does besides is in subclasses."""

    def __init__(self, made: jobs.Job, stage: int, folder: str, schedule: dict[int, int]) -> None:
        self.engine, self.loader, self.stage = made.engine, made.loader, stage
        self.folder, self.schedule = Path(folder), schedule
        self.held_out = self.engine.loader(Sequences(10), evaluation=True, num_workers=0, batch_size=2)
        self.samples: dict[int, list[int]] = {}
        self.notes: list[Any] = []

    def run(self) -> None:
        for epoch in range(EPOCHS):
            self.train(epoch)
            self.after_epoch(epoch)
        self.after_all()
        self.notes.append("end")

    def train(self, epoch: int) -> None:
        for inputs, targets, numbers in self.loader:
            self.one(inputs, targets, numbers)

    def one(self, inputs: Any, targets: Any, numbers: Any) -> None:
        engine, step = self.engine, int(self.engine.global_steps)
        if step in self.schedule and engine.layout.data != self.schedule[step]:
            engine.switch(data=self.schedule[step], zero_stage=self.stage, at=step + 1)
        engine.backward(engine(inputs, targets))
        if not engine.slot_is_borrowed:
            self.samples.setdefault(step, []).extend(numbers.tolist())
        engine.step()

    def after_epoch(self, epoch: int) -> None:
        """Between two epochs."""

    def after_all(self) -> None:
        """After the loop."""

    @torch.no_grad()
    def evaluate(self) -> float:
        self.engine.eval()
        loss = samples = 0.0
        for batch in self.held_out:
            loss += self.engine(*batch).item() * self.held_out.samples
            samples += self.held_out.samples
        self.engine.train()
        return float(self.engine.mean(loss / max(samples, 1), int(samples)))


class Evaluates(Script):
    def after_epoch(self, epoch: int) -> None:
        self.notes.append(self.evaluate())


class Saves(Evaluates):
    """In all the ways, with names of its own epochs."""

    def after_epoch(self, epoch: int) -> None:
        super().after_epoch(epoch)
        self.engine.save_checkpoint(str(self.folder / "stock"), tag=f"epoch{epoch}")

    def after_all(self) -> None:
        self.notes.append(self.evaluate())
        self.engine.save(self.folder / "universal", "behind", background=True).wait()
        self.engine.save(self.folder / "universal", "last")


class OnlyLast(Evaluates):
    """Another set than in the epochs, and nothing of ours but the engine."""

    def after_all(self) -> None:
        with torch.no_grad():
            inputs, targets = torch.utils.data.default_collate([Sequences()[i] for i in range(4)])
            self.notes.append(self.engine(inputs, targets).item())


class EverySecond(Evaluates):
    def after_epoch(self, epoch: int) -> None:
        if epoch % 2:
            super().after_epoch(epoch)


class Partial(Script):
    """Two steps of an epoch, and another loader after it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.other = self.engine.loader(Numbered(24), num_workers=0, name="other")

    def train(self, epoch: int) -> None:
        for inputs, targets, numbers in self.loader:
            self.one(inputs, targets, numbers)
            if int(self.engine.global_steps) % 4 == 2:
                break
        for batch in self.other:
            self.one(*batch)


SCRIPTS = {made.__name__: made for made in (Script, Evaluates, Saves, OnlyLast, EverySecond, Partial)}


def late_case(kind: str, stage: int, folder: str, start: int, schedule: dict[int, int]) -> Any:
    """(samples by step, notes, whether the script was ended as that of an idle member, the engine's steps)."""
    with jobs.job(jobs.config(start=(start, stage)), data=Numbered(12 * STEPS)) as made:
        script = SCRIPTS[kind](made, stage, folder, schedule)
        script.run()
    return script.samples, script.notes, made.let_go, int(made.engine.global_steps)


def check_samples(ranks: list[Any], steps: int = STEPS) -> None:
    """Each sample of an epoch was used once in it; so was each epoch."""
    used: Counter[tuple[int, int]] = Counter()
    for samples, *_ in ranks:
        for step, numbers in samples.items():
            used.update((step // steps, number) for number in numbers)
    assert used == Counter((epoch, number) for epoch in range(EPOCHS) for number in range(12 * STEPS))


WOKEN = {STEPS: 3}
"""In epoch 1 there are three."""


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["Script", "Evaluates"])
def test_it_ends_when_the_others_have(pool: RankPool, tmp_path: Path, kind: str, stage: int) -> None:
    """It asks for an epoch more, and ends there; one that was never woken, too."""
    ranks = pool.run(late_case, kind=kind, stage=stage, folder=str(tmp_path), start=1, schedule=WOKEN)
    check_samples(ranks)
    assert [let_go for *_, let_go, _ in ranks] == [False, True, True, True]
    assert {steps for *_, steps in ranks[:3]} == {EPOCHS * STEPS}
    if kind == "Evaluates":
        assert ranks[1][1] == ranks[2][1] == ranks[0][1][1:-1]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_what_comes_after_the_loop_is_done_by_all(pool: RankPool, tmp_path: Path, stage: int) -> None:
    """Evaluations and saves: it comes there through epochs without batches; all save under the leaders' names."""
    ranks = pool.run(late_case, kind="Saves", stage=stage, folder=str(tmp_path), start=2, schedule=WOKEN, seconds=90)
    check_samples(ranks)
    assert [let_go for *_, let_go, _ in ranks] == [False, False, False, True]
    assert ranks[0][1] == ranks[1][1]
    for name in ("behind", "last"):
        assert not list(checkpoints.damage(checkpoints.found(tmp_path / "universal" / name)))
    if stage:
        shards = {path.name: len(list(path.glob("*optim_states.pt"))) for path in (tmp_path / "stock").glob("epoch*")}
        assert shards == {"epoch0": 2, "epoch1": 3, "epoch2": 3, "epoch3": 3}


def test_a_forward_pass_after_the_loop(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(late_case, kind="OnlyLast", stage=3, folder=str(tmp_path), start=1, schedule=WOKEN)
    check_samples(ranks)
    assert [let_go for *_, let_go, _ in ranks] == [False, False, False, True]
    assert len({notes[-2] for _, notes, *_ in ranks[:3]}) == 1


def test_what_is_done_in_some_epochs_is_done_where_the_others_do_it(pool: RankPool, tmp_path: Path) -> None:
    """Its own epochs are even where theirs are odd."""
    ranks = pool.run(late_case, kind="EverySecond", stage=3, folder=str(tmp_path), start=1, schedule=WOKEN)
    check_samples(ranks)
    assert ranks[0][1][:2] == ranks[1][1][:2]


@pytest.mark.parametrize("schedule", [{4: 3}, {1: 1, 5: 2, 6: 1, 9: 3}], ids=["woken", "idle in between"])
def test_loops_that_break_and_two_loaders(pool: RankPool, tmp_path: Path, schedule: dict[int, int]) -> None:
    ranks = pool.run(late_case, kind="Partial", stage=1, folder=str(tmp_path), start=2, schedule=schedule)
    assert {steps for *_, steps in ranks[:1]} == {4 * EPOCHS}
    for step in range(4 * EPOCHS):
        used = [number for samples, *_ in ranks for number in samples.get(step, [])]
        assert len(used) == len(set(used)) == 12, step


def woken_case(folder: str, delay: float) -> tuple[int, int]:
    """Two work for an epoch, a third one is woken at a boundary of its own, and all load at once: (step, samples)."""
    with jobs.job(jobs.config(start=(2, 1)), data=Numbered(12 * STEPS)) as made:
        engine, step, samples = made.engine, 0, 0
        if not engine.idle:
            for inputs, targets, _ in made.loader:
                engine.backward(engine(inputs, targets))
                engine.step()
            engine.save(folder)
            engine.switch(data=3, at=engine.global_steps)
        else:
            slow_posts(delay)
        engine.boundary()
        engine.load(folder)
        step = int(engine.global_steps)
        for inputs, targets, numbers in made.loader:
            engine.backward(engine(inputs, targets))
            samples += 0 if engine.slot_is_borrowed else len(numbers)
            engine.step()
    return step, samples


def slow_posts(seconds: float) -> None:
    """This member is slow to say how far it is."""
    own = Control.post

    def post(self: Control, key: str, value: Any) -> None:
        if key.startswith("epochs/"):
            time.sleep(seconds)
        own(self, key, value)

    setattr(Control, "post", post)  # noqa: B010 - mypy takes no assignment to a method


def test_a_woken_member_loads_before_its_first_step(pool: RankPool, tmp_path: Path) -> None:
    """It says how far it is when the others are at the load already: they wait for that."""
    ranks = pool.run(woken_case, folder=str(tmp_path), delay=1.0, seconds=90)
    assert [step for step, _ in ranks[:3]] == [STEPS] * 3
    assert sum(samples for _, samples in ranks) == 12 * STEPS
