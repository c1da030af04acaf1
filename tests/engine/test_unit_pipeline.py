"""A pipeline engine without ranks: which loss `train_batch` returns where its own call was broken off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_dynatrain.engine.pipeline_engine import DynatrainPipelineEngine


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_step_that_others_have_made_has_its_own_loss(is_taken: bool) -> None:
    """is_taken: whether this rank's call had come to the end of the batch before it learned of the death."""
    before, shared = torch.tensor(9.0), torch.tensor(2.0)
    engine: Any = object.__new__(DynatrainPipelineEngine)
    engine.__dict__.update(_read=(object(), 4), global_steps=5)
    engine.__dict__.update(agg_train_loss=before, _known_loss=shared)
    if is_taken:
        engine.__dict__["agg_train_loss"] = engine._aggregate_total_loss()
    assert engine._train_again() is shared
    assert engine.agg_train_loss is shared and engine._known_loss is None
