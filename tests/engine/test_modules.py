"""What modules keep besides parameters: buffers, the modes of single modules, and plain attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(inputs) * self.embed_scale
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
