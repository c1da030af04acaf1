"""What modules keep besides parameters: buffers, the modes of single modules, and plain attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynatrain.adapters.model.module_state import state_of
from ds_dynatrain.reshard import carry
from tests.engine import exactly, jobs
from tests.engine.models import WORDS, Sequences
from tests.engine.pool import RankPool

WIDTH = 8


class Keeping(nn.Module):
    """Multiplies activations by a buffer, as Gemma 3 does; with a BatchNorm, if asked for."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("embed_scale", torch.tensor(2.0), persistent=False)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else None
        self.out = nn.Linear(WIDTH, WORDS)

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the first layers make of words."""
        made: torch.Tensor = self.words(inputs) * self.embed_scale
        return made

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embedded(inputs)
        if self.norm is not None:
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten())


def made(kind: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    """A model with the same weights on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return kind(**arguments)


# ---- a rank that borrows a micro-batch -------------------------------------------------------------------------------


def borrowing_case(stage: int, exact: bool) -> Any:
    """For each micro-batch that this rank borrowed: whether its buffers stayed. Two epochs of 4, 4 and 1 samples."""
    kept = []
    sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    settings = exactly.settings((2, stage), **sizes) if exact else jobs.config(start=(2, stage), **sizes)
    with jobs.job(settings, made(Keeping, norm=not exact), Sequences(9)) as job:
        module = job.engine.module
        for _ in range(2):
            for batch in job.loader:
                before = copy.deepcopy(dict(module.named_buffers()))
                job.engine.backward(job.engine(*batch))
                if job.engine.slot_is_borrowed:
                    kept.append(all(torch.equal(held, before[name]) for name, held in module.named_buffers()))
                job.engine.step()
        return kept, job.engine.global_steps
    return None


@pytest.mark.parametrize(
    ("stage", "exact"), [(1, False), (3, False), pytest.param(2, True, marks=exactly.NOT_ON_DEVICE)]
)
def test_a_borrowed_micro_batch_and_buffers_that_autograd_has_saved(pool: RankPool, stage: int, exact: bool) -> None:
    assert pool.run(borrowing_case, stage=stage, exact=exact) == [([], 6), ([True, True], 6), None, None]


# ---- modes below the root --------------------------------------------------------------------------------------------


class Towered(Keeping):
    """Has a frozen tower, whose losses in train mode are others."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Normed(), nn.Dropout(0.3))
        self.tower.requires_grad_(False)

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = super().embedded(inputs)
        return hidden + self.tower(hidden)


class Normed(nn.BatchNorm1d):
    """A BatchNorm over words."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


def tower_case(
    start: jobs.Sizes,
    steps: int,
    schedule: jobs.Schedule | None = None,
    load: str = "",
    save: str = "",
    sets_modes: bool = True,
    saves_old: bool = False,
) -> Any:
    """What this rank trained, and the modules that are in eval() at the end; only those who work at the start set them.

    saves_old: as checkpoints of before were, with the mode of the root alone.
    """

    def at_end(job: jobs.Job) -> None:
        if save and job.engine.global_steps == steps:
            with pytest.MonkeyPatch.context() as patch:
                if saves_old:
                    patch.setattr(carry, "state_of", lambda module: {**state_of(module), "modes": {}, "training": True})
                job.engine.save(f"{save}/ours")
            job.engine.save_checkpoint(f"{save}/stock")

    record = jobs.Record()
    with jobs.job(jobs.config(start=start), made(Towered)) as job:
        engine = job.engine
        if not engine.idle and sets_modes:
            engine.module.tower.eval()
        if load and not engine.idle:
            engine.load(load) if load.endswith("ours") else engine.load_checkpoint(load)
        jobs.train(job, steps, schedule, record, at_end)
        return record, [name for name, part in engine.module.named_modules() if not part.training]
    return record, None


IN_EVAL = ["tower", *[f"tower.{number}" for number in range(4)]]
STEPS = 6


