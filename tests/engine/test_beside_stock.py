"""A plain DeepSpeed engine in the process, as a model that another one is held against: ours trains as without it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import deepspeed
import pytest
import torch

from tests.adapters.stock import stock_engine
from tests.engine import jobs, oracle
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(4, 1), (3, 2), (4, 3), (2, 3), (3, 2)]
"""Idle members that come in, and leave; into stage 3, and out of it."""
STEPS = len(PATH) + 1
REFERENCE = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}


def case(when: str) -> tuple[Any, bool]:
    """The state at the end, on members that train there; whether the other engine has set another `linear`.

    when: that one is made, before ours on all members, or meanwhile on those that work and with an end of its own.
    """
    own, is_set = torch.nn.functional.linear, []

    def note(made: jobs.Job | None) -> None:
        is_set.append(torch.nn.functional.linear is not own)

    def meanwhile(made: jobs.Job) -> None:
        if when == "meanwhile" and made.engine.global_steps == 1:
            other, *_ = deepspeed.initialize(model=small_gpt(seed=3), config=REFERENCE)
            note(made)
            other.destroy()

    with ExitStack() as stack:
        if when == "before":
            stack.enter_context(stock_engine(small_gpt(seed=3), REFERENCE))
            note(None)
        with jobs.job(jobs.config("bf16", (2, 1))) as made:
            jobs.train(made, STEPS, dict(enumerate(PATH, 1)), each=meanwhile)
            return oracle.gather(made.engine), is_set == [True]
    return None, False


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_gradients_are_added_up_as_without_it(pool: RankPool, when: str) -> None:
    """Stage 3 sets a `linear` for the whole process that yields gradients in another order: members that have it, and
    others that have not, would add up unlike ones.
    """
    expected, found = (pool.run(case, when=each)[0] for each in ("never", when))
    assert found[1] and not expected[1]
    assert oracle.differences(found[0], expected[0]) == []
