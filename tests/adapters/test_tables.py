"""Names of DeepSpeed's, batch sizes, the logical tensors of a model."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import ds_dynatrain
from ds_dynatrain.adapters.versions.deepspeed_versions import NAMES, check_names, versions_tested
from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes, layout_config
from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.data import BatchArithmetic
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.space import FROZEN, Layout

# ---- names ----------------------------------------------------------------------------------------------------------


def test_all_names_are_there() -> None:
    check_names()


def test_a_missing_name_gives_both_versions() -> None:
    wanted = {
        "deepspeed.runtime.engine": "DeepSpeedEngine DeepSpeedEngine._gone.deeper",
        "deepspeed.no_such_module": "name",
        "deepspeed.utils.groups": "_WORLD_GROUP",
    }
    with pytest.raises(ImportError) as found:
        check_names(wanted)
    words = str(found.value)
    for part in (
        "deepspeed.runtime.engine.DeepSpeedEngine._gone.deeper",
        "deepspeed.no_such_module.name",
        versions_tested(),
    ):
        assert part in words
    assert f"DeepSpeed {deepspeed.__version__}" in words and f"ds_dynatrain {ds_dynatrain.__version__}" in words
    assert "_WORLD_GROUP" not in words


def test_a_name_that_deepspeed_loses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    monkeypatch.delattr(DeepSpeedEngine, "_take_model_step")
    with pytest.raises(ImportError, match=r"DeepSpeedEngine\._take_model_step"):
        check_names(NAMES)


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "data", "expected"),
    [
        ((8, None, None), 2, (8, 4)),
        ((8, 2, None), 2, (8, 2)),
        ((8, 2, 2), 2, (8, 2)),
        ((None, 2, 3), 2, (12, 2)),
        ((None, 2, None), 4, (8, 2)),
        ((8, None, 2), 2, (8, 2)),
        ((8, None, None), 3, (8, 3)),
        ((8, None, 2), 3, (8, 2)),
    ],
)
def test_batch_sizes(given: tuple[int | None, ...], data: int, expected: tuple[int, int]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    assert BatchSizes.of(config, data) == BatchSizes(*expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has neither train_batch_size nor train_micro_batch_size_per_gpu; give one of them"),
        ({"gradient_accumulation_steps": 2}, "has neither train_batch_size nor"),
        ({"train_batch_size": 0}, "train_batch_size is 0; give a whole number"),
        ({"train_batch_size": "8"}, "train_batch_size is '8'"),
        ({"train_batch_size": 8.0}, r"train_batch_size is 8\.0"),
        ({"train_batch_size": True}, "train_batch_size is True"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": -1}, "train_micro_batch_size_per_gpu is -1"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": "2"}, "gradient_accumulation_steps is '2'"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            "train_batch_size 9 != 2 samples x 2 accumulation steps x data=2",
        ),
    ],
)
def test_batch_sizes_that_cannot_be(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchSizes.of(config, 2)


@pytest.mark.parametrize(("data", "micro", "steps"), [(1, 4, 2), (2, 4, 1), (3, 3, 1), (4, 2, 1)])
def test_configuration_of_a_layout(monkeypatch: pytest.MonkeyPatch, data: int, micro: int, steps: int) -> None:
    monkeypatch.setattr(deepspeed.runtime.config.dist, "get_rank", lambda: 0)
    given = {"train_batch_size": 8, "zero_optimization": {"stage": 1, "overlap_comm": False}, "gradient_clipping": 0.5}
    adapted, parsed = layout_config(given, Layout(data=data, zero_stage=3), BatchArithmetic(8, 4, data))
    assert given["zero_optimization"] == {"stage": 1, "overlap_comm": False}, "the user's own is left as it was"
    assert adapted["zero_optimization"]["stage"] == parsed.zero_config.stage == 3
    assert (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps) == (
        8,
        micro,
        steps,
    )
    assert parsed.gradient_clipping == 0.5


# ---- model ----------------------------------------------------------------------------------------------------------


def test_logical_tensors() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    model.register_parameter("tied", model[0].bias)
    model[0].weight.requires_grad_(False)
    found = ModelMap.of(model, [[model[1].bias, model[0].weight], [model[1].weight, model[0].bias]])
    names = [(tensor.name, tensor.shape, tensor.group) for tensor in found.tensors]
    expected = [("1.bias", (2,), 0), ("1.weight", (2, 3), 1), ("tied", (3,), 1), ("0.weight", (3, 2), FROZEN)]
    assert names == expected and found.trainable == 3 and found.dtype == torch.float32
    assert [
        parameter is held
        for parameter, held in zip(
            found.parameters, [model[1].bias, model[1].weight, model[0].bias, model[0].weight], strict=True
        )
    ] == [True] * 4
    assert [number for number, _ in found.frozen()] == [3]


def test_models_that_are_refused() -> None:
    model: Any = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UnsupportedError, match="optimizer group 1 has no trainable parameter"):
        ModelMap.of(nn.ModuleList([model, frozen]), [list(model.parameters()), list(frozen.parameters())])
    with pytest.raises(UnsupportedError, match=r"group 0 holds a parameter of shape \(3,\) that is not in the model"):
        ModelMap.of(model, [[nn.Parameter(torch.ones(3))]])
    with pytest.raises(UnsupportedError, match=r"one type, and 'weight' is torch.float32, 'bias' is torch.bfloat16"):
        model.bias.data = model.bias.data.bfloat16()
        ModelMap.of(model, [[model.weight]])
    with pytest.raises(UnsupportedError, match="it has none"):
        ModelMap.of(nn.ReLU(), [])
