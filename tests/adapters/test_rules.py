"""Which rules of the space a configuration of DeepSpeed's makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_dynatrain.adapters.model.shaping import rules_of


def host(weight: torch.dtype, gradient: torch.dtype, dealt: bool, aligned: bool, offloads: bool = False) -> Any:
    answers: dict[str, Any] = {
        "zero_sub_group_size": 700.0,
        "zero_round_robin_gradients": dealt,
        "zero_parameter_alignment": aligned,
        "zero_cpu_offload": offloads,
        "get_data_types": (weight, gradient),
    }
    methods = {name: lambda answer=answer: answer for name, answer in answers.items()}
    held = {"module": None, "in_leaves": False, "model_map": SimpleNamespace(dtype=weight)}
    held |= {"element_types": SimpleNamespace(weight=weight)}
    return SimpleNamespace(basic_optimizer=None, engine=SimpleNamespace(**methods), **held)


@pytest.mark.parametrize(
    ("weight", "gradient", "offloads", "stages"),
    [
        (torch.float32, torch.float32, False, {1, 2}),
        (torch.bfloat16, torch.bfloat16, False, {1, 2}),
        (torch.bfloat16, torch.float32, False, {2}),
        (torch.bfloat16, torch.float32, True, {1, 2}),
        (torch.float16, torch.float32, False, {1, 2}),
    ],
)
def test_stages_with_options(weight: torch.dtype, gradient: torch.dtype, offloads: bool, stages: set[int]) -> None:
    both = rules_of(host(weight, gradient, True, True, offloads))
    assert both.round_robin_stages == both.aligned_stages == stages
    dealt = rules_of(host(weight, gradient, True, False, offloads))
    assert (dealt.round_robin_stages, dealt.aligned_stages) == (stages, frozenset())
    assert dealt.sub_group_size == 700


def test_alignment_is_16_bytes_of_the_weights() -> None:
    sizes = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}
    for weight, elements in sizes.items():
        assert rules_of(host(weight, weight, False, True)).weight_alignment == elements
