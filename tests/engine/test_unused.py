"""A parameter that some steps do not use: under ZeRO-3 its last gradient is state, and moves with the rest."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from tests.engine import jobs
from tests.engine.models import Sequences, SmallGPT, small_gpt
from tests.engine.pool import RankPool

USED_STEPS, STEPS = 3, 9
Values = dict[int, list[float]]


class WithExtra(nn.Module):
    """The small model and one more parameter, which counts only while `uses_extra`."""

    def __init__(self, inner: SmallGPT) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.uses_extra = False

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(inputs, targets)
        return loss + self.extra.square().sum() * 0.01 if self.uses_extra else loss


def case(start: jobs.Sizes, schedule: jobs.Schedule) -> tuple[Values, list[Any], jobs.Record] | None:
    """The parameter's values after each step, the warnings of the switches, and the losses."""
    model, values, record = WithExtra(small_gpt()), {}, jobs.Record()
    with jobs.job(jobs.config("fp32", start), model=model, data=Sequences(12 * STEPS)) as made:
        made.engine.on_switch(record.events.append)
        for batch in made.loader:
            model.uses_extra = made.engine.global_steps < USED_STEPS
            jobs.one_micro_batch(made.engine, batch, record)
            step = made.engine.global_steps
            with deepspeed.zero.GatheredParameters([model.extra]):
                values[step] = model.extra.tolist()
            if step in schedule:
                jobs.ask(made.engine, schedule[step])
            if step == STEPS:
                break
        return values, [list(event.warnings) for event in record.events], record
    return None


def test_last_gradient_moves_from_stage_3_to_stage_3(pool: RankPool) -> None:
    static = next(found for found in pool.run(case, start=(2, 3), schedule={}) if found is not None)
    switching = pool.run(case, start=(2, 3), schedule={5: (4, 3), 7: (2, 3)})[0]
    assert switching is not None
    moved = [abs(last - first) for last, first in zip(static[0][STEPS], static[0][USED_STEPS + 1], strict=True)]
    assert min(moved) > 1e-3, "without this the test could not fail"
    for step in range(1, STEPS + 1):
        torch.testing.assert_close(torch.tensor(switching[0][step]), torch.tensor(static[0][step]), rtol=1e-6, atol=0)


def test_a_change_between_stage_3_and_others_warns_by_name(pool: RankPool) -> None:
    found = pool.run(case, start=(2, 3), schedule={5: (2, 1), 7: (2, 3)})[0]
    assert found is not None
    assert [any("extra" in warning for warning in warnings) for warnings in found[1]] == [True, True]


def test_no_warning_while_every_parameter_is_used(pool: RankPool) -> None:
    found = pool.run(case, start=(2, 3), schedule={1: (2, 1)})[0]
    assert found is not None
    assert found[1] == [[]]
