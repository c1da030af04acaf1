"""What a pipeline trains on: `training_data` as under plain DeepSpeed, and what users give it to read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as td
from deepspeed.utils import RepeatingLoader, groups
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import ds_dynatrain
from ds_dynatrain.data import Cursor
from ds_dynatrain.errors import DataError
from ds_dynatrain.space import Layout
from tests.engine import jobs
from tests.engine.models import Sequences, decay_groups
from tests.engine.pipeline_walks import job, layout, micro_batches, settings
from tests.engine.pipelines import pipeline
from tests.engine.pool import RankPool

SAMPLES = 48
EPOCH = SAMPLES // 12
Seen = dict[int, list[Any]]
"""Optimizer step -> the samples of a rank's micro-batches, in their order."""


def noting(engine: Any) -> Seen:
    """What this rank reads from now on."""
    seen: Seen = {}

    def note(batch: Any) -> Any:
        seen.setdefault(int(engine.global_steps), []).extend(map(tuple, batch[0].tolist()))
        return batch

    engine.set_batch_fn(note)
    return seen


def stock(stages: int, steps: int) -> tuple[list[float], Seen]:
    """DeepSpeed itself, from `training_data`."""
    given = {key: value for key, value in settings(layout(1, 1)).items() if key != "dynatrain"}
    given["gradient_accumulation_steps"] = 12 // 3 // (td.get_world_size() // stages)
    model = pipeline("tied", stages)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=decay_groups(model), config=given, training_data=Sequences(SAMPLES)
    )
    seen = noting(engine)
    losses = [engine.train_batch().item() for _ in range(steps)]
    engine.destroy()
    groups._release_process_group_references()
    return losses, seen


