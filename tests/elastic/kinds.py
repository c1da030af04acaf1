"""What `training.py` is told: DeepSpeed's configuration, and what nodes of two workers train beside data."""

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
    "sequence": Kind({"data": 1, "sequence": 2}),
}


def settings(stage: int = 1, own: dict[str, Any] | None = None, **block: Any) -> dict[str, Any]:
    """A configuration that says nothing about the world. own: more of DeepSpeed's; block: more of dynatrain's.

    No copies are taken unless a test asks for them: most tests are about what a job does without any.
    """
    return {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 6,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "dynatrain": {"timeout_seconds": 20, "buddies": {"mode": "off"}, **block},
        **(own or {}),
    }
