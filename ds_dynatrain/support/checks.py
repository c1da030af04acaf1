"""Conditions of rows that depend on more than one key of the configuration, or on the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_dynatrain.support.row import Refusal


def needs_torch_adam(config: Mapping[str, Any]) -> Refusal | None:
    """Adam and AdamW without `torch_adam` are DeepSpeed's own, which it compiles before anything else happens."""
    block = config.get("optimizer") or {}
    if (block.get("params") or {}).get("torch_adam"):
        return None
    return Refusal(
        "optimizer.params.torch_adam: without it DeepSpeed takes its own FusedAdam, whose states are not supported yet",
        "set it to true",
    )