def ours(stages: int, steps: int, path: Mapping[int, Layout], reshuffle: bool = False) -> tuple[list[float], Seen]:
    """The same script with the other call, through the layouts of `path` at their steps."""
    model = pipeline("tied", stages)
    given = settings(layout(stages, td.get_world_size() // stages))
    given["dynatrain"]["data"] = {"reshuffle": reshuffle}
    engine, *_ = ds_dynatrain.initialize(
        model=model, model_parameters=decay_groups(model), config=given, training_data=Sequences(SAMPLES)
    )
    try:
        seen, losses = noting(engine), []
        for step in range(steps):
            if step in path:
                engine.switch(path[step], at=step)
            losses.append(engine.train_batch().item())
        return losses, seen
    finally:
        engine.destroy()


def by_step(ranks: list[tuple[list[float], Seen]], step: int) -> set[Any]:
    """All samples of a global batch."""
    return {sample for _, seen in ranks for sample in seen.get(step, [])}


@pytest.mark.full
def test_training_data_is_what_deepspeed_trains_on(pool: RankPool) -> None:
    stages, steps, before = 2, EPOCH + 1, 2
    expected = pool.run(stock, stages=stages, steps=steps, seconds=120)
    path = {before: layout(4, 1), 4: layout(1, 4)}
    found = pool.run(ours, stages=stages, steps=steps, path=path, seconds=120)
    for (_, seen), (_, stock_seen) in zip(found, expected, strict=True):
        for step in range(before):
            assert seen.get(step) == stock_seen.get(step), "each rank reads what it reads there, in that order"
    assert jobs.furthest(found[0][0][:before], expected[0][0][:before]) < 5e-7
    assert jobs.furthest(found[0][0], expected[0][0]) < 1e-6
    for step in range(steps):
        assert by_step(found, step) == by_step(expected, step)
    assert len(set().union(*(by_step(found, step) for step in range(EPOCH)))) == SAMPLES, "each sample once"


@pytest.mark.full
def test_an_order_of_ones_own(pool: RankPool) -> None:
    found = pool.run(ours, stages=2, steps=2 * EPOCH, path={1: layout(4, 1)}, reshuffle=True)
    epochs = [[by_step(found, epoch * EPOCH + step) for step in range(EPOCH)] for epoch in (0, 1)]
    assert epochs[0][0] != epochs[1][0] and len(set().union(*epochs[1])) == SAMPLES
    in_order = {tuple(Sequences(SAMPLES)[at][0].tolist()) for at in range(12)}
    assert epochs[0][0] != in_order and torch.tensor(found[0][0]).isfinite().all()


# ---- what users give it to read from --------------------------------------------------------------------------------


def share(place: int, places: int) -> DataLoader[Any]:
    """The micro-batches of one of so many pipelines, as scripts for plain DeepSpeed make them."""
    data = Sequences(SAMPLES)
    return DataLoader(data, 3, sampler=DistributedSampler(data, places, place, shuffle=False))


def stock_calls(stages: int) -> list[list[float]]:
    """DeepSpeed itself: given by `set_dataloader` until it ends, by `set_dataiterator`, by `train_batch` once."""
    given = {key: value for key, value in settings(layout(1, 1)).items() if key != "dynatrain"}
    given["gradient_accumulation_steps"] = 12 // 3 // (td.get_world_size() // stages)
    model = pipeline("tied", stages)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=decay_groups(model), config=given)
    found = calls(engine, share(engine.grid.get_data_parallel_id(), engine.grid.data_parallel_size))
    engine.destroy()
    groups._release_process_group_references()
    return found


def calls(engine: Any, loader: DataLoader[Any]) -> list[list[float]]:
    """The losses of an epoch for each way to give samples."""
    engine.set_dataloader(loader)
    by_loader = [engine.train_batch().item() for _ in range(EPOCH)]
    engine.set_dataiterator(iter(loader))
    by_iterator = [engine.train_batch().item() for _ in range(EPOCH)]
    first = engine.train_batch(RepeatingLoader(loader)).item()
    evaluated = [engine.eval_batch(iter(loader)).item()]
    return [by_loader, by_iterator, [first, *(engine.train_batch().item() for _ in range(EPOCH))], evaluated]


def our_calls(stages: int) -> list[list[float]]:
    """The same with us, without a change."""
    with job(settings(layout(stages, td.get_world_size() // stages)), "tied") as made:
        return calls(made.engine, share(made.engine.data_rank, made.engine.data))


@pytest.mark.full
def test_iterators_of_ones_own_are_read_as_in_deepspeed(pool: RankPool) -> None:
    expected = pool.run(stock_calls, stages=2)
    for found, stock_found in zip(pool.run(our_calls, stages=2), expected, strict=True):
        for losses, stock_losses in zip(found, stock_found, strict=True):
            assert jobs.furthest(losses, stock_losses) < 5e-7


PATH = {2: layout(2, 2, 0), 3: layout(2, 2, 1, (0, 2, 7)), 4: layout(4, 1), 6: layout(2, 1), 8: layout(1, 4)}
"""Two changes that leave everybody at the same place, and three that do not; members are idle in one."""
STEPS = 10


def endless(engine: Any) -> Iterator[Any]:
    """All micro-batches of this member from now on, one global batch after the other."""
    while True:
        yield from micro_batches(int(engine.global_steps), engine.data, engine.data_rank)


def given_anew() -> list[float]:
    """An iterator of the user's own, another one after each change: by a function of `on_switch`."""
    losses: list[float] = []
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        engine.on_switch(lambda _: engine.set_dataiterator(endless(engine)))
        engine.set_dataiterator(endless(engine))
        while engine.idle or engine.global_steps < STEPS:
            if not engine.idle and engine.global_steps in PATH and engine.layout != PATH[engine.global_steps]:
                engine.switch(PATH[engine.global_steps], at=engine.global_steps)
            losses.append(engine.train_batch().item())
    return losses


def not_given_anew(by_call: bool) -> list[float]:
    """One iterator throughout: refused before anything is read, where a change gives others to this member."""
    losses: list[float] = []
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        feed = endless(engine)
        if not by_call:
            engine.set_dataiterator(feed)
        for step in range(6):
            if step in PATH:
                engine.switch(PATH[step], at=step)
            if step == 4:
                for _ in range(2):
                    with pytest.raises(DataError, match=r"generator .* pipe=2 data=2, .* pipe=4 data=1.*on_swi"):
                        engine.train_batch(feed if by_call else None)
                assert engine.layout == PATH[4] and engine.global_steps == 4
                engine.set_dataiterator(feed := endless(engine))
            losses.append(engine.train_batch(feed if by_call else None).item())
    return losses


def of_our_loader() -> list[float]:
    """Given once in each of the ways, and read across changes; each begins another epoch."""
    losses: list[float] = []
    with job(settings(layout(2, 2)), "tied") as made:
        engine, loader = made.engine, made.loader
        ways = [
            lambda: engine.set_dataloader(loader),
            lambda: engine.set_dataiterator(iter(loader)),
            lambda: engine.set_dataiterator(loader),
        ]
        for epoch, give in enumerate(ways):
            give()
            engine.switch((layout(4, 1), layout(2, 2), layout(1, 4))[epoch], at=2 * epoch + 1)
            losses += [engine.train_batch().item(), engine.train_batch(loader if epoch == 2 else None).item()]
            assert loader.cursor == Cursor(epoch, 2)
        losses += [engine.train_batch().item() for _ in range(len(loader.dataset) // 12 - 2)]
        losses.append(engine.train_batch().item())
        assert loader.cursor == Cursor(3, 1), "the loader itself goes on epoch after epoch"
        engine.set_dataloader(loader)
        for _ in range(len(loader.dataset) // 12):
            engine.train_batch()
        for _ in range(2):
            with pytest.raises(StopIteration):
                engine.train_batch()
    return losses


@pytest.mark.full
def test_iterators_of_ones_own_across_changes(pool: RankPool) -> None:
    found = pool.run(given_anew)
    static = pool.run(ours_from_own, steps=STEPS)[0]
    assert all(losses == found[0] for losses in found if len(losses) == STEPS)
    assert jobs.furthest(found[0], static) < 1e-6
    for by_call in (False, True):
        assert jobs.furthest(pool.run(not_given_anew, by_call=by_call)[0], static[:6]) < 1e-6


def ours_from_own(steps: int) -> list[float]:
    """Without a change."""
    with job(settings(layout(2, 2)), "tied") as made:
        made.engine.set_dataiterator(endless(made.engine))
        return [made.engine.train_batch().item() for _ in range(steps)]


def test_loaders_of_ours_across_changes(pool: RankPool) -> None:
    found = pool.run(of_our_loader)
    assert all(losses == found[0] for losses in found)


def refused_at_the_call() -> None:
    """What is no iterator; and nothing to read at all."""
    with job(settings(layout(2, 2)), "tied") as made:
        engine = made.engine
        with pytest.raises(DataError, match=r"Sequences is no iterator; .* set_dataloader"):
            engine.set_dataiterator(Sequences())
        engine._parts.train_loaders.clear()
        with pytest.raises(DataError, match="without data"):
            engine.train_batch()


def test_what_cannot_be_read_is_refused(pool: RankPool) -> None:
    pool.run(refused_at_the_call)
