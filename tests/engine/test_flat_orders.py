"""`round_robin_gradients` and `parameter_alignment`: flat groups in another order, and with holes in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param

from tests.engine import faults, jobs, oracle, walks
from tests.engine.paths import circuit
from tests.engine.pool import RankPool
from tests.engine.test_offload import settings as offloaded
from tests.engine.test_oracle import compare

OPTIONS: dict[str, dict[str, bool]] = {
    "round robin": {"round_robin_gradients": True},
    "aligned": {"parameter_alignment": True},
    "both": {"round_robin_gradients": True, "parameter_alignment": True},
}
FLAT: list[jobs.Sizes] = [
    (2, 1),
    (4, 2),
    (3, 2),
    (3, 1),
    (1, 1),
    (4, 1),
    (2, 2),
    (2, 1),
    (3, 1),
    (4, 2),
    (4, 1),
    (1, 2),
]
ACROSS: list[jobs.Sizes] = [
    (2, 1),
    (3, 3),
    (4, 1),
    (2, 0),
    (3, 2),
    (4, 0),
    (2, 2),
    (2, 3),
    (3, 1),
    (3, 1),
    (4, 3),
    (1, 2),
]
WIDE = {"width": 129, "hidden": 131}
"""Two matrices of a block have more elements than DeepSpeed's constructors may write (`adapters/zero/no_alloc.LARGE`).
"""


def settings(dtype: str, name: str) -> dict[str, Any]:
    return walks.settings(dtype, zero_optimization=OPTIONS[name])


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "name", "path", "model"),
    [
        ("bf16", "aligned", FLAT, {}),
        ("fp32", "round robin", ACROSS, {}),
        ("bf16", "both", ACROSS, WIDE),
        ("fp32", "both", FLAT, WIDE),
    ],
    ids=["bf16-aligned", "fp32-dealt-across-stages", "bf16-both-across-stages-wide", "fp32-both-wide"],
)
def test_walks(pool: RankPool, dtype: str, name: str, path: list[jobs.Sizes], model: dict[str, int]) -> None:
    walks.compare(pool, settings(dtype, name), path, model)


@pytest.mark.full
def test_beside_an_optimizer_that_knows_neither(pool: RankPool) -> None:
    """Stage 1 is BF16_Optimizer here, whose flat groups have no options; stage 2 has them."""
    config = walks.settings("bf16 in fp32", zero_optimization=OPTIONS["both"])
    walks.compare(pool, config, [(2, 1), (3, 2), (4, 1), (2, 2), (3, 3), (4, 2)], WIDE)


@pytest.mark.not_on_device("the walk goes through stage 0, where offload is refused on a device (docs/gpu.md)")
@pytest.mark.full
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offloaded(pool: RankPool, dtype: str) -> None:
    """What `round_robin_gradients` is for. The last gradients on the host are state, in the same order."""
    config = offloaded(dtype, (2, 1))
    config["zero_optimization"].update(OPTIONS["both"])
    walks.compare(pool, config, [(2, 1), (3, 2), (4, 1), (2, 2), (3, 3), (3, 1), (2, 0)])


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_all_pairs(pool: RankPool, dtype: str, name: str) -> None:
    walks.compare(pool, settings(dtype, name), circuit(7), seconds=900, steps=walks.LONG_STEPS)


# ---- what DeepSpeed itself says of a parameter's fragments ----------------------------------------------------------


def look_at_fragments(made: jobs.Job) -> None:
    """DeepSpeed's calls for whole tensors read what the oracle reads, and a write arrives where it belongs."""
    engine = made.engine
    if engine.zero_optimization_stage() in (1, 2):
        zero, world = engine.optimizer, engine.dp_world_size
        for ordered, dealt, gaps in zip(
            zero.bit16_groups, zero.round_robin_bit16_groups, zero.round_robin_bit16_padding, strict=True
        ):
            assert [*map(id, ordered)] != [*map(id, dealt)] or world == 1, "another order, else nothing is tested"
            assert any(gaps) == zero.parameter_alignment
    compare(made)
    if engine.zero_optimization_stage() == 2:
        name, parameter = list(engine.module.named_parameters())[-2]
        before = oracle.gather(engine)
        safe_set_full_fp32_param(parameter, 2 * before.tensors[name, "master"].view(parameter.shape))
        after = oracle.gather(engine)
        assert torch.equal(after.tensors[name, "master"], 2 * before.tensors[name, "master"])
        assert [key for key in after.tensors if not torch.equal(after.tensors[key], before.tensors[key])] == [
            (name, "master")
        ]
        oracle.put(engine, before)


