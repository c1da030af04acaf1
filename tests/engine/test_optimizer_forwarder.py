"""The optimizer that `initialize` hands out: torch's to whoever asks, and the same object in every world."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.engine import jobs
from tests.engine.models import decay_groups, small_gpt
from tests.engine.pool import RankPool

STEPS = 6
RATES = [2e-3 * (1 / (1 + step)) for step in range(STEPS + 1)]
"""Of each step, under the schedule below."""
Seen = dict[str, Any]


def scheduled(start: jobs.Sizes, schedule: jobs.Schedule, own: bool = False) -> tuple[jobs.Record, Seen]:
    """A run under a scheduler of the script's own, which the engine does not know; it is carried as any object is.

    own: the optimizer is the script's, too.
    """
    record, seen, model = jobs.Record(), dict[str, Any](), small_gpt()
    given = {"optimizer": torch.optim.AdamW(decay_groups(model), lr=2e-3)} if own else {}
    with jobs.job(jobs.config(start=start), model=model, **given) as made:
        optimizer = made.optimizer
        seen["begin"] = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        seen["begin"] += [optimizer.defaults, hasattr(optimizer, "overflow"), optimizer.overflow]
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        made.engine.register_for_checkpointing("schedule", scheduler)
        optimizer.tag = "mine"
        groups = optimizer.param_groups

        def each(job: jobs.Job) -> None:
            scheduler.step()
            assert job.optimizer is optimizer is scheduler.optimizer
            assert optimizer.param_groups is groups and optimizer.current is job.engine.optimizer
            step = job.engine.global_steps
            assert scheduler.last_epoch == step
            rates = [group["lr"] for group in optimizer.param_groups]
            assert rates == scheduler.get_last_lr() == [RATES[step]] * 2

        jobs.train(made, STEPS, schedule, record, each)
        seen |= {"tag": optimizer.tag, "is": isinstance(optimizer, torch.optim.Optimizer), "last": scheduler.last_epoch}
    return record, seen


def test_a_scheduler_of_torchs_goes_on_through_switches(pool: RankPool) -> None:
    """From one rank to two, which were idle, and from stage 1 to stage 3."""
    static = jobs.global_losses([record for record, _ in pool.run(scheduled, start=(1, 1), schedule={})])
    ranks = pool.run(scheduled, start=(1, 1), schedule={2: (2, 1), 4: (2, 3)})
    assert jobs.furthest(jobs.global_losses([record for record, _ in ranks]), static) <= 1e-6
    worked = [(record, seen) for record, seen in ranks if record.losses]
    assert sorted(min(record.losses) for record, _ in worked) == [0, 2]
    for record, seen in worked:
        assert all(rates == [RATES[step]] * 2 for step, rates in record.rates.items())
        assert seen == {"tag": "mine", "is": True, "last": STEPS, "begin": ranks[0][1]["begin"]}


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.full), True])
def test_two_that_begin_idle_and_one_that_goes(pool: RankPool, own: bool) -> None:
    """2 -> 4 -> 3: the scheduler is made over an optimizer without memory, whose groups are those of the others."""
    ranks = pool.run(scheduled, start=(2, 1), schedule={2: (4, 1), 4: (3, 2)}, own=own)
    assert [seen["begin"] for _, seen in ranks] == [ranks[0][1]["begin"]] * 4
    assert sorted(min(record.losses) for record, _ in ranks) == [0, 0, 2, 2]
    assert sorted(max(record.losses) for record, _ in ranks) == [3, 5, 5, 5]
    for record, _ in ranks:
        assert all(rates == [RATES[step]] * 2 for step, rates in record.rates.items())


def used() -> list[str]:
    """What a script does with an optimizer, in each stage that a job goes through; returns what was warned of."""
    with jobs.job(jobs.config(start=(4, 1))) as made:
        optimizer, engine = made.optimizer, made.engine
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in made.loader:
                jobs.one_micro_batch(engine, batch, jobs.Record())
                scheduler.step()
                use(optimizer, engine)
                if engine.global_steps == 3:
                    break
                jobs.ask(engine, (4, {1: 3, 2: 0}[engine.global_steps]))
        return [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]


def use(optimizer: Any, engine: Any) -> None:
    """Reads and writes reach DeepSpeed's optimizer of the present world, or torch's underneath."""
    current, basic = engine.optimizer, engine.basic_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is current.param_groups is basic.param_groups
    assert optimizer.defaults is basic.defaults
    assert list(optimizer.state) == list(current.state)
    assert optimizer.state_dict().keys() == current.state_dict().keys()
    optimizer.zero_grad()
    before, optimizer.param_groups = optimizer.param_groups, list(optimizer.param_groups)
    assert current.param_groups is optimizer.param_groups is not before
    optimizer.param_groups = before
    name = "clip_grad" if hasattr(current, "clip_grad") else "defaults"
    held = getattr(current, name)
    setattr(optimizer, name, "other")
    assert getattr(current, name) == getattr(optimizer, name) == "other"
    setattr(optimizer, name, held)
    assert name not in vars(optimizer)
    with pytest.raises(AttributeError, match="no_such"):
        print(optimizer.no_such)


def test_a_script_uses_it_as_an_optimizer(pool: RankPool) -> None:
    assert pool.run(used) == [[]] * 4
