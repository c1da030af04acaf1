"""What a user finds on the engine beyond DeepSpeed's own names: these, and nothing that parts need of each other."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_dynatrain.engine.dynatrain_engine import DynatrainEngine
from ds_dynatrain.engine.pipeline_engine import DynatrainPipelineEngine
from ds_dynatrain.space import Layout
from tests.adapters.stock import stock_engine
from tests.engine import jobs
from tests.engine.pool import RankPool

NAMES = {
    *("switch", "plan", "shapes", "suggest", "balancer", "meter", "on_switch", "last_switch", "is_switching"),
    *("boundary", "layout", "members", "member", "rank", "generation", "idle", "is_newcomer", "is_discarded"),
    "on_change",
    *("loader", "micro_batch", "epochs", "job_epoch", "mean", "batch", "global_batch_size", "slot_is_borrowed"),
    *("data", "data_rank", "sequence", "sequence_rank"),
    *("save", "load", "save_pretrained", "load_weights", "resumed", "buddies", "exact"),
    *("update_param_groups", "register_for_checkpointing", "new_group", "turn", "close"),
}
MOST = 43


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


@pytest.mark.parametrize("call", [DynatrainEngine.switch, DynatrainEngine.plan])
def test_axes_are_spelled_out(call: Any) -> None:
    """Whatever a layout has can be changed by its name, but for the order of tensors, which a switch chooses itself.

    Another name is Python's own error.
    """
    given = set(signature(call).parameters) - {"self", "layout", "at", "late"}
    assert given == {each.name for each in fields(Layout)} - {"order"}
    with pytest.raises(TypeError, match="dta"):
        signature(call).bind(None, dta=4)
