"""Variants of the measured job that real jobs use besides plain mixed precision: the same model and series of switches,
with one thing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from workload import GPT

LORA_RANK = 8

Groups = list[dict[str, Any]]
Change = tuple[str, dict[str, int]]
"""A switch: its name in tables, and the sizes of its target that change."""


@dataclass(frozen=True)
class Variant:
    """A variant of a job.

    title: its name in tables.
    dtype: the type of the weights.
    settings: settings that are merged into the plain configuration, block by block.
    alter: function that changes the model in place.
    groups: function that returns the optimizer groups; None for one group of all parameters.
    build, step, collate, start, lap: for another model with another walk: its builder, one optimizer step (None: as for
        the GPT), the collate function, and a lap of changes from `start` back to it.
    """

    title: str
    dtype: str
    settings: dict[str, Any] = field(default_factory=dict)
    alter: Callable[[GPT], None] | None = None
    groups: Callable[[GPT], Groups] | None = None
    build: Callable[[], nn.Module] | None = None
    step: Callable[[Any, Iterator[Any]], None] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    start: dict[str, int] = field(default_factory=lambda: {"data": 2, "zero_stage": 1})
    lap: tuple[Change, ...] = ()


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        sum_of_both: Tensor = self.base(x) + self.up(self.down(x))
        return sum_of_both


def with_lora(model: GPT) -> None:
    """Freeze the model, and add LoRA to each linear layer of the blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRALinear(layer))


def three_groups(model: GPT) -> Groups:
    """Return groups of embeddings, matrices and vectors, each with its own learning rate and weight decay."""
    embeddings = [model.tokens.weight, model.places.weight]
    known = set(map(id, embeddings))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [
        {"params": embeddings, "lr": 2e-5, "weight_decay": 0.0},
        {"params": [parameter for parameter in rest if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in rest if parameter.dim() == 1], "weight_decay": 0.0},
    ]


CPU_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
VARIANTS: dict[str, Variant] = {
    "offload": Variant("bf16, Adam offloaded to the host", "bf16", {**CPU_ADAM, **OFFLOADED}),
    "fp16": Variant("fp16, dynamic loss scale", "fp16", {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "bf16_optimizer": Variant(
        "bf16, gradients accumulated in fp32 (BF16_Optimizer at stage 1)",
        "bf16",
        {"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "lora": Variant(f"bf16, LoRA of rank {LORA_RANK}", "bf16", alter=with_lora),
    "groups": Variant("bf16, three parameter groups", "bf16", groups=three_groups),
}


def gpt_step(engine: Any, batches: Iterator[Tensor]) -> None:
    """Train one micro-batch of the GPT, which returns its loss."""
    engine.backward(engine(next(batches)))
    engine.step()


def settings_of(variant: Variant | None, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the plain configuration with the variant's settings. Only `optimizer` is replaced as a whole."""
    merged = dict(plain)
    for key, value in (variant.settings if variant is not None else {}).items():
        is_block = isinstance(value, dict) and key != "optimizer"
        merged[key] = {**plain.get(key, {}), **value} if is_block else value
    return merged


def allow_fp16() -> None:
    """Let DeepSpeed train fp16 on this processor, although its CPU accelerator asks for an instruction set that is not
    needed.
    """
    get_accelerator().is_fp16_supported = lambda: True


def model_of(variant: Variant | None, shape: dict[str, int]) -> nn.Module:
    """Return the model of this shape, altered, or the variant's own, with the same weights in every process."""
    torch.manual_seed(0)
    if variant is not None and variant.build is not None:
        return variant.build()
    model = GPT(**shape)
    if variant is not None and variant.alter is not None:
        variant.alter(model)
    return model
