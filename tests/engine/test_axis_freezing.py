"""What is trained changes where tensors are cut, or experts apart: as it does where every tensor is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from ds_dynatrain.space import Layout
from tests.engine import axis_walks, freezing, jobs
from tests.engine.axis_walks import Subject
from tests.engine.mixtures import autoep, native
from tests.engine.pipelined_experts import subject as pipelined
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model

Changes = Sequence[tuple[Sequence[str], Sequence[str]]]


def walked(
    find: Callable[[], Subject], dtype: str, path: Sequence[Layout], changes: Changes
) -> tuple[dict[int, list[float]], list[str]]:
    """Train at each place of a path, change what is trained, and train again; what was not as it should be then."""
    subject, losses, wrong = find(), dict[int, list[float]](), list[str]()
    given, samples = axis_walks.configured(subject, dtype, path[0]), subject.data(20 * axis_walks.BATCH)
    with jobs.job(given, subject.build(), samples, groups=False) as made:
        engine, batches = made.engine, iter(made.loader)
        batch = next(batches)  # a member that is idle waits in here
        number = engine.generation - 1
        while True:
            losses[number] = [subject.step(engine, batch)]
            wrong += freezing.change(engine, *changes[number], places=subject.places)
            losses[number] += [subject.step(engine, next(batches)) for _ in range(2)]
            if number + 1 == len(changes):
                break
            if len(path) > 1:
                engine.switch(path[number + 1], at=engine.global_steps)
            batch = next(batches)
            number = engine.generation - 1 if len(path) > 1 else number + 1
    return losses, wrong


def compare(pool: RankPool, find: Callable[[], Subject], dtype: str, path: Sequence[Layout], changes: Changes) -> None:
    """With a run on four data ranks that makes the same changes and never switches."""
    same: dict[str, Any] = {"find": find, "dtype": dtype, "changes": changes, "seconds": 240}
    apart = pool.run(walked, path=list(path), **same)
    whole = pool.run(walked, path=[Layout(data=4, zero_stage=1)], **same)
    assert not any(wrong for _, wrong in (*apart, *whole)), [wrong for _, wrong in (*apart, *whole)]
    found, expected = (jobs.means_by_place([losses for losses, _ in each]) for each in (apart, whole))
    for number in range(len(changes)):
        assert jobs.furthest(found[number], expected[number]) <= (1e-5 if dtype == "fp32" else 1e-3), number


LLAMA: Changes = (
    ((), ("model.embed_tokens", "model.layers.0.self_attn")),
    ((), ("model.layers.1.mlp",)),
    (("model.layers.0.self_attn.q",), ("lm_head",)),
    (("model.layers.1.mlp", "model.embed_tokens"), ()),
)


EXPERTS: dict[str, Changes] = {
    "AutoEP": (
        ((), ("model.layers.0.mlp.experts.w1",)),
        (("model.layers.0.mlp.experts.w1",), ("model.layers.0.mlp.experts.w2",)),
        ((), ("lm_head", "model.layers.1.mlp.experts")),
        (("model.layers.0.mlp.experts", "lm_head"), ()),
    ),
    "deepspeed.moe": (
        ((), ("first.deepspeed_moe.experts",)),
        ((), ("words.", "norm.")),
        (("first.",), ("second.deepspeed_moe.gate",)),
        (("words.", "second."), ("first.deepspeed_moe.experts",)),
    ),
    "stages": (((), ("1.",)), ((), ("5.", "2.")), (("1.",), ()), (("2.", "5."), ("3.",))),
}


def at(data: int, stage: int = 1, **axes: int) -> Layout:
    """A layout."""
    return Layout(data=data, zero_stage=stage, **axes)


@pytest.mark.parametrize(
    ("dtype", "places"), [("fp32", 2), *(pytest.param(dtype, 4, marks=pytest.mark.full) for dtype in ("fp32", "bf16"))]
)
def test_where_tensors_are_cut(pool: RankPool, dtype: str, places: int) -> None:
    path = [at(2, tensor=2), at(1, 3, tensor=2), at(1, 2, tensor=4), at(2, 0, tensor=2)]
    compare(pool, partial(language_model, "llama of 4 kv"), dtype, path[:places], LLAMA[:places])


APART: dict[str, tuple[Callable[[], Subject], list[Layout]]] = {
    "AutoEP": (autoep, [at(4, expert=2), at(2, 2, expert=2), at(4, 3, expert=4), at(4, 0, expert=2)]),
    "deepspeed.moe": (native, [at(4, expert=2), at(2, 2, expert=2), at(4, expert=4), at(4, 0, expert=2)]),
    "stages": (pipelined, [at(2, pipe=2, expert=2), at(2, expert=2), at(4, expert=4), at(1, pipe=4)]),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", APART)
def test_where_experts_are_apart(pool: RankPool, kind: str) -> None:
    find, path = APART[kind]
    compare(pool, find, "fp32", path, EXPERTS[kind])
