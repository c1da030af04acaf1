"""What a switch takes on a device: no third copy of the state, and nothing that stays."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.engine import jobs
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool

WIDE = {"width": 256, "hidden": 1024, "depth": 3}
"""About 1.8 million parameters, most of them in tensors that DeepSpeed's constructors may not write."""
DEEP = {**WIDE, "depth": 10}
"""For offload, which leaves the weights alone on the device: half of them are more than `WORKING_BYTES`."""
FOUR = {"layout": {"data": 4, "zero_stage": 1}, "timeout_seconds": 20}
WORKING_BYTES = 4 << 20
"""DeepSpeed's own buckets, as configured below, and small tensors."""


def settings(dtype: str, stage: int, **zero: Any) -> dict[str, Any]:
    made = jobs.config(dtype, (2, stage))
    buckets = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_prefetch_bucket_size": 100_000}
    made["zero_optimization"] |= {**buckets, **zero}
    return made


def peaks(config: dict[str, Any], shape: dict[str, int], path: list[jobs.Sizes]) -> list[tuple[Any, int, int, int]]:
    """Of each switch on the way: (event, highest number of bytes on the device meanwhile, held before, held after)."""
    from deepspeed.accelerator import get_accelerator

    device, found = get_accelerator(), []
    with jobs.job(config, model=small_gpt(**shape)) as made:
        engine = made.engine
        for number, sizes in enumerate(path):
            jobs.train(made, 2 * number + 2)
            before = device.memory_allocated()
            device.reset_peak_memory_stats()
            jobs.ask(engine, sizes)
            engine.boundary()
            peak = device.max_memory_allocated()
            device.synchronize()
            found.append((engine.last_switch, peak, before, device.memory_allocated()))
    return found


@pytest.mark.parametrize(
    ("dtype", "zero", "shape"),
    [
        ("bf16", {}, WIDE),
        pytest.param("bf16 in fp32", {}, WIDE, marks=pytest.mark.full),
        pytest.param("fp32", {}, WIDE, marks=pytest.mark.full),
        pytest.param(
            "bf16", {"offload_optimizer": {"device": "cpu", "pin_memory": True}}, DEEP, marks=pytest.mark.full
        ),
    ],
    ids=["bf16", "bf16 in fp32", "fp32", "offload"],
)
def test_no_third_copy_is_made(lab_pool: RankPool, dtype: str, zero: dict[str, Any], shape: dict[str, int]) -> None:
    """Source and target, and what DeepSpeed works with: what its constructors make has no memory."""
    path = [(2, stage) for stage in (2, 3, 1, 3, 2)]
    for found in lab_pool.run(peaks, config=settings(dtype, 1, **zero), shape=shape, path=path):
        for event, peak, before, after in found:
            assert WORKING_BYTES < min(before, after), "another copy would show"
            assert peak <= before + after + WORKING_BYTES, (str(event.target), peak, before, after)
            assert event.communicators_built == 0 < event.communicators_kept, "the members stay"


def refused_for_lack_of_memory(bucket: int) -> str:
    """Why stage 3 is refused where its bucket of gradients has so many elements; nothing if it is not."""
    config = jobs.config("fp32", (4, 1))
    config["zero_optimization"] |= {"reduce_bucket_size": bucket}
    with jobs.job(config) as made:
        return str(made.engine.plan(data=4, zero_stage=3).refusal or "")


def test_the_bucket_of_stage_3_counts_as_memory(lab_pool: RankPool) -> None:
    """It is there as soon as the optimizer is, and the device has 8 GiB."""
    assert lab_pool.run(refused_for_lack_of_memory, bucket=100_000) == [""] * 4
    assert all("memory" in said or "bytes" in said for said in lab_pool.run(refused_for_lack_of_memory, bucket=10**10))


def growth(config: dict[str, Any], rounds: int, path: list[jobs.Sizes]) -> list[tuple[int, int, int]]:
    """(bytes on the device, threads, descriptors) of this process after each round of switches."""
    from deepspeed.accelerator import get_accelerator

    found = []
    with jobs.job(config) as made:
        for number in range(rounds):
            for sizes in path:
                jobs.train(made, made.engine.global_steps + 1)
                jobs.ask(made.engine, sizes)
                made.engine.boundary()
            made.engine._parts.control.teardowns.finish(60.0)
            gc.collect()
            get_accelerator().synchronize()
            found.append((get_accelerator().memory_allocated(), jobs.least("task"), jobs.least("fd")))
            assert made.engine.global_steps == len(path) * (number + 1)
    return found


@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.full)])
def test_switches_leave_nothing(lab_pool: RankPool, rounds: int) -> None:
    """Twelve, and a hundred."""
    path = [(4, 2), (4, 3), (4, 0), (4, 1)]
    config = settings("bf16", 1) | {"dynatrain": FOUR}
    for found in lab_pool.run(growth, seconds=60 + 8 * rounds, config=config, rounds=rounds, path=path):
        first, last = found[1], found[-1]
        assert last[0] <= first[0], "memory of the device"
        assert last[1:] <= first[1:], "threads, descriptors"


def fused(config: dict[str, Any], schedule: jobs.Schedule) -> jobs.Record:
    import torch

    model = small_gpt()
    optimizer = torch.optim.AdamW([held for held in model.parameters() if held.requires_grad], lr=2e-3, fused=True)
    return jobs.run(config, 6, schedule, model=model, optimizer=optimizer, groups=False)


@pytest.mark.full
def test_counts_of_fused_optimizers_stay_on_the_device(lab_pool: RankPool) -> None:
    config = jobs.config("fp32", (4, 0))
    del config["optimizer"]
    losses = [
        jobs.global_losses(lab_pool.run(fused, config=config, schedule=schedule))
        for schedule in ({}, {2: (4, 1), 4: (4, 3)})
    ]
    assert jobs.furthest(*losses) < 1e-5
