"""fp16 with its loss scale, BF16_Optimizer, fp32 accumulation, autocast: across stages, worlds and members."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_dynatrain
from ds_dynatrain.errors import ConfigError, SwitchRefused, UnsupportedError
from tests.engine import jobs, walks
from tests.engine.models import decay_groups, small_gpt
from tests.engine.paths import circuit
from tests.engine.pool import RankPool

STEPS = 12
SEED = 6
LARGE = {"width": 64, "hidden": 260}
"""A model with tensors that are not written while an optimizer is built hollow."""
OVERFLOWS = (3, 5, 6, 9)
"""Steps whose gradients overflow: before, at and after the switches of the schedules below."""
Scales = dict[int, tuple[Any, ...]]
Norms = dict[str, float]


def scaling_of(optimizer: Any) -> tuple[Any, ...]:
    """(scale, iteration, last overflow) of a DeepSpeed optimizer, read from its own fields."""
    scaler = getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config
    return tuple(getattr(scaler, name, None) for name in ("cur_scale", "cur_iter", "last_overflow_iter"))


def overflow_case(
    dtype: str,
    start: jobs.Sizes,
    schedule: jobs.Schedule,
    overflows: tuple[int, ...],
    fp16: dict[str, Any],
    **more: Any,
) -> tuple[jobs.Record, Scales] | None:
    """Train with forced overflows; what this rank saw, and the scale after each step that it took."""
    tokens = more.pop("tokens", None)
    settings = jobs.config(dtype, start, **more)
    settings["fp16"] = {**settings["fp16"], **fp16}
    scales: Scales = {}
    record = jobs.Record()
    with jobs.job(settings) as made:
        engine, backward = made.engine, made.engine.backward

        def exploding(loss: Any, **arguments: Any) -> Any:
            if tokens is not None:
                arguments["tokens"] = tokens
            return backward(loss * 1e30 if engine.global_steps in overflows else loss, **arguments)

        engine.backward = exploding

        def note(_: jobs.Job) -> None:
            scales[engine.global_steps] = (
                *scaling_of(engine.optimizer),
                engine.optimizer.overflow,
                engine.skipped_steps,
            )
            record.notes[f"norm {engine.global_steps}"] = float(engine.get_global_grad_norm())

        try:
            jobs.train(made, STEPS, schedule, record, note)
        finally:
            del engine.backward
    return record, scales


def _overflows(
    pool: RankPool, schedule: jobs.Schedule, dtype: str = "fp16", start: jobs.Sizes = (2, 1), **more: Any
) -> tuple[list[float], Scales, Norms]:
    """The losses of a job with forced overflows, and the scales, the same on all ranks that took a step."""
    more = {"overflows": OVERFLOWS, "fp16": {}, **more}
    results = [
        result for result in pool.run(overflow_case, dtype=dtype, start=start, schedule=schedule, **more) if result
    ]
    scales: Scales = {}
    for result in results:
        for step, values in result[1].items():
            assert scales.setdefault(step, values) == values
    norms = {name: value for result in results for name, value in result[0].notes.items() if name.startswith("norm")}
    assert len(norms) == STEPS
    return jobs.global_losses([result[0] for result in results]), scales, norms


def near(one: Norms, other: Norms, distance: float = 2e-3) -> bool:
    """Whether the gradient norms of two runs are equal but for fp16's rounding, an overflow being infinite in both."""
    return one == pytest.approx(other, rel=distance)


@pytest.mark.parametrize("dtype", ["fp16", "static fp16"])
def test_overflows_around_switches_as_in_a_static_run(pool: RankPool, dtype: str) -> None:
    losses, scales, norms = _overflows(pool, {}, dtype)
    switched, their_scales, their_norms = _overflows(pool, {4: (2, 2), 6: (2, 1), 9: (2, 2)}, dtype)
    assert switched == losses and their_scales == scales and their_norms == norms
    switched, their_scales, their_norms = _overflows(pool, {3: (4, 3), 6: (3, 2), 9: (1, 1)}, dtype)
    assert jobs.furthest(switched, losses) <= 1e-4
    assert their_scales == scales and near(their_norms, norms)


def test_stage_0_keeps_the_hysteresis_aside(pool: RankPool) -> None:
    """One overflow at stage 1 uses up the hysteresis; after a while at stage 0, which has none, it is still used up."""
    overflows = (1, 7)
    losses, scales, norms = _overflows(pool, {}, overflows=overflows, fp16={"loss_scale_window": 100})
    assert [scales[step][0] for step in (2, 8)] == [256, 128]
    for away in ({3: (2, 0), 6: (2, 1)}, {3: (1, 0), 6: (4, 3)}):
        switched, their_scales, their_norms = _overflows(
            pool, away, overflows=overflows, fp16={"loss_scale_window": 100}
        )
        assert their_scales == scales and near(their_norms, norms)
        assert jobs.furthest(switched, losses) <= 1e-3


