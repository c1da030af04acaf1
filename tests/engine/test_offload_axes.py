"""CPU offload beside the tensor and the expert axis, in every stage that it is known in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ds_dynatrain.space import Layout
from tests.engine import axis_walks
from tests.engine.axis_walks import Subject
from tests.engine.mixtures import autoep, native
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model


def offloaded(find: Callable[[], Subject], param: bool = False) -> Subject:
    """The same with offload (and torch's Adam); param: parameters are offloaded, too."""
    found = find()
    block: dict[str, Any] = {"stage3_param_persistence_threshold": 40, "offload_optimizer": {"device": "cpu"}}
    if param:
        block["offload_param"] = {"device": "cpu"}
    return dataclasses.replace(found, settings={**found.settings, "zero_optimization": block})


def split(data: int, tensor: int, stage: int) -> Layout:
    """A layout of tensor ranks."""
    return Layout(data=data, tensor=tensor, zero_stage=stage)


def mixed(data: int, expert: int, stage: int) -> Layout:
    """A layout of experts' ranks."""
    return Layout(data=data, expert=expert, zero_stage=stage)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "param"), [("fp32", False), ("bf16", True)])
def test_tensor_sizes(pool: RankPool, dtype: str, param: bool) -> None:
    path = [split(2, 1, 1), split(2, 2, 1), split(1, 4, 2), split(2, 2, 3), split(1, 3, 3), split(1, 2, 2)]
    find = partial(offloaded, partial(language_model, "llama of 4 kv"), param)
    axis_walks.compare(pool, find, path, dtype, 1e-6 if dtype == "fp32" else 1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("find", "path"),
    [
        pytest.param(
            autoep,
            [mixed(2, 2, 1), mixed(4, 4, 3), mixed(4, 1, 2), mixed(4, 2, 1), mixed(2, 2, 3)],
            marks=pytest.mark.full,
        ),
        (native, [mixed(2, 2, 1), mixed(4, 4, 2), mixed(2, 1, 2), mixed(4, 2, 1)]),
    ],
    ids=["AutoEP", "native"],
)
def test_expert_sizes(pool: RankPool, find: Callable[[], Subject], path: list[Layout]) -> None:
    axis_walks.compare(pool, partial(offloaded, find), path)
