"""Many changes of the axes in one run: nothing is left behind, losses stay where static runs are, there and back."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from itertools import chain, pairwise, repeat
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.space import Layout
from tests.engine import axis_walks, jobs
from tests.engine.pool import RankPool
from tests.engine.subjects import CHANGES, SUBJECTS
from tests.engine.transitions import TABLE, accepted, layout

Losses = dict[int, list[float]]


def arrivals(engine: Any, loader: Any, path: list[Layout]) -> Iterator[tuple[int, Any]]:
    """Go a path, one step at each place: (number of the place, a batch there); the caller takes the step with it."""
    batches = chain.from_iterable(repeat(loader))
    batch = next(batches)  # a member that starts idle wakes in here
    while True:
        number = engine.generation - 1
        assert engine.layout == path[number], engine.last_switch
        yield number, batch
        if number + 1 == len(path):
            return
        engine.switch(path[number + 1], at=engine.global_steps)
        batch = next(batches)


# ---- fifty switches -------------------------------------------------------------------------------------------------

SWITCHES = 50
CYCLES = {
    "AutoTP": "d2t2z1 > t4z3 > d4z2 > t2z1 > t3z0",
    "AutoEP": "d4e2z1 > d4e4z3 > d4z2 > d2e2z1 > d3z0",
    "deepspeed.moe": "d4e2z1 > d4e4z2 > d4z1 > d2e2z2 > d3z0",
    "PipelineModule": "p2d2z1 > p4z1 > d4z0 > p2z1 > p3z0",
    "Ulysses": "d2s2z1 > s4z3 > d4z2 > s2z1 > s3z0",
}
"""After each round the layout is the first one again."""
ALLOCATOR = 20
"""A twentieth of resident memory may be the allocator's: it grows in the first switches (docs/benchmarks.md)."""


def many(kind: str) -> list[dict[str, int]]:
    """What this process holds after each round."""
    subject, cycle = SUBJECTS[kind](), [layout(short) for short in CYCLES[kind].split(" > ")]
    path = [cycle[number % len(cycle)] for number in range(SWITCHES + 1)]
    groups, found = len(c10d._world.pg_map), list[dict[str, int]]()
    with axis_walks.started(subject, "fp32", path[0]) as made:
        for number, batch in arrivals(made.engine, made.loader, path):
            subject.step(made.engine, batch)
            if number % len(cycle) == 0:
                found.append(holdings(made.engine))
    assert len(c10d._world.pg_map) == groups
    return found


def holdings(engine: Any) -> dict[str, int]:
    """Counts of what a switch could leave behind, and bytes."""
    engine._parts.control.teardowns.finish(engine._parts.control.timeout_seconds)
    gc.collect()
    tensors = [held for held in gc.get_objects() if type(held) in (torch.Tensor, torch.nn.Parameter)]
    parts = list(engine.module.modules())
    return {
        "files": jobs.least("fd"),
        "threads": threading.active_count(),
        "tasks": jobs.least("task"),
        "groups": len(c10d._world.pg_map),
        "hooks": sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts),
        "modules": sum(isinstance(held, torch.nn.Module) for held in gc.get_objects()),
        "tensors": len(tensors),
        "bytes": sum({held.untyped_storage().data_ptr(): held.untyped_storage().nbytes() for held in tensors}.values()),
        "resident": jobs.resident_bytes(),
    }


@pytest.mark.full
@pytest.mark.parametrize("kind", CYCLES)
def test_fifty_switches_leave_nothing_behind(pool: RankPool, kind: str) -> None:
    pool.renew()
    for rank, found in enumerate(pool.run(many, kind=kind, seconds=240)):
        assert len(found) == 1 + SWITCHES // 5
        for name, then in found[2].items():
            slack = then // ALLOCATOR if name == "resident" else 0
            assert found[-1][name] <= then + slack, (rank, name, [each[name] for each in found])


# ---- losses over a chain --------------------------------------------------------------------------------------------


def trained(kind: str, path: list[Layout]) -> Losses:
    """The loss of each step of a chain on this rank; a path that stays in place never switches."""
    subject, losses = SUBJECTS[kind](), dict[int, list[float]]()
    with axis_walks.started(subject, "fp32", path[0]) as made:
        if len(set(path)) > 1:
            for number, batch in arrivals(made.engine, made.loader, path):
                losses[number] = [subject.step(made.engine, batch)]
        else:
            batches = chain.from_iterable(repeat(made.loader))
            losses = {number: [subject.step(made.engine, next(batches))] for number in range(len(path))}
    return losses


def means(pool: RankPool, kind: str, path: list[Layout]) -> list[float]:
    """The mean loss of each step over the ranks that took it."""
    return [loss for (loss,) in jobs.means_by_place(pool.run(trained, kind=kind, path=path, seconds=120)).values()]


def drawn(kind: str, seed: int, layouts: int, switches: int) -> list[Layout]:
    """A path over a few layouts of a class of models, in which each is another one than the one before."""
    draw, rows = random.Random(seed), TABLE[kind]
    left_out = set(map(layout, rows.left_out))
    few = draw.sample([each for each in accepted(rows) if each not in left_out], layouts)
    path = few[:]
    while len(path) <= switches:
        path.append(draw.choice([each for each in few if each != path[-1]]))
    return path


def check_chain(pool: RankPool, kind: str, path: list[Layout]) -> None:
    """The chain is no further from a static run than twice what static runs are from each other."""
    assert all(one != other for one, other in pairwise(path))
    chained = means(pool, kind, path)
    static = [means(pool, kind, [one] * len(path)) for one in dict.fromkeys(path)]
    spread = max(jobs.furthest(one, other) for one in static for other in static)
    distance = max(jobs.furthest(chained, one) for one in static)
    print(f"{kind}, {len(path) - 1} switches: {distance:.1e} from a static run, spread of these {spread:.1e}")
    assert 0 < distance <= 2 * spread


@pytest.mark.full
def test_a_chain_of_random_layouts(pool: RankPool) -> None:
    check_chain(pool, "PipelineModule", drawn("PipelineModule", 3, 3, 8))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", TABLE)
def test_more_chains(pool: RankPool, kind: str, seed: int) -> None:
    check_chain(pool, kind, drawn(kind, seed, 4, 16))


# ---- there and back -------------------------------------------------------------------------------------------------

BETWEEN = 3


def returned(change: str, asks: bool) -> list[float]:
    """Losses of a run that goes to another layout and back between two steps, or of one that stays."""
    wanted, losses = CHANGES[change], list[float]()
    subject, source = wanted.find(), layout(wanted.source)
    with axis_walks.started(subject, "fp32", source) as made:
        engine, batches = made.engine, iter(made.loader)
        for number in range(2 * BETWEEN):
            for target in (layout(wanted.target), source) if asks and number == BETWEEN else ():
                if engine.layout != target:  # it may have been idle meanwhile
                    engine.switch(target, at=engine.global_steps)
                    engine.boundary()
            losses.append(subject.step(engine, next(batches)))
        assert engine.layout == source and engine.generation == (3 if asks else 1)
    return losses


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_there_and_back_is_bitwise(pool: RankPool, change: str) -> None:
    expected = pool.run(returned, change=change, asks=False)
    assert pool.run(returned, change=change, asks=True) == expected
