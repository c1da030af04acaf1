"""DeepSpeed's own universal-checkpoint test matrix, done live: no file, no restart, the same processes.

DeepSpeed 0.19.8 (tests/unit/checkpoint/test_universal_checkpoint.py) has dtype x stage {1, 3} x torch_adam x load_optim
x sub-group size, each 2 -> 2, 4 -> 2 and 2 -> 4: 144 cases. Here a walk per (dtype, torch_adam, sub-group size) makes
these changes of the world with stages 0 and 2 and every crossing of stages besides, once as they are, once with
`save_checkpoint` and `load_checkpoint` before every switch, with and without the optimizer's states (load_optim).
"""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from tests.engine import jobs, oracle
from tests.engine.models import Sequences
from tests.engine.pool import RankPool

WORLDS = ((2, 2), (4, 2), (2, 4))
STAGES = (0, 1, 2, 3)
UPSTREAM: list[jobs.Sizes] = [(2, 1), (2, 1), (4, 1), (2, 1), (2, 3), (2, 3), (4, 3), (2, 3)]
"""What DeepSpeed tests, stage 1 and then stage 3, joined by one crossing."""
WHOLE_GROUPS, SMALL_GROUPS = 10**9, 100
"""Sub-group sizes; DeepSpeed's matrix has its default and 100."""
COMBINATIONS = list(product(("fp32", "bf16", "fp16"), (True, False), (WHOLE_GROUPS, SMALL_GROUPS)))
SOME = [("fp32", True, SMALL_GROUPS), ("bf16", False, WHOLE_GROUPS), ("fp16", False, SMALL_GROUPS)]

with_fused_adam = pytest.mark.usefixtures("fused_adam")


def every_change() -> list[jobs.Sizes]:
    """A walk over each (world change, stage before, stage after) at least once."""
    wanted = {((one, low), (other, high)) for one, other in WORLDS for low in STAGES for high in STAGES}
    path: list[jobs.Sizes] = [(2, 0)]
    while wanted:
        here = path[-1]
        edge = min(wanted, key=lambda change: (change[0] != here, change))
        step = edge[1] if edge[0] == here else edge[0]
        path.append(step)
        wanted.discard((here, step))
    return path


def settings(dtype: str, torch_adam: bool, sub_group_size: int, start: jobs.Sizes) -> dict[str, Any]:
    """One micro-batch a rank in every world."""
    made = jobs.config(dtype, start, train_micro_batch_size_per_gpu=12)
    made["optimizer"] = {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": torch_adam}}
    made["zero_optimization"]["sub_group_size"] = sub_group_size
    if dtype == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return made


def walk_case(config: dict[str, Any], path: list[jobs.Sizes], folder: Path | None, load_optimizer: bool) -> int:
    """Walk the path with a step at each place; the number of switches that this rank has compared, bit for bit."""
    before: oracle.State | None = None
    compared = 0
    with jobs.job(config, data=Sequences(12 * 4 * len(path))) as made:
        engine, iterator = made.engine, iter(made.loader)
        batch = next(iterator)
        while True:
            number = engine.generation - 1
            assert (engine.layout.data, engine.layout.zero_stage) == path[number]
            arrived = oracle.gather(engine)
            if before is not None:
                assert oracle.differences(before, arrived) == [], f"{path[number - 1]} -> {path[number]}"
                assert engine.last_switch.bytes_sent == engine.last_switch.bytes_minimum
                compared += 1
            jobs.one_micro_batch(engine, batch, jobs.Record())
            if folder is not None:
                save_and_load(made, iterator, folder, str(number), load_optimizer)
            if number + 1 == len(path):
                return compared
            before = oracle.gather(engine)
            jobs.ask(engine, path[number + 1])
            batch = next(iterator)
            if engine.generation != number + 2:  # this member was away
                before = None
    return compared


def save_and_load(made: jobs.Job, iterator: Any, folder: Path, tag: str, load_optimizer: bool) -> None:
    """DeepSpeed's own checkpoint, one step away from it, and back."""
    engine = made.engine
    engine.save_checkpoint(folder, tag)
    saved = oracle.gather(engine)
    jobs.one_micro_batch(engine, next(iterator), jobs.Record())
    assert oracle.differences(saved, oracle.gather(engine)) != []
    engine.load_checkpoint(folder, tag, load_optimizer_states=load_optimizer)
    if load_optimizer:
        assert oracle.differences(saved, oracle.gather(engine)) == []


def walk(
    pool: RankPool,
    combination: tuple[str, bool, int],
    path: list[jobs.Sizes],
    folder: Path | None = None,
    load_optimizer: bool = True,
) -> None:
    config = settings(*combination, path[0])
    seconds = 60 + 4 * len(path)
    compared = pool.run(
        walk_case, config=config, path=path, folder=folder, load_optimizer=load_optimizer, seconds=seconds
    )
    assert compared[0] == len(path) - 1


@pytest.mark.full
@with_fused_adam
@pytest.mark.parametrize("combination", SOME, ids=str)
def test_what_deepspeed_tests(pool: RankPool, combination: tuple[str, bool, int]) -> None:
    walk(pool, combination, UPSTREAM)


@pytest.mark.full
@with_fused_adam
@pytest.mark.parametrize("load_optimizer", [True, False])
def test_after_a_checkpoint(pool: RankPool, tmp_path: Path, load_optimizer: bool) -> None:
    walk(pool, ("bf16", False, SMALL_GROUPS), UPSTREAM, tmp_path, load_optimizer)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_are_those_of_weights_that_come_alone(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    """Without ZeRO, too: else a weight and its master would be two things, and the next step would undo the load."""
    walk(pool, (dtype, True, WHOLE_GROUPS), [(2, 0), (4, 0), (2, 2), (2, 0)], tmp_path, load_optimizer=False)


def test_the_walk_makes_every_change() -> None:
    edges = set(pairwise(every_change()))
    for (one, other), low, high in product(WORLDS, STAGES, STAGES):
        assert ((one, low), (other, high)) in edges


@pytest.mark.full
@pytest.mark.timeout(600)
@with_fused_adam
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_change(pool: RankPool, combination: tuple[str, bool, int]) -> None:
    walk(pool, combination, every_change())


@pytest.mark.full
@pytest.mark.timeout(600)
@with_fused_adam
@pytest.mark.parametrize("load_optimizer", [True, False])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_change_after_a_checkpoint(
    pool: RankPool, tmp_path: Path, combination: tuple[str, bool, int], load_optimizer: bool
) -> None:
    walk(pool, combination, every_change(), tmp_path, load_optimizer)
