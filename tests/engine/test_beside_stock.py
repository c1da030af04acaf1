"""A plain DeepSpeed engine in the process, as a model that another one is held against: ours trains as without it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch

from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from tests.adapters.stock import stock_engine
from tests.engine import jobs, oracle
from tests.engine.models import Sequences, small_gpt
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(2, 1), (4, 1), (3, 2), (4, 3), (2, 3), (3, 2)]
"""Idle members that come in, and leave; into stage 3, and out of it."""
ALL_WORK: list[jobs.Sizes] = [(4, 1), (4, 2), (4, 3), (4, 0), (4, 3), (4, 2)]
"""What can be beside an engine that needs all processes."""
STEPS = len(PATH)
REFERENCE = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}


def loss_of(reference: Any) -> float:
    """Of the other engine, on the same four samples at any time; all ranks ask for it."""
    inputs, targets = (torch.stack(part) for part in zip(*(Sequences()[place] for place in range(4)), strict=True))
    with torch.no_grad():
        return float(reference(inputs, targets))


def case(when: str, path: list[jobs.Sizes]) -> tuple[Any, bool, list[float]]:
    """The state at the end, on members that train there; whether the other engine has set another `linear`; its losses.

    when: that one is made, before ours on all members, or meanwhile on those that work and with an end of its own.
    """
    own, is_set, state, losses = torch.nn.functional.linear, False, None, list[float]()

    def each(made: jobs.Job) -> None:
        nonlocal is_set
        if when == "meanwhile" and made.engine.global_steps == 1:
            other, *_ = deepspeed.initialize(model=small_gpt(seed=3), config=REFERENCE)
            is_set = torch.nn.functional.linear is not own
            other.destroy()
        if when == "before" and made.engine.global_steps in (2, 4):
            losses.append(loss_of(reference))

    with stock_engine(small_gpt(seed=3), REFERENCE) if when == "before" else nullcontext() as reference:
        if when == "before":
            is_set = torch.nn.functional.linear is not own
            losses.append(loss_of(reference))
        with jobs.job(jobs.config("bf16", path[0])) as made:
            jobs.train(made, STEPS, dict(enumerate(path[1:], 1)), each=each)
            state = oracle.gather(made.engine)
        if when == "before":
            losses.append(loss_of(reference))
    return state, is_set, losses


@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_gradients_are_added_up_as_without_it(pool: RankPool, when: str) -> None:
    """Stage 3 sets a `linear` for the whole process that yields gradients in another order: members that have it, and
    others that have not, would add up unlike ones.
    """
    path = ALL_WORK if when == "before" else PATH
    expected, found = (pool.run(case, when=each, path=path)[0] for each in ("never", when))
    assert found[1] and not expected[1]
    assert oracle.differences(found[0], expected[0]) == []
    if when == "before":
        first, *others = found[2]
        assert others == pytest.approx([first] * 3, rel=1e-6), "in two steps, and after the job"


TRAINED = {
    **REFERENCE,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}
FROZEN = {**REFERENCE, "zero_optimization": {"stage": 0}}
FOUND = r"beside an engine of deepspeed.initialize in ZeRO stage {} over 4: .*idle processes wait in their loader"


def refused(stage: int, ask: Any) -> None:
    with pytest.raises((SwitchRefused, UnsupportedError), match=FOUND.format(stage)):
        ask()


def beside_case() -> None:
    """A plain engine of each kind, before ours and after it; once it is destroyed, nothing stands in the way."""
    for config, stage in ((REFERENCE, 3), (TRAINED, 1)):
        with stock_engine(small_gpt(seed=3), config):
            refused(stage, lambda: jobs.job(jobs.config(start=(3, 1))).__enter__())
            with jobs.job(jobs.config(start=(4, 1))) as made:
                refused(stage, lambda made=made: made.engine.switch(data=2))
                assert FOUND.split("{")[0] in made.engine.plan(data=2).refusal
                jobs.train(made, 2, {1: (4, 2)})
    with stock_engine(small_gpt(seed=3), FROZEN), jobs.job(jobs.config(start=(4, 1))) as made:
        jobs.train(made, 2, {1: (2, 2)})
    with jobs.job(jobs.config(start=(3, 1))) as made:
        if not made.engine.idle:
            other, *_ = deepspeed.initialize(model=small_gpt(seed=3), config=REFERENCE)
            with pytest.raises(SwitchRefused, match=r"ZeRO stage 3 over 3: .* a switch destroys the plain"):
                made.engine.switch(data=4)
            other.destroy()
        jobs.train(made, 2, {1: (4, 2)})


def test_a_plain_engine_wants_all_processes(pool: RankPool) -> None:
    pool.run(beside_case)
