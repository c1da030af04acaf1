"""Exact jobs in bf16 and fp16: weights of 16 bits, sums in fp32, and one loss scale in every world."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tests.engine import exactly, jobs
from tests.engine.exactly import NOT_ON_DEVICE, Bits, differences, together
from tests.engine.pool import RankPool
from tests.engine.test_exact import SWITCHES, WORLDS

FULL = pytest.mark.full
OVERFLOWS = ((1, 4), (3, 0))
"""Leaves whose gradients are not finite: one of the middle, which a last rank may have, and a first one."""
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16, accumulated in fp32 by name": jobs.PRECISIONS["bf16 in fp32"],
    "bf16 that is not finite": {"bf16": {"enabled": True}, "exploding": OVERFLOWS},
    "bf16 that looks for it": {"bf16": {"enabled": True, "check_grad_overflow": True}, "exploding": OVERFLOWS},
    "fp32 that is not finite": {"exploding": OVERFLOWS},
    "fp16": {"fp16": FP16, "exploding": OVERFLOWS},
    "fp16, accumulated in fp32 by name": {**jobs.PRECISIONS["fp16 in fp32"], "exploding": OVERFLOWS},
    "fp16 with hysteresis": {
        "fp16": {**FP16, "hysteresis": 2, "consecutive_hysteresis": True, "min_loss_scale": 64},
        "exploding": (*OVERFLOWS, (4, 6)),
    },
    "static fp16": {"fp16": {"enabled": True, "loss_scale": 100}},
    "fp16 by loss.backward()": {"fp16": FP16, "exploding": OVERFLOWS, "torch_style": True},
    "fp16, tokens": {"fp16": FP16, "exploding": OVERFLOWS, "tokens": True},
    "bf16, tokens": {"bf16": {"enabled": True}, "tokens": True},
    "fp16 without clipping": {"fp16": FP16, "exploding": OVERFLOWS, "gradient_clipping": 0.0},
    "bf16 without clipping": {"bf16": {"enabled": True}, "exploding": OVERFLOWS, "gradient_clipping": 0.0},
}
EXPLODE = [name for name, kind in KINDS.items() if kind.get("exploding")]


def alone(pool: RankPool, name: str, **arguments: Any) -> Bits:
    """The run that others are held against: one rank, stage 1."""
    return together(pool.once(exactly.run, start=(1, 1), **KINDS[name], **arguments))


@pytest.mark.full
@NOT_ON_DEVICE
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ("bf16", "fp16") else FULL) for name in KINDS])
def test_live_switches_change_no_bit(pool: RankPool, name: str) -> None:
    found = together(pool.run(exactly.run, start=(2, 1), schedule=SWITCHES, **KINDS[name]))
    assert differences(alone(pool, name), found) == []
    assert {"torch.float32"} == {str(held.dtype) for key, held in found.state.tensors.items() if key[1] != "weight"}  # type: ignore[union-attr]


@NOT_ON_DEVICE
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "fp16" else FULL) for name in EXPLODE])
def test_steps_are_skipped(pool: RankPool, name: str) -> None:
    """Those that the case means, and no others; and the scale follows from them."""
    found, steps = alone(pool, name), {step for step, _ in KINDS[name]["exploding"]}
    assert {step for step, norm in found.norms.items() if not math.isfinite(norm)} == steps
    skipped = [sum(other <= step for other in steps) for step in range(exactly.STEPS)]
    assert [skipped_until for _, skipped_until in found.scales.values()] == skipped
    if name == "fp16":
        assert [scale for scale, _ in found.scales.values()] == [256, 128, 128, 64, 64, 64]


def test_without_it_they_have_not(pool: RankPool) -> None:
    """What the other tests would not see they could not hold."""
    runs = [
        together(pool.run(exactly.run, start=(data, 2), steps=3, dynatrain={"exact": False}, **KINDS["bf16"]))
        for data in (1, 2)
    ]
    assert any("weight" in each for each in differences(*runs))


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("name", KINDS)
def test_all_worlds_have_the_same_bits(pool: RankPool, name: str) -> None:
    first = alone(pool, name)
    for start in WORLDS[1:]:
        assert differences(first, together(pool.run(exactly.run, start=start, **KINDS[name]))) == [], start


@NOT_ON_DEVICE
@FULL
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("seed", range(3))
def test_random_chains_change_no_bit(pool: RankPool, name: str, seed: int) -> None:
    stream = random.Random(seed)
    chain = {3 * step + 1: stream.choice(WORLDS) for step in range(8)}
    start = stream.choice(WORLDS)
    found = together(pool.run(exactly.run, start=start, schedule=chain, steps=27, seconds=120, **KINDS[name]))
    assert differences(alone(pool, name, steps=27), found) == []


@FULL
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("start", "other"), [((3, 3), (2, 1)), ((2, 1), (4, 3))])
def test_a_job_that_goes_on_in_another_world(
    pool: RankPool, tmp_path: Path, name: str, start: jobs.Sizes, other: jobs.Sizes
) -> None:
    """Under another seed of the process, behind a step that was skipped."""
    pool.run(exactly.run, start=start, steps=2, save=str(tmp_path), **KINDS[name])
    found = together(pool.run(exactly.run, start=other, seed=6, load=str(tmp_path), **KINDS[name]))
    whole = alone(pool, name)
    whole.losses = {place: loss for place, loss in whole.losses.items() if place[0] >= 2}
    assert differences(whole, found) == []


def optimizers_case(name: str) -> list[type]:
    """What DeepSpeed has in stages 1 and 2."""
    found = []
    for stage in (1, 2):
        with jobs.job(exactly.settings((4, stage), **KINDS[name])) as job:
            found.append(type(job.engine._host.optimizer))
    return found


@NOT_ON_DEVICE
@FULL
def test_stages_1_and_2_have_one_optimizer(pool: RankPool) -> None:
    """Not BF16_Optimizer, which DeepSpeed takes at stage 1 for bf16 whose gradients are accumulated in fp32."""
    for name in ("bf16", "bf16, accumulated in fp32 by name"):
        assert pool.run(optimizers_case, name=name) == [[DeepSpeedZeroOptimizer] * 2] * 4
