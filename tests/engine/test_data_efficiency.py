"""DeepSpeed's data efficiency library over switches: random-LTD (its CUDA kernels written in torch), the curriculum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.ops.random_ltd import dropping_utils
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from deepspeed.runtime.data_pipeline.data_sampling.utils import close_mmap_dataset_builder, create_mmap_dataset_builder

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.reshard.switch import Transaction
from tests.engine import faults, jobs
from tests.engine.models import Block, Sequences, small_gpt
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


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [pytest.param({}, id="small"), pytest.param({"width": 64, "hidden": 260}, id="large")]
)
def test_random_ltd_over_stages(pool: RankPool, sizes: dict[str, int]) -> None:
    """In a world of one size the same tokens are dropped, so the losses are those of a static run."""
    static = pool.run(random_ltd_case, schedule={}, **sizes)
    found = pool.run(random_ltd_case, schedule={1: (2, 3), 3: (2, 0), 5: (2, 2), 7: (2, 3)}, **sizes)
    for mine, other in zip(found[:2], static[:2], strict=True):
        assert mine.notes["states"] == other.notes["states"]
        for step in range(STEPS):
            for (loss, _), (expected, _) in zip(mine.losses[step], other.losses[step], strict=True):
                assert abs(loss - expected) <= 2e-6 * expected, step


@pytest.mark.full
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


LENGTH, METRICS = 50, 5
CURRICULUM_STEPS = 12


class Noting(Sequences):
    """Knows which samples were read."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(index)
        return super().__getitem__(index)

    def take(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen


def metric(index: int) -> int:
    """The difficulty of a sample, 1 to METRICS."""
    return index * 7 % METRICS + 1


def write_index(folder: Path) -> None:
    """DeepSpeed's two index files: the values of a metric, and the samples of each value."""
    rows = {"samples": [[i for i in range(LENGTH) if metric(i) == value] for value in range(1, METRICS + 1)]}
    rows["values"] = [[value] for value in range(1, METRICS + 1)]
    for name, lists in rows.items():
        builder = create_mmap_dataset_builder(str(folder / name), np.int64)
        for row in lists:
            builder.add_item_numpy(np.array(row, dtype=np.int64))
        close_mmap_dataset_builder(builder, str(folder / name))


def curriculum(folder: str, schedule: str = "fixed_discrete") -> dict[str, Any]:
    """Difficulty 2 for three steps, 3 for three, then all; clusters are read out and shuffled anew more than once."""
    block = {
        "index_to_sample_path": f"{folder}/samples",
        "index_to_metric_path": f"{folder}/values",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 2,
        "max_difficulty": METRICS,
        "schedule_type": schedule,
        "schedule_config": {"difficulty": [2, 3, METRICS], "max_step": [3, 6]},
    }
    learning = {"enabled": True, "data_cluster_path": f"{folder}/clusters", "curriculum_metrics": {"value": block}}
    return {"enabled": True, "seed": 5, "data_sampling": {"num_epochs": 3, "curriculum_learning": learning}}


def stock_case(folder: str) -> list[list[int]]:
    """The samples of this rank, global batch by global batch, as plain DeepSpeed deals them to four ranks."""
    settings = jobs.config(train_micro_batch_size_per_gpu=3, data_efficiency=curriculum(folder))
    del settings["dynatrain"]
    data, found = Noting(), []
    engine, _, loader, _ = deepspeed.initialize(model=small_gpt(), config=settings, training_data=data)
    for _ in loader:
        found.append(data.take())
    engine.destroy()
    return found


def curriculum_case(folder: str, schedule: jobs.Schedule, custom: bool = False) -> jobs.Record:
    """The samples of this rank by global step, and what a post-processing function was told."""
    record = jobs.Record(notes={"read": {}, "told": {}})
    kind = "custom" if custom else "fixed_discrete"
    settings = jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=3, data_efficiency=curriculum(folder, kind))
    data = Noting()
    with jobs.job(settings, data=data) as made:
        engine = made.engine
        assert len(made.loader) == 13 * engine.batch.accumulation
        if custom:
            engine.set_custom_curriculum_learning_schedule({"value": lambda step: 2 if step <= 4 else METRICS})

        def told(batch: Any, state: dict[str, Any]) -> Any:
            record.notes["told"][engine.global_steps] = state
            record.notes["read"].setdefault(engine.global_steps, []).extend(data.take())
            return batch

        engine.set_data_post_process_func(told)
        jobs.train(made, CURRICULUM_STEPS, schedule, record)
        if custom:
            with pytest.raises(ConfigError, match="has dealt batches by another schedule"):
                engine.set_custom_curriculum_learning_schedule({})
    return record


def global_batches(records: list[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for record in records:
        for step, read in record.notes["read"].items():
            found.setdefault(step, []).extend(read)
    return {step: sorted(found[step]) for step in sorted(found)}


def test_the_curriculum_deals_what_deepspeed_deals(pool: RankPool, tmp_path: Path) -> None:
    """The same samples in every global batch, in whatever world."""
    write_index(tmp_path)
    stock = pool.run(stock_case, folder=str(tmp_path))
    batches = [sorted(index for part in parts for index in part) for parts in zip(*stock, strict=True)]
    assert len(batches) == 13 and all(len(batch) == 12 for batch in batches)
    found = pool.run(curriculum_case, folder=str(tmp_path), schedule={2: (4, 3), 4: (3, 1), 7: (4, 0), 9: (1, 2)})
    assert global_batches(found) == dict(enumerate(batches[:CURRICULUM_STEPS]))
    for record in found:
        for step, state in record.notes["told"].items():
            most = 2 if step < 3 else 3 if step < 6 else METRICS
            assert state["current_difficulties"] == {"value": most} and state["curriculum_step"] == step + 1
            assert all(metric(index) <= most for index in record.notes["read"][step])
    assert list((tmp_path / "clusters").glob("member-*")) == [], "folders outlive their engines"


@pytest.mark.full
def test_a_curriculum_schedule_of_the_users(pool: RankPool, tmp_path: Path) -> None:
    write_index(tmp_path)
    found = pool.run(curriculum_case, folder=str(tmp_path), schedule={3: (4, 2), 6: (2, 3)}, custom=True)
    for step, batch in global_batches(found).items():
        assert len(batch) == 12
        assert (max(map(metric, batch)) > 2) == (step >= 4)
