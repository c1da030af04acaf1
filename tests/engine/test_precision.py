"""fp16 with its loss scale, BF16_Optimizer, fp32 accumulation, autocast: across stages, worlds and members."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer

import ds_dynatrain
from ds_dynatrain.errors import ConfigError, SwitchRefused, UnsupportedError
from ds_dynatrain.reshard.switch import Transaction
from ds_dynatrain.space import Layout
from ds_dynatrain.support import Target, refuse_layout
from tests.engine import faults, jobs, oracle, walks
from tests.engine.models import decay_groups, small_gpt
from tests.engine.paths import circuit
from tests.engine.pool import RankPool

STEPS = 12
SEED = 6
LARGE = {"width": 64, "hidden": 260}
"""A model with tensors that are not written while an optimizer is built without memory."""
OVERFLOWS = (3, 5, 6, 9)
"""Steps whose gradients overflow: before, at and after the switches of the schedules below."""
EDITED = r"(weight|master) of 'blocks\.1\.up\.weight'.*was it changed in place"
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
    run = pool.run if schedule else pool.once
    results = [result for result in run(overflow_case, dtype=dtype, start=start, schedule=schedule, **more) if result]
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


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("static fp16", marks=pytest.mark.full)])
def test_overflows_around_switches_as_in_a_static_run(pool: RankPool, dtype: str) -> None:
    losses, scales, norms = _overflows(pool, {}, dtype)
    switched, their_scales, their_norms = _overflows(pool, {4: (2, 2), 6: (2, 1), 9: (2, 2)}, dtype)
    assert switched == losses and their_scales == scales and their_norms == norms
    switched, their_scales, their_norms = _overflows(pool, {3: (4, 3), 6: (3, 2), 9: (1, 1)}, dtype)
    assert jobs.furthest(switched, losses) <= 1e-4
    assert their_scales == scales and near(their_norms, norms)


@pytest.mark.full
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


@pytest.mark.full
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

FP16_WALK = [(2, 1), (3, 3), (1, 0), (4, 2), (4, 0), (2, 3), (3, 1)]
BF16_WALK = [(2, 1), (3, 1), (3, 3), (1, 1), (4, 2), (4, 1), (2, 2)]
"""Stage 1 is BF16_Optimizer."""


def all_but_stage_0() -> list[jobs.Sizes]:
    """A walk over every pair of layouts that are not of stage 0, most of them once."""
    walk = [sizes for sizes in circuit(SEED) if sizes[1]]
    return [sizes for number, sizes in enumerate(walk) if number == 0 or sizes != walk[number - 1]]


@pytest.mark.full  # overflows, roll-backs and stage 0 have tests of their own
def test_fp16_in_some_layouts(pool: RankPool) -> None:
    assert walks.compare(pool, walks.settings("fp16"), FP16_WALK, LARGE) == len(FP16_WALK) - 1


@pytest.mark.full
@pytest.mark.parametrize("immediate", [False, True])
def test_bf16_optimizer_in_some_layouts(pool: RankPool, immediate: bool) -> None:
    settings = walks.settings("bf16 in fp32")
    settings["bf16"] = {"enabled": True, "immediate_grad_update": immediate, "check_grad_overflow": not immediate}
    path, model = (BF16_WALK[:4], LARGE) if immediate else (BF16_WALK, None)
    assert walks.compare(pool, settings, path, model) == len(path) - 1


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
OTHERS: dict[str, tuple[dict[str, Any], list[jobs.Sizes]]] = {
    "autocast of a fp32 model": (
        walks.settings("fp32", zero_optimization={"stage3_param_persistence_threshold": 0}, **AUTOCAST),
        [(2, 1), (3, 0), (2, 3), (4, 2), (1, 3), (2, 1)],
    ),
    "fp16, accumulated in fp32": (
        walks.settings("fp16 in fp32", communication_data_type="fp32"),
        [(2, 1), (3, 2), (2, 3), (4, 1)],
    ),
    "bf16, reduced in fp32": (
        walks.settings("bf16", communication_data_type="fp32"),
        [(2, 1), (2, 0), (3, 3), (1, 2)],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_other_types_in_some_layouts(pool: RankPool, name: str) -> None:
    settings, path = OTHERS[name]
    assert walks.compare(pool, settings, path) == len(path) - 1


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["fp16", "bf16 in fp32", "fp16 in fp32"])
def test_all_pairs(pool: RankPool, dtype: str) -> None:
    path = all_but_stage_0() if "in fp32" in dtype else circuit(SEED)
    bitwise = walks.compare(pool, walks.settings(dtype), path, seconds=900, steps=walks.LONG_STEPS)
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
        autocast = Target({**jobs.config("fp32"), **AUTOCAST}, Layout(data=2, zero_stage=3))
        with pytest.raises(SwitchRefused, match=r"torch_autocast: .*persistence_threshold to 0"):
            refuse_layout(autocast)
        found.append(type(made.engine.optimizer).__name__)
    model = small_gpt()
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype.*ZeRO stage 0"):
        ds_dynatrain.initialize(
            model=model, config=jobs.config("bf16 in fp32", (2, 0)), model_parameters=decay_groups(model)
        )
    return found


def test_fp32_accumulation_cannot_go_to_stage_0(pool: RankPool) -> None:
    assert pool.run(stage_0_case)[:2] == [["BF16_Optimizer"]] * 2


# ---- what a failure leaves behind -----------------------------------------------------------------------------------


@contextmanager
def wrong_scale(generation: int) -> Iterator[None]:
    """Inside the block a switch ends with twice the loss scale, on every member alike."""
    own = Transaction._carry

    def carry(self: Transaction) -> None:
        own(self)
        if self.proposal.generation == generation and self.target_rank is not None:
            state = self.engine.host.scaling_state()
            self.engine.host.take_scaling({**state, "scale": 2 * state["scale"]})

    with patch.object(Transaction, "_carry", carry):
        yield


def failing_case(dtype: str, start: jobs.Sizes, target: jobs.Sizes, asks: bool) -> tuple[Any, ...]:
    """A flipped bit at step 3, a wrong loss scale at step 6, no fault at step 9"""
    record, events, states = jobs.Record(), {}, {}

    def each(made: jobs.Job) -> None:
        step = made.engine.global_steps
        events[step] = made.engine.last_switch
        if step in (4, 7, 9):
            found = oracle.gather(made.engine)
            states[step] = {str(key): flat.view(torch.uint8).sum().item() for key, flat in found.tensors.items()}
            states[step] |= {"scaling": found.scaling, "steps": found.steps}

    schedule = {step: target for step in (3, 6, 9)} if asks else {}
    with (
        jobs.job(jobs.config(dtype, start), small_gpt(**LARGE)) as made,
        faults.injected(["bit flip"], {}),
        wrong_scale(faults.FIRST_GENERATION + 1),
    ):
        faults.train(made, 11, schedule, record, each)
    return record.losses, events, states


@pytest.mark.parametrize(
    ("dtype", "start", "target"),
    [
        ("fp16", (2, 2), (3, 0)),
        pytest.param("bf16 in fp32", (2, 2), (3, 1), marks=pytest.mark.full),
        pytest.param("fp16", (2, 0), (3, 3), marks=pytest.mark.full),
        pytest.param("bf16 in fp32", (2, 1), (3, 3), marks=pytest.mark.full),
    ],
)
def test_a_roll_back_leaves_no_trace(pool: RankPool, dtype: str, start: jobs.Sizes, target: jobs.Sizes) -> None:
    expected = pool.run(failing_case, dtype=dtype, start=start, target=target, asks=False)
    found = pool.run(failing_case, dtype=dtype, start=start, target=target, asks=True)
    for rank in range(2):
        losses, events, states = found[rank]
        assert [events[step].outcome for step in (4, 7, 10)] == ["rolled_back", "rolled_back", "committed"], events
        assert re.search("carry of member .*: scaling", events[7].reason), events[7].reason
        assert {step: losses[step] for step in range(9)} == {step: expected[rank][0][step] for step in range(9)}
        assert states == expected[rank][2]


# ---- a weight that is not its master's ------------------------------------------------------------------------------


def edit_case(dtype: str, start: jobs.Sizes, targets: list[jobs.Sizes]) -> list[tuple[jobs.Sizes, str, str]]:
    """Edit a weight in place, switch, and see what became of it; a step and a switch back in between."""
    found: list[tuple[jobs.Sizes, str, str]] = []
    for target in targets:
        with jobs.job(jobs.config(dtype, start), small_gpt(**LARGE)) as made:
            engine, iterator, before = made.engine, iter(made.loader), None
            batch = next(iterator)
            if engine.generation == 1:
                jobs.one_micro_batch(engine, batch, jobs.Record())
                with torch.no_grad():
                    engine.module.blocks[1].up.weight.mul_(1.5)
                before = oracle.gather(engine)
                jobs.ask(engine, target)
                batch = next(iterator)
            after = oracle.gather(engine)
            if before is not None:
                assert oracle.differences(before, after) == []
                found.append((target, engine.last_switch.outcome, engine.last_switch.reason))
            jobs.one_micro_batch(engine, batch, jobs.Record())
    return found


@pytest.mark.parametrize(
    ("dtype", "start"),
    [
        ("bf16", (2, 1)),
        pytest.param("fp32", (2, 1), marks=pytest.mark.full),
        pytest.param("fp16", (2, 0), marks=pytest.mark.full),
        pytest.param("bf16 in fp32", (2, 1), marks=pytest.mark.full),
    ],
)
def test_an_edited_weight_survives_or_stops_the_switch(pool: RankPool, dtype: str, start: jobs.Sizes) -> None:
    targets = [(2, 2), (2, 3), (4, 1), (1, 2)]
    ranks = pool.run(edit_case, dtype=dtype, start=start, targets=targets)
    assert [target for target, _, _ in ranks[0]] == targets
    for _, outcome, reason in ranks[0]:
        assert outcome == "committed" or re.search(EDITED, reason), reason
    assert "committed" in [outcome for _, outcome, _ in ranks[0]]


# ---- buffers, leaks, tokens -----------------------------------------------------------------------------------------


def buffers_case() -> dict[str, tuple[torch.dtype, float]]:
    model = small_gpt()
    model.register_buffer("kept", torch.full((3,), 1.0 + 2**-12))
    model.register_buffer("cast", torch.full((3,), 0.5))
    types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["kept"]}
    with jobs.job(jobs.config("bf16", (2, 1), data_types=types), model) as made:

        def change(_: Any) -> None:
            if made.engine.global_steps == 2:
                made.engine.module.kept.add_(2**-11)
                made.engine.module.cast.mul_(3.0)

        jobs.train(made, 6, {3: (4, 3), 5: (4, 2)}, each=change)
        return {name: (held.dtype, held[0].item()) for name, held in made.engine.module.named_buffers() if held.dim()}
    return {}


def test_buffers_keep_their_types(pool: RankPool) -> None:
    expected = {"kept": (torch.float32, 1.0 + 2**-12 + 2**-11), "cast": (torch.bfloat16, 1.5)}
    assert pool.run(buffers_case) == [expected] * 4


def leak_case(immediate: bool) -> list[tuple[int, ...]] | None:
    """(optimizers, tensors, their bytes, hooks) that are alive after each round of switches that ends at stage 1."""
    settings = jobs.config("bf16 in fp32", (2, 1))
    settings["bf16"] = {"enabled": True, "immediate_grad_update": immediate}
    counts: list[tuple[int, ...]] = []

    def count(made: jobs.Job) -> None:
        if made.engine.global_steps % 4 == 0:
            gc.collect()
            held = gc.get_objects()
            tensors = {each.data_ptr(): each for each in held if type(each) in (torch.Tensor, torch.nn.Parameter)}
            hooks = [len(each._post_accumulate_grad_hooks or ()) for each in made.engine.module.parameters()]
            optimizers = sum(isinstance(each, ZeROOptimizer) for each in held)
            size = sum(each.untyped_storage().nbytes() for each in tensors.values())
            counts.append((optimizers, len(tensors), size, sum(hooks)))

    gc.collect()
    before = sum(isinstance(each, ZeROOptimizer) for each in gc.get_objects())
    schedule = {step: ((2, 2), (2, 3), (2, 1))[step % 4] for step in range(12) if step % 4 < 3}
    with jobs.job(settings) as made:
        jobs.train(made, 12, schedule, each=count)
    return [(row[0] - before, *row[1:]) for row in counts] or None


@pytest.mark.full
@pytest.mark.parametrize("immediate", [pytest.param(False, marks=pytest.mark.full), True])
def test_nothing_of_bf16_optimizer_stays(pool: RankPool, immediate: bool) -> None:
    counts = pool.run(leak_case, immediate=immediate)[0]
    assert len(counts) == 3 and counts[0][0] == 1
    assert set(counts[1:]) == {counts[1]}, counts


def tokens_case(dtype: str, tokens: bool) -> jobs.Record:
    record = jobs.Record()
    with jobs.job(jobs.config(dtype, (2, 1), train_micro_batch_size_per_gpu=2, gradient_clipping=0.3)) as made:
        if tokens:
            backward = made.engine.backward
            made.engine.backward = lambda loss: backward(loss, tokens=5)
        try:
            jobs.train(made, 8, {3: (2, 2), 5: (3, 1)}, record)
        finally:
            made.engine.__dict__.pop("backward", None)
    return record


@pytest.mark.full
def test_token_weights_with_fp32_accumulation(pool: RankPool) -> None:
    """Equal counts are no weights at all."""
    plain, weighted = (
        jobs.global_losses(pool.run(tokens_case, dtype="bf16 in fp32", tokens=tokens)) for tokens in (False, True)
    )
    assert jobs.furthest(weighted, plain) <= 5e-3
