"""Buddies that make each other's steps: replicas are equal to what they are of, bit by bit, whatever a step does."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_dynatrain.errors import TransferError, WorldChanged
from ds_dynatrain.space import EXP_AVG
from tests.engine import freezing, jobs, pipeline_walks, replaying
from tests.engine.models import small_gpt
from tests.engine.pipelines import pipeline
from tests.engine.pool import RankPool

FULL = pytest.mark.full
STEPS, OVERFLOWS_AT, PIPELINE_STEPS = 36, (7, 31), 12


def three_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Of other learning rates and decays."""
    trained = [held for held in model.parameters() if held.requires_grad]
    return [
        {"params": trained[::3], "weight_decay": 0.1, "lr": 1e-3},
        {"params": trained[1::3], "weight_decay": 0.0},
        {"params": trained[2::3], "weight_decay": 0.01, "betas": (0.8, 0.9)},
    ]


def steps(made: jobs.Job, batches: Any, count: int, overflows: tuple[int, ...] = (), replay: Any = None) -> None:
    """Optimizer steps, with a boundary before each."""
    engine, end = made.engine, made.engine.global_steps + count
    while engine.global_steps < end:
        batch = next(batches)
        if replay is not None and engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            replay.note()
        loss = engine(*batch)
        engine.backward(loss * math.inf if engine.global_steps in overflows else loss)
        engine.step()


def settings(dtype: str, data: int, stage: int, optimizer: Any = None, **more: Any) -> dict[str, Any]:
    """With a scheduler, clipping, dropout's streams and what `more` says."""
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 200, "warmup_num_steps": 9}}
    given = {} if optimizer is None else {"optimizer": optimizer}
    return jobs.config(dtype, (data, stage), scheduler=scheduler, **given, **more)


def one_alone(model: torch.nn.Module) -> list[dict[str, Any]]:
    """A parameter in a group of its own."""
    trained = [held for held in model.parameters() if held.requires_grad]
    return [{"params": trained[1:], "weight_decay": 0.1}, {"params": trained[:1]}]


def case(dtype: str, data: int, stage: int, offload: bool = False, alone: bool = False, **more: Any) -> Any:
    """(what differs at the end, skipped steps, whether comparing says it is equal, and whether it finds a bit).

    alone: see `one_alone`."""

    model = small_gpt(dropout=0.1, norm=dtype == "fp32")
    if offload:
        block = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        more = {**more, "zero_optimization": block, "zero_force_ds_cpu_optimizer": False}
    groups = (one_alone if alone else three_groups)(model)
    with jobs.job(settings(dtype, data, stage, **more), model, model_parameters=groups) as made:
        if made.engine.idle:
            next(iter(made.loader))
        overflows = OVERFLOWS_AT if dtype == "fp16" else ()
        batches = (batch for _ in range(50) for batch in made.loader)
        steps(made, batches, 2)
        replay = replaying.begin(made.engine)
        steps(made, batches, STEPS, overflows, replay)
        assert replay.is_sound and replay.mark.step == STEPS + 2
        found = replaying.differences(made.engine, replay), int(made.engine.skipped_steps), replay.verify()
        if made.engine.rank == data - 1:  # whose ward is rank 0, which has no padding
            held = replay.replicas[0].buffers()
            next(each for (kind, _), each in held.items() if kind == EXP_AVG).view(torch.uint8)[0] ^= 1
        finds = replay.verify()
        with patch.object(replay, "_transport", Gone()), pytest.raises(WorldChanged):
            replay.verify()
        return (*found, finds)
    return None


class Gone:
    """To members of which one is gone, before anything is sent."""

    def receive(self, *_: Any) -> None:
        """As the transport of a group."""
        raise TransferError("cannot receive from member 1")


OFFLOAD: dict[str, Any] = {"offload": True}
CASES = [
    ("fp32", 3, 1, {}),
    ("fp32", 2, 2, {"gradient_clipping": 0.0}),
    ("fp16", 2, 3, {}),
    ("fp32", 2, 3, {"alone": True, "gradient_clipping": 0.1}),
    pytest.param("fp16", 3, 2, {}, marks=FULL),
    pytest.param("fp16", 2, 1, {}, marks=FULL),
    pytest.param("bf16", 3, 1, {}, marks=FULL),
    pytest.param("bf16", 2, 2, {}, marks=FULL),
    pytest.param("bf16", 3, 3, {}, marks=FULL),
    pytest.param("fp32", 4, 3, {}, marks=FULL),
    pytest.param("bf16", 2, 2, OFFLOAD, marks=FULL),
    pytest.param("fp16", 3, 1, OFFLOAD, marks=FULL),
    pytest.param("fp32", 3, 2, {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}, marks=FULL),
]


ON_HOST = pytest.mark.not_on_device("steps of masters on a device are not replayed (docs/gpu.md)")


