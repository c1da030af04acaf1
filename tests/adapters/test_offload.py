"""CPU offload without ranks: what is refused, the working memory, and the native half of DeepSpeedCPUAdam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_dynatrain.adapters.zero.optimizers import forget_running_products
from ds_dynatrain.adapters.zero.state import working_bytes
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from ds_dynatrain.support import refuse_config

TENSORS = [LogicalTensor("a", (8, 5), 0), LogicalTensor("b", (20,), 1), LogicalTensor("frozen", (100,), -1)]


def config(**offload: Any) -> dict[str, Any]:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", **offload}}
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    return {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": zero}


def test_what_is_offloaded_to_the_cpu_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_PIN_MEMORY_BACKEND", raising=False)
    refuse_config(config(pin_memory=True, ratio=1.0, fast_init=True))
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    refuse_config(config(pin_memory=False))


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"device": "nvme"}, r"offload_optimizer\.device = 'nvme': state on disk"),
        ({"ratio": 0.5}, r"offload_optimizer\.ratio = 0\.5: Twin-Flow"),
        ({"super_offload": True}, r"offload_optimizer\.super_offload: its optimizer runs in a separate process"),
    ],
)
def test_what_is_refused_by_name(block: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        refuse_config(config(**block))


def test_memory_that_deepspeed_pins_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    with pytest.raises(UnsupportedError, match="DS_PIN_MEMORY_BACKEND=native"):
        refuse_config(config())


@pytest.mark.parametrize(("stage", "data", "accumulates", "elements"), [(0, 2, True, 0), (3, 2, True, 0)])
def test_no_working_memory_is_counted(stage: int, data: int, accumulates: bool, elements: int) -> None:
    assert _bytes(stage, data, accumulates) == elements


def test_working_memory() -> None:
    """60 trainable elements of 2 bytes: a part, and two buffers as large as the largest of 40."""
    assert _bytes(2, 2, False) == (30 + 2 * 40) * 2
    assert _bytes(1, 3, True) == (20 + 2 * 40 + 60) * 2


def _bytes(stage: int, data: int, accumulates: bool) -> int:
    layout = Layout(data=data, zero_stage=stage)
    vps = VirtualParameterSpace.of(TENSORS, ZeroRules(), standard_kinds(2), layout, range(data))
    return working_bytes(vps.local(layout, 0), torch.bfloat16, accumulates)


@pytest.mark.full
def test_the_native_half_starts_anew_as_after_a_checkpoint(cpu_adam: None) -> None:
    """One that has stepped five times and starts anew is bit-equal to a new one that is given its state."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    old, new = (nn.Parameter(torch.linspace(-1, 1, 37)) for _ in range(2))
    stepped = DeepSpeedCPUAdam([old], **settings)
    gradients = torch.randn(8, 37, generator=torch.Generator().manual_seed(1))
    for gradient in gradients[:5]:
        old.grad = gradient.clone()
        stepped.step()
    fresh = DeepSpeedCPUAdam([new], **settings)
    new.data.copy_(old.data)
    fresh.state[new] = {name: value if name == "step" else value.clone() for name, value in stepped.state[old].items()}
    forget_running_products(stepped)
    for gradient in gradients[5:]:
        for parameter, optimizer in ((old, stepped), (new, fresh)):
            parameter.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))