def test_stage_0_scales_the_loss(pool: RankPool) -> None:
    """Where stock DeepSpeed divides gradients by a loss scale that the loss was never multiplied by.

    A large epsilon shows it, and a norm to clip by that every step exceeds. A job that starts at stage 0 has taken
    Adam's step on zeros.
    """
    params = {"lr": 2e-3, "torch_adam": True, "eps": 1e-2}
    more = {"overflows": (), "optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": 0.2}
    losses, scales, norms = _overflows(pool, {}, start=(2, 1), **more)
    at_stage_0, their_scales, their_norms = _overflows(pool, {}, start=(2, 0), **more)
    assert their_scales == scales and near(their_norms, norms, 3e-2)
    assert jobs.furthest(at_stage_0, losses) <= 1e-2
    switched, their_scales, their_norms = _overflows(pool, {4: (2, 0), 8: (1, 0)}, start=(2, 1), **more)
    assert their_scales == scales and near(their_norms, norms)
    assert jobs.furthest(switched, losses) <= 1e-4


@pytest.mark.parametrize("dtype", ["fp16", "static fp16"])
def test_token_weights_leave_the_loss_scale_alone(pool: RankPool, dtype: str) -> None:
    """Equal counts are no weights at all; the scale grows, and shrinks by an overflow, as without them."""
    schedule = {3: (2, 0), 6: (3, 3), 9: (2, 2)}
    losses, scales, norms = _overflows(pool, schedule, dtype, gradient_clipping=0.3)
    weighted, their_scales, their_norms = _overflows(pool, schedule, dtype, gradient_clipping=0.3, tokens=3)
    assert their_scales == scales and near(their_norms, norms)
    assert jobs.furthest(weighted, losses) <= 1e-3


def low_case() -> str:
    model = small_gpt().to(torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"a parameter is torch.bfloat16.*enable the block") as caught:
        ds_dynatrain.initialize(model=model, config=jobs.config(), model_parameters=decay_groups(model))
    return str(caught.value)


def test_low_precision_without_its_block_is_refused(pool: RankPool) -> None:
    assert len(set(pool.run(low_case))) == 1


# ---- every layout ------------------------------------------------------------------------------------------------

FP16_WALK = [(2, 1), (3, 3), (1, 0), (4, 2), (2, 2), (4, 0), (3, 0), (2, 3), (1, 3), (4, 1)]
BF16_WALK = [(2, 1), (3, 1), (3, 3), (1, 1), (4, 2), (4, 1), (2, 1), (2, 2), (1, 3), (4, 3)]
"""Stage 1 is BF16_Optimizer."""


def all_but_stage_0() -> list[jobs.Sizes]:
    """A walk over every pair of layouts that are not of stage 0, most of them once."""
    walk = [sizes for sizes in circuit(SEED) if sizes[1]]
    return [sizes for number, sizes in enumerate(walk) if number == 0 or sizes != walk[number - 1]]


def test_fp16_in_some_layouts(pool: RankPool) -> None:
    assert walks.compare(pool, walks.settings("fp16"), FP16_WALK, LARGE) == len(FP16_WALK) - 1


@pytest.mark.parametrize("immediate", [False, True])
def test_bf16_optimizer_in_some_layouts(pool: RankPool, immediate: bool) -> None:
    settings = walks.settings("bf16 in fp32")
    settings["bf16"] = {"enabled": True, "immediate_grad_update": immediate, "check_grad_overflow": not immediate}
    path, model = (BF16_WALK[:5], LARGE) if immediate else (BF16_WALK, None)
    assert walks.compare(pool, settings, path, model) == len(path) - 1


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["fp16", "bf16 in fp32", "fp16 in fp32"])
def test_all_pairs(pool: RankPool, dtype: str) -> None:
    path = all_but_stage_0() if "in fp32" in dtype else circuit(SEED)
    bitwise = walks.compare(pool, walks.settings(dtype), path, seconds=900)
    print(f"{dtype}: {bitwise} of {len(path) - 1} continuations are bitwise those of a static run")


# ---- what DeepSpeed has no optimizer for ----------------------------------------------------------------------------


def stage_0_case() -> list[str]:
    found = []
    with jobs.job(jobs.config("bf16 in fp32", (2, 1))) as made:
        jobs.train(made, 2)
        if not made.engine.idle:
            with pytest.raises(SwitchRefused, match=r"data_types\.grad_accum_dtype.*stage 0.*nearest: .*zero_stage=1"):
                made.engine.switch(data=4, zero_stage=0)
            assert "grad_accum_dtype" in made.engine.plan(zero_stage=0).refusal
        jobs.train(made, 4)
        found.append(type(made.engine.optimizer).__name__)
    model = small_gpt()
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype.*ZeRO stage 0"):
        ds_dynatrain.initialize(
            model=model, config=jobs.config("bf16 in fp32", (2, 0)), model_parameters=decay_groups(model)
        )
    return found


def test_fp32_accumulation_cannot_go_to_stage_0(pool: RankPool) -> None:
    assert pool.run(stage_0_case)[:2] == [["BF16_Optimizer"]] * 2