@ON_HOST
@pytest.mark.parametrize(("dtype", "data", "stage", "more"), CASES)
def test_replicas_are_bit_equal(pool: RankPool, dtype: str, data: int, stage: int, more: dict[str, Any]) -> None:
    found = [one for one in pool.run(case, dtype=dtype, data=data, stage=stage, **more, seconds=100) if one is not None]
    assert len(found) == data
    for differences, skipped, is_equal, finds_none in found:
        assert differences == []
        assert skipped == (len(OVERFLOWS_AT) if dtype == "fp16" else 0)
        assert is_equal and not finds_none


def pipeline_case(
    dtype: str, pipe: int, data: int, of_groups: bool = False, offload: bool = False, frozen: str = "", **more: Any
) -> Any:
    """As `case`, for pipelines. of_groups: of two optimizer groups each stage has one alone, but for the last; frozen:
    what names of layers begin with that are not trained, in even stages; then it begins before the first step."""
    model = pipeline("tied")
    if frozen:
        freezing.flip(model, (), frozen.split())
        more["pipeline"] = {"partition": "uniform"}
    if offload:
        more = {
            **more,
            "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        }
    given, arguments = pipeline_walks.settings(pipeline_walks.layout(pipe, data), dtype, **more), dict[str, Any]()
    if of_groups:
        trained = [held for held in model.parameters() if held.requires_grad]
        half = len(trained) // 2
        arguments["model_parameters"] = [{"params": trained[:half]}, {"params": trained[half:], "lr": 1e-3}]
    with jobs.job(given, model, **arguments) as made:
        engine = made.engine
        engine.boundary()
        before = 0 if frozen else 2
        for _ in range(before):
            engine.train_batch()
        replay, losses = replaying.begin(engine), []
        for _ in range(PIPELINE_STEPS):
            replay.note()
            losses.append(engine.train_batch().item())
        assert replay.is_sound and replay.mark.step == PIPELINE_STEPS + before
        stages = (
            engine.layout.coordinate(engine.rank)["pipe"],
            engine.layout.coordinate(replay.replicas[0].rank)["pipe"],
        )
        return replaying.differences(engine, replay), replay.verify(), losses, stages
    return None


FIRST = "tied_modules. 1. 2. 3."
"""The first stage of two; of four all but the third."""
IN_PIPELINES = [
    ("fp32", 2, 2, {}),
    ("fp32", 2, 2, {"frozen": FIRST}),
    pytest.param("fp32", 4, 1, {"frozen": FIRST, "of_groups": True}, marks=FULL),
    pytest.param("bf16", 2, 2, {"frozen": FIRST}, marks=FULL),
    pytest.param("fp32", 2, 2, {"gradient_clipping": 0.0}, marks=FULL),
    pytest.param("fp32", 2, 1, {"of_groups": True}, marks=FULL),
    pytest.param("fp32", 4, 1, {"of_groups": True}, marks=FULL),
    pytest.param("bf16", 2, 2, {"of_groups": True}, marks=FULL),
    pytest.param("fp16", 2, 2, {"of_groups": True}, marks=FULL),
    pytest.param("bf16", 2, 2, OFFLOAD, marks=FULL),
]


@ON_HOST
@pytest.mark.parametrize(("dtype", "pipe", "data", "more"), IN_PIPELINES)
def test_replicas_in_pipelines(pool: RankPool, dtype: str, pipe: int, data: int, more: dict[str, Any]) -> None:
    """Of wards in other stages, which have other parameters, and maybe other groups of them."""
    ranks = pool.run(pipeline_case, dtype=dtype, pipe=pipe, data=data, **more, seconds=100)
    found = [one for one in ranks if one is not None]
    assert len(found) == pipe * data and any(stage != other for *_, (stage, other) in found)
    for differences, is_equal, losses, _ in found:
        assert differences == [] and is_equal
        assert losses == found[0][2]


def failing_case() -> list[bool] | None:
    """An update that raises: whether what is deferred from the decision on was so in it, and is so after it."""
    with jobs.job(settings("fp32", 2, 1), small_gpt()) as made:
        if made.engine.idle:
            next(iter(made.loader))
            return None
        batches = (batch for _ in range(50) for batch in made.loader)
        steps(made, batches, 1)
        replay, basic, seen = replaying.begin(made.engine), made.engine.basic_optimizer, list[bool]()

        def fail(*_: Any) -> None:
            seen.append(replay._status.is_deferred)
            raise ValueError("no such update")

        with patch.object(basic, "step", fail), pytest.raises(ValueError, match="no such update"):
            steps(made, batches, 1, replay=replay)
        return [*seen, replay._status.is_deferred, bool(replay.copies())]


def test_a_step_that_raises_hides_no_failure(pool: RankPool) -> None:
    """Nor is what it leaves taken for the state after it."""
    assert pool.run(failing_case)[:2] == [[True, False, False]] * 2
