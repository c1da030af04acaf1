"""Plain DeepSpeed on the device: at each stage the losses are those of the CPU, bit for bit."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch

from tests.adapters.stock import stock_engine
from tests.engine import jobs
from tests.engine.models import Sequences, decay_groups, small_gpt
from tests.engine.pool import RankPool

STEPS = 6


def training(dtype: str, stage: int, zero: dict[str, Any]) -> tuple[list[float], str, int]:
    """The losses of some steps, the device, and the largest number of bytes on it."""
    settings = jobs.config(dtype)
    del settings["dynatrain"]
    settings["zero_optimization"] |= {"stage": stage, **zero}
    model = small_gpt()
    with stock_engine(model, settings, model_parameters=decay_groups(model)) as engine:
        data, losses = Sequences(), []
        count = engine.train_micro_batch_size_per_gpu()
        first = torch.distributed.get_rank() * count
        for step in range(STEPS):
            samples = [data[(12 * step + first + place) % len(data)] for place in range(count)]
            inputs, targets = (torch.stack(parts).to(engine.device) for parts in zip(*samples, strict=True))
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, str(engine.device), deepspeed.get_accelerator().max_memory_allocated()


@pytest.fixture(scope="module", autouse=True)
def new_ranks(pool: RankPool, lab_pool: RankPool) -> None:
    """What earlier cases have done in a process may be seen in the last bit of a plain engine's sums (measured)."""
    pool.renew()
    lab_pool.renew()


@pytest.mark.parametrize(
    ("dtype", "stage", "zero"),
    [
        *(("fp32", stage, {}) for stage in range(4)),
        *(("bf16", stage, {"overlap_comm": True}) for stage in range(1, 4)),
    ],
)
def test_losses_are_those_of_the_cpu(
    pool: RankPool, lab_pool: RankPool, dtype: str, stage: int, zero: dict[str, Any]
) -> None:
    expected = pool.run(training, dtype=dtype, stage=stage, zero=zero)
    found = lab_pool.run(training, dtype=dtype, stage=stage, zero=zero)
    for (losses, device, peak), (others, _, _) in zip(found, expected, strict=True):
        assert losses == others and device == "lab:0" and peak > 0
