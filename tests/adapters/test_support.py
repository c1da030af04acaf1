"""Everything that a switch would get wrong is refused by its name before anything is built."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynatrain.adapters.support import SUPPORTED_KEYS, SUPPORTED_ZERO_KEYS, refuse_unsupported
from ds_dynatrain.errors import UnsupportedError


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator is the CPU, whatever this machine has."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(real_accelerator, "ds_accelerator", CPU_Accelerator())


def settings(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    return {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": 1}, **more}


def refused(config: dict[str, Any], words: str, model: Any = None, optimizer: Any = None, mpu: Any = None) -> None:
    with pytest.raises(UnsupportedError, match=words):
        refuse_unsupported(config, nn.Linear(2, 2) if model is None else model, optimizer, mpu)


def test_what_is_supported_passes() -> None:
    refuse_unsupported(settings(gradient_clipping=1.0, bf16={"enabled": True}), nn.Linear(2, 2), None, None)
    config = settings()
    del config["optimizer"]
    refuse_unsupported(config, nn.Linear(2, 2), torch.optim.AdamW, None)
    refuse_unsupported({"train_batch_size": 1}, nn.Linear(2, 2), lambda parameters: None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp16", {"enabled": True}),
        ("amp", {"enabled": True}),
        ("zenflow", {"topk_ratio": 0.1}),
        ("communication_data_type", "fp32"),
        ("prescale_gradients", True),
        ("gradient_predivide_factor", 2.0),
        ("sparse_gradients", True),
        ("data_efficiency", {"enabled": True}),
        ("curriculum_learning", {"enabled": True}),
        ("compression_training", {"weight_quantization": {}}),
        ("pipeline", {"stages": 2}),
        ("tensor_parallel", {"autotp_size": 2}),
        ("sequence_parallel_size", 2),
        ("hybrid_engine", {"enabled": True}),
        ("eigenvalue", {"enabled": True}),
        ("progressive_layer_drop", {"enabled": True}),
        ("data_types", {"grad_accum_dtype": "fp32"}),
        ("elasticity", {"enabled": True}),
        ("compile", {"deepcompile": True}),
        ("activation_checkpointing", {"partition_activations": True}),
        ("an unknown key", "x"),
    ],
)
def test_keys(key: str, value: Any) -> None:
    assert key not in SUPPORTED_KEYS
    refused(settings(**{key: value}), rf"^{key}: not supported with a dynatrain block yet; remove the key")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offload_optimizer", {"device": "cpu"}),
        ("offload_param", {"device": "nvme", "nvme_path": "/x"}),
        ("cpu_offload", True),
        ("round_robin_gradients", True),
        ("zero_hpz_partition_size", 2),
        ("zero_quantized_weights", True),
        ("zero_quantized_gradients", True),
        ("mics_shard_size", 2),
        ("mics_hierarchical_params_gather", True),
        ("leaf_module", {"classes": []}),
        ("zenflow", {"topk_ratio": 0.1}),
        ("elastic_checkpoint", True),
    ],
)
def test_zero_keys(key: str, value: Any) -> None:
    assert key not in SUPPORTED_ZERO_KEYS
    refused(settings(zero_optimization={"stage": 1, key: value}), rf"^zero_optimization\.{key}: not supported")


@pytest.mark.parametrize("value", [None, False, {}, {"enabled": False}])
def test_a_feature_that_is_off_is_no_reason(value: Any) -> None:
    refuse_unsupported(settings(fp16=value), nn.Linear(2, 2), None, None)


def test_zero_features_that_are_off() -> None:
    zero = {"stage": 2, "round_robin_gradients": False, "offload_optimizer": {"device": "none"}, "offload_param": None}
    refuse_unsupported(settings(zero_optimization=zero), nn.Linear(2, 2), None, None)


def test_bf16_options() -> None:
    refused(settings(bf16={"enabled": True, "immediate_grad_update": True}), r"bf16\.immediate_grad_update")


def test_no_optimizer() -> None:
    refused({"train_batch_size": 4}, "no optimizer: pass one to initialize")


@pytest.mark.parametrize("name", ["SGD", "Lion", "OneBitAdam", "Muon", "Adagrad"])
def test_optimizers_of_the_configuration(name: str) -> None:
    refused(settings(optimizer={"type": name, "params": {"lr": 1e-3}}), f"optimizer.type '{name}'.*use Adam or AdamW")


def test_the_fused_optimizer_of_deepspeed() -> None:
    refused(settings(optimizer={"type": "AdamW"}), "torch_adam")


def test_mpu() -> None:
    refused(settings(), "^mpu: only the data axis", mpu=object())


def test_pipeline_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.pipe import PipelineModule

    monkeypatch.setattr(PipelineModule, "__init__", lambda self: nn.Module.__init__(self))
    refused(settings(), "^PipelineModule: the pipe axis", PipelineModule())


def test_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refused(settings(), "'0.weight' is torch.float16", nn.Sequential(nn.Linear(2, 2).half()))
    refused(settings(), "'weight' is on the meta device", nn.Linear(2, 2, device="meta"))
    setattr(model[1].bias, "ds_id", 3)  # noqa: B010
    refused(settings(), "'1.bias' was built under deepspeed.zero.Init; build the model outside", model)
    expert = nn.Linear(2, 2)
    expert.weight.allreduce = False  # type: ignore[attr-defined]
    refused(settings(), "'0.weight' is an expert parameter", nn.Sequential(expert))


def test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.moe.layer import MoE

    refused(settings(), "'0' has sparse gradients", nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    monkeypatch.setattr(MoE, "__init__", lambda self: nn.Module.__init__(self))
    refused(settings(), "'1' is a mixture-of-experts layer", nn.Sequential(nn.Linear(2, 2), MoE()))


def test_compiled_module() -> None:
    refused(settings(), "torch.compile: .* is compiled", torch.compile(nn.Linear(2, 2)))


def test_a_compiled_part() -> None:
    parts = OrderedDict[str, Any](a=nn.Linear(2, 2), b=torch.compile(nn.Linear(2, 2)))
    refused(settings(), "torch.compile: 'b' is compiled", nn.Sequential(parts))


def test_a_module_compiled_in_place() -> None:
    model = nn.Linear(2, 2)
    model.compile()
    refused(settings(), "torch.compile", model)


def test_another_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(CPU_Accelerator, "device_name", lambda self, index=None: "cuda")
    refused(settings(), "accelerator 'cuda': a live switch is tested on CPU members only")