def fragments_case(name: str, path: list[jobs.Sizes]) -> Any:
    schedule = {step: sizes for step, sizes in enumerate(path) if step}
    return jobs.run(settings("fp32", name), len(path), schedule, each=look_at_fragments)


@pytest.mark.full
@pytest.mark.parametrize("name", ["round robin", "both"])
def test_deepspeed_finds_its_fragments(pool: RankPool, name: str) -> None:
    """Also before the first switch: stock 0.19.8 is wrong there under `round_robin_gradients` alone."""
    pool.run(fragments_case, name=name, path=[(2, 2), (2, 1), (4, 2), (3, 1), (2, 3), (3, 2), (2, 2)])


def gradients_case(options: dict[str, bool]) -> list[torch.Tensor] | None:
    """Whole gradients of the window after a switch, as DeepSpeed gives them to users."""
    config = walks.settings("fp32", zero_optimization={**options, "overlap_comm": False})
    with jobs.job(config) as made:
        engine, iterator = made.engine, iter(made.loader)
        for batch in iterator:
            loss = engine(*batch)
            engine.backward(loss)
            if engine.global_steps == 3:
                return [safe_get_full_grad(held).clone() for held in engine.module.parameters() if held.requires_grad]
            engine.step()
            if engine.global_steps == 1:
                jobs.ask(engine, (3, 2))
    return None


def test_gradients_that_users_see(pool: RankPool) -> None:
    expected = pool.run(gradients_case, options={})
    for name in ("round robin", "both"):
        found = pool.run(gradients_case, options=OPTIONS[name])
        for mine, other in zip(found[:3], expected[:3], strict=True):
            assert all(torch.allclose(one, two, rtol=1e-5, atol=1e-7) for one, two in zip(mine, other, strict=True))


# ---- a switch that fails --------------------------------------------------------------------------------------------


def failing_case(asks: bool) -> dict[str, Any]:
    """Three switches are asked for: one with a bit flipped, one with a moment left out, one without a fault."""
    result: dict[str, Any] = {"record": jobs.Record(), "states": {}, "events": {}}
    target = (4, 2)

    def each(made: jobs.Job) -> None:
        step = made.engine.global_steps
        result["events"][step] = made.engine.last_switch
        result["states"][step] = oracle.gather(made.engine)

    schedule = dict.fromkeys((2, 5, 8), target) if asks else {}
    with jobs.job(settings("bf16", "both")) as made, faults.injected(["bit flip", "dropped piece"], {}):
        faults.train(made, 9, schedule, result["record"], each)
        result["last"] = made.engine.last_switch
    return result


@pytest.mark.full
def test_a_failed_switch_leaves_no_trace(pool: RankPool) -> None:
    expected, found = pool.run(failing_case, asks=False), pool.run(failing_case, asks=True)
    for rank in range(2):
        mine, other = found[rank], expected[rank]
        assert [mine["events"][step].outcome for step in (3, 6)] == ["rolled_back"] * 2
        for step in range(1, 9):
            assert oracle.differences(mine["states"][step], other["states"][step]) == [], step
            assert step == 8 or mine["record"].losses[step] == other["record"].losses[step]
    assert [found[rank]["last"].outcome for rank in range(4)] == ["committed"] * 4
