"""A case or two of each axis, and two of offload, on the device: those of `tests/engine`, called as they stand."""

from __future__ import annotations

import pytest

from tests.engine import test_moe, test_offload, test_pipeline, test_sequence, test_tensor
from tests.engine.pool import RankPool


@pytest.mark.full
def test_pipe(pool: RankPool) -> None:
    test_pipeline.test_walks(pool, "stages 0 and 1")


@pytest.mark.full
def test_pipe_with_groups_of_other_stages(pool: RankPool) -> None:
    test_pipeline.test_walks(pool, "groups that a stage has nothing of")


def test_tensor_parallel(pool: RankPool) -> None:
    test_tensor.test_rules_in_the_configuration_hold_in_every_layout(pool)


@pytest.mark.full
def test_expert(pool: RankPool) -> None:
    test_moe.test_a_model_that_is_built_in_parts(pool)


@pytest.mark.full
def test_sequence_parallel(pool: RankPool) -> None:
    for layout in test_sequence.LAYOUTS:
        test_sequence.test_every_layout_computes_the_same(pool, layout)


@pytest.mark.usefixtures("cpu_adam")
def test_offload_before_the_first_step(pool: RankPool) -> None:
    test_offload.test_before_the_first_step(pool, "fp32", (2, 3), (4, 2))


@pytest.mark.full
@pytest.mark.usefixtures("cpu_adam")
def test_offload_with_accumulation(pool: RankPool) -> None:
    test_offload.test_with_accumulation(pool)
