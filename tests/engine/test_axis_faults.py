"""Every fault in a change of every axis: found out, rolled back to the very same objects, and no trace is left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat
from typing import Any

import pytest

from tests.engine import axis_walks, faults
from tests.engine.pool import RankPool
from tests.engine.subjects import CHANGES
from tests.engine.transitions import layout

LAST = 2
"""Steps without a fault, at the end."""


def run(change: str, asks: bool) -> list[float]:
    """Losses of a run in which one change fails by each fault in turn, and is let through at last; or is not asked for.

    What a roll-back has to leave as it was is checked here.
    """
    wanted = CHANGES[change]
    subject, source, target = wanted.find(), layout(wanted.source), layout(wanted.target)
    names = [name for name in faults.REASONS if name not in wanted.without]
    losses, stale = list[float](), faults.Stale()
    with axis_walks.started(subject, "fp32", source) as made, faults.injected(names, stale):
        engine, batches = made.engine, chain.from_iterable(repeat(made.loader))
        batch, parts = next(batches), list[list[int]]()
        for name in names if asks else ():
            stale.update(
                {key: held.clone() for key, held in engine._host.state_buffers()[0].items() if key[0] == "exp_avg"}
            )
            losses.append(subject.step(engine, batch))
            parts.append(belongings(engine))
            engine.switch(target, at=engine.global_steps)
            with diverged(engine) if name == "diverged replica" else nullcontext():
                batch = next(batches)
            event = engine.last_switch
            assert event.outcome == "rolled_back" and engine.layout == source, (name, event.outcome)
            assert re.search(faults.REASONS[name], event.reason), (name, event.reason)
        losses.append(subject.step(engine, batch))
        parts.append(belongings(engine))
        assert all(other == parts[0] for other in parts), "the very same objects, and no hook more"
        while len(losses) < len(names) + LAST:
            losses.append(subject.step(engine, next(batches)))
        if asks:
            engine.switch(target, at=engine.global_steps)
            subject.step(engine, next(batches))
            assert engine.last_switch.outcome == "committed" and engine.layout == target, engine.last_switch.reason
    return losses


def belongings(engine: Any) -> list[int]:
    """Which objects the model consists of, and how many hooks and entries of optimizer groups there are."""
    model, held = engine.module, list(engine.module.parameters())
    hooks = [hook for part in model.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]
    groups = [each for group in engine.basic_optimizer.param_groups for each in group]
    return [*map(id, model.modules()), *map(id, held), len(hooks), len(groups)]


@contextmanager
def diverged(engine: Any) -> Iterator[None]:
    """Inside the block one weight on rank 1 is another than on rank 0."""
    weight = next(held for name, held in engine.module.named_parameters() if name.endswith("norm.weight")).data[3:4]
    was = weight.clone()
    weight.mul_(0.5 if engine.rank == 1 else 1.0)
    try:
        yield
    finally:
        weight.copy_(was)


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_every_fault_is_found_and_leaves_no_trace(pool: RankPool, change: str) -> None:
    expected = pool.run(run, change=change, asks=False, seconds=120)
    found = pool.run(run, change=change, asks=True, seconds=120)
    for rank in range(layout(CHANGES[change].source).world_size):
        assert found[rank] == expected[rank] and len(found[rank]) > LAST
