"""Element types: torch's, by the names that stand in a checkpoint."""

from __future__ import annotations

import torch

from ds_dynatrain.errors import CheckpointDamaged


def name_of(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).partition(".")[2]


def named(name: str) -> torch.dtype:
    """The inverse of `name_of`; CheckpointDamaged for a name that torch does not know as a type."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or name != name_of(found):
        raise CheckpointDamaged(
            f"elements of type {name!r}, which torch {torch.__version__} does not know; use a torch that has the type"
        )
    return found
