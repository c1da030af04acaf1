"""ZeRO-Offload: state in host memory, stepped by DeepSpeed's CPU optimizers, in every stage and world."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_dynatrain.errors import SwitchRefused
from tests.engine import faults, jobs, oracle, walks
from tests.engine.models import Sequences, decay_groups, small_gpt
from tests.engine.pool import RankPool
from tests.engine.test_unused import STEPS as UNUSED_STEPS
from tests.engine.test_unused import USED_STEPS, WithExtra

pytestmark = pytest.mark.usefixtures("cpu_adam")

WALKS: dict[str, list[jobs.Sizes]] = {
    "small": [(2, 1), (4, 3), (3, 2), (1, 0), (2, 3), (4, 1)],
    "large": [(2, 2), (3, 3), (2, 0), (4, 3), (4, 1), (2, 3)],
}
LONG: list[jobs.Sizes] = [
    *((2, 1), (4, 3), (3, 2), (1, 0), (2, 3), (4, 1), (2, 0), (3, 0), (3, 3), (2, 2), (1, 3), (4, 2), (4, 0), (1, 1)),
    *((3, 3), (4, 3), (2, 3), (2, 2), (1, 2), (3, 1), (3, 2), (4, 0), (2, 1)),
]
MODELS: dict[str, dict[str, Any]] = {"small": {}, "large": {"width": 130, "hidden": 140}}
"""Large: matrices above the size from which constructors of a switch write nothing."""
ACCUMULATING = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


def settings(
    dtype: str,
    start: jobs.Sizes,
    optimizer: Any = None,
    param: bool = False,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """param: parameters are offloaded too, and everything is pinned (which means nothing on a CPU)."""
    block = {"type": "AdamW", "params": {"lr": 2e-3}} if optimizer is None else optimizer
    made = jobs.config(dtype, start, **{"train_micro_batch_size_per_gpu": 12, "optimizer": block, **more})
    made["zero_optimization"] |= zero or {}
    made["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": param, "fast_init": param}
    if param:
        made["zero_optimization"]["offload_param"] = {"device": "cpu", "max_in_cpu": 100}
    return made


def data() -> Sequences:
    return Sequences(12 * 12)


# ---- state and losses, from layout to layout ----------------------------------------------------------------------


STAGE_0 = pytest.mark.not_on_device("the walk goes through stage 0, where offload is refused on a device (docs/gpu.md)")


@STAGE_0
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "size"), [("bf16", "small"), ("fp32", "large")])
def test_state_and_losses_over_a_walk(pool: RankPool, dtype: str, size: str) -> None:
    walks.compare(pool, settings(dtype, (2, 1), param=dtype == "bf16"), WALKS[size], MODELS[size])


@STAGE_0
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "param"), [("fp32", True), ("bf16", False), ("fp16", True)])
def test_state_and_losses_over_a_long_walk(pool: RankPool, dtype: str, param: bool) -> None:
    config = settings(dtype, (2, 1), param=param)
    walks.compare(pool, config, LONG, seconds=300, furthest=1e-6 if dtype == "fp32" else 1e-4, steps=walks.LONG_STEPS)


@pytest.mark.full
def test_gradients_of_bf16_accumulated_in_fp32(pool: RankPool) -> None:
    path = [sizes for sizes in LONG if sizes[1]]  # DeepSpeed has no stage 0 for it
    walks.compare(pool, settings("bf16 in fp32", (2, 1)), path, seconds=300, furthest=1e-4, steps=walks.LONG_STEPS)


def training(dtype: str, start: jobs.Sizes, steps: int, schedule: jobs.Schedule, more: dict[str, Any]) -> jobs.Record:
    return jobs.run(settings(dtype, start, **more), steps, schedule)


def losses(
    pool: RankPool, dtype: str, start: jobs.Sizes, schedule: jobs.Schedule, steps: int = 8, **more: Any
) -> list[float]:
    records = pool.run(training, dtype=dtype, start=start, steps=steps, schedule=schedule, more=more)
    return jobs.global_losses(records)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "start", "target"),
    [("fp32", (2, 3), (4, 2)), ("bf16", (4, 1), (3, 3))],
)
def test_before_the_first_step(pool: RankPool, dtype: str, start: jobs.Sizes, target: jobs.Sizes) -> None:
    switched = losses(pool, dtype, start, {0: target}, 4, param=True)
    assert switched == losses(pool, dtype, target, {}, 4, param=True)


@pytest.mark.full
def test_with_accumulation(pool: RankPool) -> None:
    static = losses(pool, "fp32", (1, 1), {}, **ACCUMULATING)
    switched = losses(pool, "fp32", (2, 2), {2: (3, 2), 4: (1, 3), 6: (4, 1)}, **ACCUMULATING)
    assert jobs.furthest(switched, static) <= 1e-6


@pytest.mark.full
def test_with_other_orders_of_the_flat_groups(pool: RankPool) -> None:
    zero = {"round_robin_gradients": True, "parameter_alignment": True}
    static = losses(pool, "fp32", (1, 1), {}, zero=zero)
    assert jobs.furthest(losses(pool, "fp32", (3, 1), {2: (4, 2), 4: (2, 3), 6: (2, 2)}, zero=zero), static) <= 1e-6


# ---- other optimizers ---------------------------------------------------------------------------------------------

TORCH_ADAM = {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}}
LION = {"type": "Lion", "params": {"lr": 2e-4}}


@pytest.mark.parametrize("block", [TORCH_ADAM, pytest.param(LION, marks=pytest.mark.full)], ids=["torch_adam", "Lion"])
def test_other_optimizers(pool: RankPool, request: pytest.FixtureRequest, block: dict[str, Any]) -> None:
    if block is LION:
        request.getfixturevalue("cpu_lion")
    static = losses(pool, "fp32", (2, 1), {}, optimizer=block)
    assert jobs.furthest(losses(pool, "fp32", (2, 1), {3: (4, 3), 6: (2, 2)}, optimizer=block), static) <= 1e-6


def client_case(schedule: jobs.Schedule) -> jobs.Record:
    model = small_gpt()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=2e-3)
    config = settings("fp32", (2, 2), zero_force_ds_cpu_optimizer=False)
    del config["optimizer"]
    return jobs.run(config, 8, schedule, model=model, optimizer=optimizer)


@pytest.mark.full
def test_an_optimizer_of_the_users_own(pool: RankPool) -> None:
    static = jobs.global_losses(pool.run(client_case, schedule={}))
    assert jobs.furthest(jobs.global_losses(pool.run(client_case, schedule={3: (4, 3), 6: (2, 1)})), static) <= 1e-6


# ---- the last gradients -------------------------------------------------------------------------------------------


def unused_case(start: jobs.Sizes, schedule: jobs.Schedule, tokens: int | None = None) -> Any:
    """Values of a parameter that only the first steps use, after each step, and the warnings of the switches.

    tokens: of each sample, if gradients are to be weighted by them.
    """
    model, values, events = WithExtra(small_gpt()), {}, []
    with jobs.job(settings("fp32", start), model=model, data=data()) as made:
        made.engine.on_switch(events.append)
        for batch in made.loader:
            model.uses_extra = made.engine.global_steps < USED_STEPS
            loss = made.engine(*batch)
            made.engine.backward(loss, tokens=None if tokens is None else tokens * len(batch[0]))
            made.engine.step()
            step = made.engine.global_steps
            with deepspeed.zero.GatheredParameters([model.extra]):
                values[step] = model.extra.detach().clone()
            if step in schedule:
                jobs.ask(made.engine, schedule[step])
            if step == UNUSED_STEPS:
                break
        return values, [list(event.warnings) for event in events]
    return None


@pytest.mark.full
def test_last_gradients_move_between_stages_1_to_3(pool: RankPool) -> None:
    """DeepSpeed goes on stepping the parameter with what is left of its last gradient."""
    static = pool.run(unused_case, start=(2, 1), schedule={})[0][0]
    values, warnings = pool.run(unused_case, start=(2, 1), schedule={4: (4, 3), 6: (3, 3), 7: (2, 2), 8: (1, 1)})[0]
    assert float((static[UNUSED_STEPS] - static[USED_STEPS + 1]).abs().min()) > 1e-3
    assert warnings == [[]] * 4
    for step in range(1, UNUSED_STEPS + 1):
        torch.testing.assert_close(values[step], static[step], rtol=1e-6, atol=0)


@pytest.mark.full
def test_gradients_by_tokens_leave_the_last_ones_alone(pool: RankPool) -> None:
    static = pool.run(unused_case, start=(2, 1), schedule={})[0][0]
    values, _ = pool.run(unused_case, start=(2, 2), schedule={6: (3, 3)}, tokens=5)[0]
    torch.testing.assert_close(values[UNUSED_STEPS], static[UNUSED_STEPS], rtol=1e-5, atol=0)


@STAGE_0
def test_a_change_to_or_from_stage_0_warns_by_name(pool: RankPool) -> None:
    warnings = pool.run(unused_case, start=(2, 1), schedule={5: (2, 0), 7: (2, 2)})[0][1]
    assert [any("extra" in warning for warning in found) for found in warnings] == [True, True]


# ---- what goes wrong ----------------------------------------------------------------------------------------------

FAULTS = ["bit flip", "dropped piece", "changed learning rate"]


def fault_case(dtype: str, start: jobs.Sizes, target: jobs.Sizes, asks: bool) -> Any:
    """Three switches that fail and one that does not."""
    record, snapshots = jobs.Record(), {}
    schedule = {2: target, 4: target, 6: target, 8: target} if asks else {}

    def each(made: jobs.Job) -> None:
        if made.engine.global_steps <= 8:
            snapshots[made.engine.global_steps] = oracle.gather(made.engine)

    with jobs.job(settings(dtype, start, param=True), data=data()) as made, faults.injected(FAULTS, {}):
        try:
            faults.train(made, 9, schedule, record, each)
        finally:
            last = made.engine.last_switch
    return record.losses, snapshots, last


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "start", "target"),
    [("fp32", (2, 3), (4, 1)), pytest.param("bf16", (3, 2), (2, 3), marks=pytest.mark.full)],
)
def test_a_roll_back_leaves_no_trace(pool: RankPool, dtype: str, start: jobs.Sizes, target: jobs.Sizes) -> None:
    given = {"dtype": dtype, "start": start, "target": target}
    expected = pool.run(fault_case, asks=False, **given)
    found = pool.run(fault_case, asks=True, **given)
    for rank in range(start[0]):
        for step in range(8):
            assert found[rank][0][step] == expected[rank][0][step], (rank, step)
            assert oracle.differences(found[rank][1][step + 1], expected[rank][1][step + 1]) == [], (rank, step)
    assert found[0][2].outcome == "committed" and found[0][2].generation == 2 + len(FAULTS)


def reload_case() -> Any:
    """The same with states that come back in time; the state is what it was."""
    with jobs.job(jobs.config("fp32", (2, 1)), data=data()) as made:
        engine, outcomes = made.engine, []
        for batch in made.loader:
            if engine.last_switch is not None and engine.last_switch.outcome == "rolled_back":
                outcomes.append(engine.last_switch.reason)
                engine.reload_states()
                engine._parts.last_switch = None
            jobs.one_micro_batch(engine, batch, jobs.Record())
            if engine.global_steps == 2:
                engine.offload_states()
                with pytest.raises(SwitchRefused, match="reload_states"):
                    jobs.ask(engine, (4, 1))
                engine.reload_states()
                jobs.ask(engine, (4, 1))
                engine.offload_states()
            if engine.global_steps == 4:
                jobs.ask(engine, (4, 2))
            if engine.global_steps == 6:
                return outcomes, engine.last_switch.outcome, engine.layout.data
    return None


def test_states_that_were_moved_away_are_refused(pool: RankPool) -> None:
    outcomes, last, size = pool.run(reload_case)[0]
    assert len(outcomes) == 1 and "engine.offload_states() has moved" in outcomes[0]
    assert (last, size) == ("committed", 4)


# ---- nothing is left behind ---------------------------------------------------------------------------------------

ROUND: list[jobs.Sizes] = [(4, 3), (2, 2), (3, 1), (2, 3)]


def soak_case(rounds: int) -> Any:
    """Threads, open files, live ZeRO optimizers and resident bytes after each round of switches."""
    seen = []

    def each(made: jobs.Job) -> None:
        if made.engine.global_steps % (len(ROUND) + 1) == 0:
            gc.collect()
            zeros = sum(type(held).__name__.startswith("DeepSpeedZeroOptimizer") for held in gc.get_objects())
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append((threading.active_count(), jobs.least("fd"), zeros, pages * 4096))

    steps = rounds * (len(ROUND) + 1)
    schedule = {1 + 5 * number + place: sizes for number in range(rounds) for place, sizes in enumerate(ROUND)}
    model = small_gpt(**MODELS["large"])
    jobs.run(settings("fp32", (2, 3), param=True), steps + 1, schedule, each, model=model, data=data())
    return seen


@pytest.mark.full
def test_twenty_switches_leave_nothing(pool: RankPool) -> None:
    """One state of this model is 2 MB on a rank; memory settles slowly, with or without offload."""
    for seen in pool.run(soak_case, rounds=5, seconds=120)[:2]:
        assert seen[-1][:3] == seen[1][:3], seen
        assert seen[-1][3] - seen[1][3] < 16 << 20, seen
