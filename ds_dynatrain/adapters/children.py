"""A root module that stays, and gets other children: what all rebuilds of a module have in common."""

from __future__ import annotations

import torch
from torch import nn

_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


def with_memory(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give every parameter on the meta device memory that nobody has written to, of type `dtype`.

    Tied parameters stay tied; flags and attributes of a parameter stay with it. Memory that is not touched costs no
    time, and no page of it exists yet.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, held in part._parameters.items():
            if held is None:
                continue
            if id(held) not in made:
                empty = torch.empty(held.shape, dtype=dtype, device="cpu")
                made[id(held)] = nn.Parameter(empty, requires_grad=held.requires_grad)
                made[id(held)].__dict__.update(held.__dict__)
            part._parameters[name] = made[id(held)]
    return module


def adopt(root: nn.Module, made: nn.Module) -> None:
    """Give `root` the children, parameters and buffers of `made`, which must not be used afterwards."""
    for table in _TABLES:
        setattr(root, table, getattr(made, table))
