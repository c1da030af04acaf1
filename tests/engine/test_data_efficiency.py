"""DeepSpeed's data efficiency library over switches: random-LTD's schedule, with its CUDA kernels written in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.ops.random_ltd import dropping_utils
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd

from ds_dynatrain.engine.transaction import Transaction
from tests.engine import faults, jobs
from tests.engine.models import Block, small_gpt
from tests.engine.pool import RankPool

STEPS = 9
ROUTING = {
    "enabled": True,
    "random_ltd": {
        "enabled": True,
        "total_layer_num": 2,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [0, 1],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 2,
            "max_value": 6,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 12, "seq_per_step": 1},
        },
        "layer_token_lr_schedule": {"enabled": False},
    },
}


class TokenKernels:
    """What DeepSpeed's random-LTD kernels do, for the CPU; batch first."""

    @staticmethod
    def token_sort_(indices: torch.Tensor, _: int) -> torch.Tensor:
        return indices.sort(-1).values

    @staticmethod
    def token_gather(tokens: torch.Tensor, indices: torch.Tensor, _: bool) -> torch.Tensor:
        return tokens.gather(1, indices.long().unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))

    @staticmethod
    def token_scatter_(tokens: torch.Tensor, part: torch.Tensor, indices: torch.Tensor, _: bool) -> torch.Tensor:
        return tokens.scatter_(1, indices.long().unsqueeze(-1).expand(-1, -1, tokens.shape[-1]), part)


def random_ltd_case(schedule: jobs.Schedule, fails: bool = False, **sizes: int) -> jobs.Record:
    """Per step how many tokens a layer keeps, and how many were consumed."""
    record = jobs.Record(notes={"kept": {}, "states": {}, "outcomes": []})
    settings = jobs.config(
        start=(2, 1), train_micro_batch_size_per_gpu=6, data_efficiency={"enabled": True, "data_routing": ROUTING}
    )
    dropping_utils.random_ltd_module = TokenKernels
    own = Transaction._verify

    def fail(self: Transaction) -> str:
        if self.proposal.generation == 2 and fails:
            raise RuntimeError("on purpose")
        return own(self)

    Transaction._verify = fail  # type: ignore[method-assign]
    try:
        with jobs.job(settings, model=small_gpt(**sizes)) as made:
            convert_to_random_ltd(made.engine, Block)

            def each(made: jobs.Job) -> None:
                engine = made.engine
                record.notes["kept"][engine.global_steps] = engine.module.blocks[0].reserved_length
                record.notes["states"][engine.global_steps] = engine.random_ltd_scheduler.state_dict()
                record.notes["outcomes"].append(engine.last_switch and engine.last_switch.outcome)

            faults.train(made, STEPS, schedule, record, each)
    finally:
        Transaction._verify = own  # type: ignore[method-assign]
        dropping_utils.random_ltd_module = None
    return record


@pytest.mark.parametrize("sizes", [{}, {"width": 64, "hidden": 260}], ids=["small", "large"])
def test_random_ltd_over_stages(pool: RankPool, sizes: dict[str, int]) -> None:
    """In a world of one size the same tokens are dropped, so the losses are those of a static run."""
    static = pool.run(random_ltd_case, schedule={}, **sizes)
    found = pool.run(random_ltd_case, schedule={1: (2, 3), 3: (2, 0), 5: (2, 2), 7: (2, 3)}, **sizes)
    for mine, other in zip(found[:2], static[:2], strict=True):
        assert mine.notes["states"] == other.notes["states"]
        for step in range(STEPS):
            for (loss, _), (expected, _) in zip(mine.losses[step], other.losses[step], strict=True):
                assert abs(loss - expected) <= 2e-6 * expected, step


def test_members_that_wake_take_the_schedule_over(pool: RankPool) -> None:
    static: Any = pool.run(random_ltd_case, schedule={})[0]
    found = pool.run(random_ltd_case, schedule={2: (4, 3), 4: (3, 1), 6: (4, 0)}, fails=True)
    assert found[0].notes["outcomes"][2] == "rolled_back" and found[0].notes["outcomes"][-1] == "committed"
    assert static.notes["kept"] == {step: 2 + 4 * (step - 1) // 12 for step in range(1, STEPS + 1)}
    for record in found:
        for step, state in record.notes["states"].items():
            assert state == static.notes["states"][step]
            assert record.notes["kept"][step] == static.notes["kept"][step]
    assert set(found[3].notes["states"]) >= {7, 8, 9}
