"""A digest of a whole training state by each framework's own functions: no code is shared with what is measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


def of_deepspeed(module: nn.Module) -> str:
    """Of all masters and moments of a model that DeepSpeed trains; a collective of the working ranks."""
    import deepspeed  # here: ranks of plain torch do without it

    def values() -> Iterator[Tensor]:
        for parameter in module.parameters():
            yield deepspeed.utils.safe_get_full_fp32_param(parameter)
            for name in MOMENTS:
                yield deepspeed.utils.safe_get_full_optimizer_state(parameter, name)

    return _digest(values())


def of_torch(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The same of a model that FSDP2 shards."""

    def values() -> Iterator[Any]:
        for parameter in module.parameters():
            yield parameter.full_tensor()  # type: ignore[attr-defined]
            for name in MOMENTS:
                yield optimizer.state[parameter][name].full_tensor()

    return _digest(values())


def _digest(values: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().contiguous().numpy().data)
    return found.hexdigest()
