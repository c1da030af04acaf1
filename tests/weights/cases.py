"""What ranks do in the tests of this folder: train, look at weights by a source, switch, and look again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as td

from ds_dynatrain import weights
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, oracle
from tests.engine.axis_walks import Subject

Find = Callable[[], Subject]
Named = dict[str, torch.Tensor]


def expected(engine: Any, subject: Subject) -> Named:
    """The weights by their logical names, flat, gathered the slow way; a collective of all ranks."""
    tensors = oracle.gather(engine, subject.places).tensors
    return {name: held for (name, kind), held in tensors.items() if kind == "weight"}


def differing(found: Named, wanted: Named) -> list[str]:
    """Names that are on one side only, or whose bits differ."""
    apart = sorted(found.keys() ^ wanted.keys())
    return apart + [
        name
        for name in sorted(found.keys() & wanted.keys())
        if not torch.equal(found[name].flatten().view(torch.uint8), wanted[name].view(torch.uint8))
    ]


def at_each(find: Find, dtype: str, path: list[Layout], look: Callable[[Any, Subject], Any], **block: Any) -> list[Any]:
    """Train a step in each layout of a path, and return what `look(engine, subject)` finds there."""
    subject, found = find(), list[Any]()
    with axis_walks.started(subject, dtype, path[0], **block) as made:
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)  # a member that starts idle wakes in here
        while True:
            place = engine.generation - 1
            subject.step(engine, batch)
            found.append(look(engine, subject))
            if place + 1 == len(path):
                return found
            engine.switch(path[place + 1], at=engine.global_steps)
            batch = next(batches)
    return found


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The names of the collectives that are called inside the block."""
    found: list[str] = []
    names = ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "broadcast", "all_gather", "send", "recv")

    def counting(name: str) -> Callable[..., Any]:
        call = getattr(td, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            found.append(name)
            return call(*arguments, **named)

        return counted

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(td, name, counting(name)))
        yield found


def full_and_runs(engine: Any, subject: Subject) -> dict[str, Any]:
    """Compare `iter_full` and all ranks' `runs` with the oracle; return what is wrong, and the numbers of the pass."""
    wanted = expected(engine, subject)
    source = weights.source(engine, "module")
    with counted_collectives() as collectives:
        full = {name: tensor.clone() for name, tensor in source.iter_full()}
    metas = source.metadata
    assert [meta.name for meta in metas] == list(full)
    assert all(full[meta.name].shape == meta.shape and full[meta.name].dtype == meta.dtype for meta in metas)
    assert all(held.is_meta == (engine.rank > 0) for held in full.values())
    mine = [(name, extent, values.contiguous().cpu()) for name, extent, values in source.runs()]
    gathered: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(gathered, [(n, e, v.view(torch.uint8).numpy(), v.dtype) for n, e, v in mine])
    tiled = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype).flatten() for meta in metas}
    times = {name: torch.zeros(held.numel(), dtype=torch.int64) for name, held in tiled.items()}
    for name, extent, as_bytes, dtype in (each for rank in gathered for each in rank):
        index = torch.arange(extent.count)[:, None] * extent.step + torch.arange(extent.length) + extent.start
        tiled[name][index] = torch.from_numpy(as_bytes).view(dtype).view(index.shape)
        times[name][index] += 1
    wrong = [f"{name} is not tiled once" for name, count in times.items() if not (count == 1).all()]
    wrong += differing(tiled, wanted) + (differing(full, wanted) if engine.rank == 0 else [])
    assert len(collectives) == source.collectives
    layers = len({each.layer for bucket in source.buckets for each in bucket if not each.is_outside})
    return {"wrong": wrong, "collectives": len(collectives), "layers": layers}


def at_each_full(find: Find, path: list[Layout], dtype: str = "bf16") -> list[Any]:
    """`full_and_runs` in each layout of a path."""
    return at_each(find, dtype, path, full_and_runs)
