"""What nodes of two workers train in jobs of other axes than data: see `KIND` of `training.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a node's two workers train; beside which layout of as many ranks; own: of DeepSpeed's configuration."""

    layout: Mapping[str, int]
    beside: Mapping[str, int] = field(default_factory=lambda: {"data": 2})
    own: Mapping[str, Any] = field(default_factory=dict)


KINDS: Mapping[str, Kind] = {
    "tensor": Kind({"data": 1, "tensor": 2}),
    "experts": Kind({"data": 2, "expert": 2}, {"data": 1}, {"expert_parallel": {"enabled": True}}),
    "pipeline": Kind({"data": 1, "pipe": 2}),
}
