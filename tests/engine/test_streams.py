"""Streams on real ranks: the losses of the same samples with an index, and ranks that read different samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, WeightedRandomSampler

from ds_dynatrain.errors import DataError
from tests.engine import jobs
from tests.engine.models import Sequences
from tests.engine.pool import RankPool

STEPS = 12
SCHEDULE = {2: (4, 3), 5: (1, 2), 9: (3, 0)}
SAMPLES = 90
"""Seven global batches and a half."""


class Texts(IterableDataset[Any]):
    """The samples of `Sequences`; a part of them if `part` is (first, of)."""

    def __init__(self, part: tuple[int, int] = (0, 1)) -> None:
        self.part = part

    def __iter__(self) -> Iterator[Any]:
        data, (first, count) = Sequences(SAMPLES), self.part
        return (data[index] for index in range(first, SAMPLES, count))


def collated(rows: list[dict[str, int]]) -> Any:
    samples = Sequences(SAMPLES)
    return torch.utils.data.default_collate([samples[row["index"]] for row in rows])


def case(kind: str, schedule: jobs.Schedule) -> jobs.Record:
    data: Any = DataLoader(Subset(Sequences(SAMPLES), range(SAMPLES)), shuffle=False) if kind == "indexed" else Texts()
    if kind == "datasets":
        from datasets import IterableDataset as Streaming

        made: Any = Streaming.from_generator(lambda: ({"index": index} for index in range(SAMPLES)))
        samples = Sequences(SAMPLES)
        data = DataLoader(
            made, collate_fn=lambda rows: torch.utils.data.default_collate([samples[row["index"]] for row in rows])
        )
    return jobs.run(jobs.config(), STEPS, schedule, data=data)


def test_a_stream_trains_what_an_indexed_data_set_trains(pool: RankPool) -> None:
    indexed = jobs.global_losses(pool.run(case, kind="indexed", schedule={}))
    assert jobs.furthest(jobs.global_losses(pool.run(case, kind="stream", schedule={})), indexed) == 0
    for kind in ("stream", "datasets"):
        assert jobs.furthest(jobs.global_losses(pool.run(case, kind=kind, schedule=SCHEDULE)), indexed) <= 1e-6


def resumed_case(folder: Path, start: jobs.Sizes, steps: int) -> jobs.Record:
    record = jobs.Record()
    with jobs.job(jobs.config(start=start), data=Texts()) as made:
        if (folder / "half").exists() and not made.engine.idle:
            made.engine.load(folder, "half")

        def save(made: jobs.Job) -> None:
            if made.engine.global_steps == 10 == steps:  # a pass that is left by a break is over
                made.engine.save(folder, "half")

        jobs.train(made, steps, record=record, each=save)
    return record


def test_a_position_in_a_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    """In the second pass, which the new job begins on other ranks."""
    whole = jobs.global_losses(pool.run(case, kind="stream", schedule={}))
    halves = [
        *jobs.global_losses(pool.run(resumed_case, folder=tmp_path, start=(2, 1), steps=10)),
        *jobs.global_losses(pool.run(resumed_case, folder=tmp_path, start=(3, 2), steps=STEPS)),
    ]
    assert jobs.furthest(halves, whole) <= 1e-6


def divided_case(kind: str) -> str:
    with jobs.job(jobs.config(start=(4, 1))) as made:
        rank = made.engine.data_rank
        generator = torch.Generator().manual_seed(rank)
        weighted = WeightedRandomSampler([1.0] * 96, 96, generator=generator)
        data = Texts((rank, 4)) if kind == "stream" else DataLoader(Sequences(), sampler=weighted)
        with pytest.raises(DataError, match=r"the ranks read different samples as global batch 0 of epoch 0") as caught:
            next(iter(made.engine.loader(data, num_workers=0, name="divided")))
        return str(caught.value)


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_ranks_that_read_different_samples(pool: RankPool, kind: str) -> None:
    assert len({*pool.run(divided_case, kind=kind)}) == 1
