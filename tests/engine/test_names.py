"""What a user finds on the engine beyond DeepSpeed's own names: these, and nothing that parts need of each other."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_dynatrain.engine.engine import DynatrainEngine
from ds_dynatrain.engine.pipeline import DynatrainPipelineEngine
from tests.adapters.stock import stock_engine
from tests.engine import jobs
from tests.engine.pool import RankPool

NAMES = {
    *("switch", "plan", "on_switch", "last_switch", "is_switching", "boundary"),
    *("layout", "members", "member", "rank", "generation", "idle", "is_void"),
    *("loader", "epochs", "job_epoch", "mean", "batch", "global_batch_size", "slot_is_borrowed"),
    *("data", "data_rank", "sequence", "sequence_rank"),
    *("save_universal", "start_save_universal", "load_universal", "resumed"),
    *("register_parameters", "carry", "new_group", "turn", "close"),
}
MOST = 40


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def found(stage: int) -> tuple[set[str], set[str]]:
    """Attributes of one of our engines, and of one of DeepSpeed's of the same configuration."""
    settings = jobs.config("fp32", (4, stage))
    with jobs.job(settings) as made:
        jobs.train(made, 2)
        ours = public(vars(made.engine))
    stock = {name: value for name, value in settings.items() if name != "dynatrain"}
    stock["zero_optimization"] = {"stage": stage}
    model = jobs.small_gpt()
    with stock_engine(model, stock, model_parameters=list(model.parameters())) as engine:
        return ours, public(vars(engine))


def test_of_the_class() -> None:
    assert public(dir(DynatrainEngine)) - public(dir(DeepSpeedEngine)) == NAMES and len(NAMES) <= MOST
    assert public(dir(DynatrainPipelineEngine)) - public(dir(PipelineEngine)) == NAMES


@pytest.mark.parametrize("stage", [1, 3])
def test_of_an_object(pool: RankPool, stage: int) -> None:
    for ours, stock in pool.run(found, stage=stage):
        assert ours - stock - public(dir(DeepSpeedEngine)) <= {"resumed"}