def tower_losses(ranks: list[Any]) -> list[float]:
    """The losses of all ranks, if those at work kept the tower in eval() and nothing else."""
    assert all(modes in (IN_EVAL, None) for _, modes in ranks), ranks
    return jobs.global_losses([record for record, _ in ranks])


def test_modes_of_single_modules_travel(pool: RankPool, tmp_path: Path) -> None:
    """To members that wake, and to those that load in another world, whatever their scripts set."""
    static = tower_losses(pool.run(tower_case, start=(1, 1), steps=STEPS))
    woken = tower_losses(pool.run(tower_case, start=(2, 1), steps=4, schedule={2: (4, 3)}, save=str(tmp_path)))
    loaded = pool.run(tower_case, start=(3, 2), steps=STEPS, load=str(tmp_path / "ours"), sets_modes=False)
    assert jobs.furthest(woken + tower_losses(loaded), static) <= 1e-6


@pytest.mark.parametrize("name", ["ours", "stock"])
def test_modes_stay_where_a_checkpoint_has_none(pool: RankPool, tmp_path: Path, name: str) -> None:
    """As the script has set them: one of before, and one of DeepSpeed's in another layout."""
    first = tower_losses(pool.run(tower_case, start=(2, 1), steps=4, save=str(tmp_path), saves_old=True))
    static = tower_losses(pool.run(tower_case, start=(1, 1), steps=STEPS))
    loaded = tower_losses(pool.run(tower_case, start=(3, 2), steps=STEPS, load=str(tmp_path / name)))
    assert jobs.furthest(first + (loaded if name == "ours" else static[4:]), static) <= 1e-6


# ---- plain attributes ------------------------------------------------------------------------------------------------


class Counting(Keeping):
    """Keeps numbers outside of torch's tables on which its passes depend, and frequencies as in transformers 4."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.longest = 0, {"calls": [0]}, torch.tensor(4)
        self.register_buffer("frequencies", torch.arange(1.0, WIDTH + 1), persistent=False)
        self.original = self.frequencies

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen["calls"] = [self.calls, *self.seen["calls"][:1]]
        if self.calls == 2:
            self.longest, self.frequencies = torch.tensor(9), self.frequencies / 3
        if self.calls == 5 and self.longest > 4:
            self.longest, self.frequencies = torch.tensor(4), self.original
        places = torch.arange(inputs.shape[1])[:, None] * self.frequencies * 0.01 * self.seen["calls"][-1]
        hidden: torch.Tensor = super().embedded(inputs)
        self.output = hidden + places
        return self.output


def counting_case(
    start: jobs.Sizes, steps: int, schedule: jobs.Schedule | None = None, load: str = "", save: str = ""
) -> jobs.Record:
    def each(job: jobs.Job) -> None:
        if save and job.engine.global_steps == 3:
            job.engine.save(save)

    record = jobs.Record()
    settings = jobs.config(start=start, train_micro_batch_size_per_gpu=12)  # one pass a step in all worlds
    with jobs.job(settings, made(Counting)) as job:
        if load and not job.engine.idle:
            job.engine.load(load)
        jobs.train(job, steps, schedule, record, each)
    return record


def test_attributes_that_a_forward_pass_changes(pool: RankPool, tmp_path: Path) -> None:
    """They are those of the others on a member that wakes, that wakes again, and that loads."""
    steps, folder = 8, str(tmp_path / "saved")
    static = jobs.global_losses(pool.run(counting_case, start=(1, 1), steps=steps))
    schedule = {3: (4, 3), 4: (1, 1), 6: (3, 2)}
    woken = jobs.global_losses(pool.run(counting_case, start=(2, 1), steps=steps, schedule=schedule, save=folder))
    loaded = jobs.global_losses(pool.run(counting_case, start=(3, 2), steps=steps, load=folder))
    assert jobs.furthest(woken, static) <= 1e-6
    assert jobs.furthest(loaded, static[3:]) <= 1e-6
