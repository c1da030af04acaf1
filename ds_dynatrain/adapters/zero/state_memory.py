"""Element type and memory of each state kind: one table for all code that allocates or checks buffers.

On a CPU there is one memory. With an accelerator there are two: state is on the device, except for state that ZeRO
offloads, which lies where DeepSpeed's constructors put it (0.19.8, `stage_1_and_2.py`, `stage3.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynatrain.adapters.groups.device import HOST, compute_device
from ds_dynatrain.space import WEIGHT, row_of


@dataclass(frozen=True)
class ElementTypes:
    """Element type of each state kind; the same in every layout.

    weight: the type of the parameters.
    gradient: the type of accumulated gradients, and of the last gradients that ZeRO-3 keeps.
    master: the type of the masters, and of moments that are not listed in `moments`.
    moments: a map from the names of moments to their types.
    """

    weight: torch.dtype
    gradient: torch.dtype
    master: torch.dtype = torch.float32
    moments: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, kind: str) -> torch.dtype:
        """Return the element type of one kind."""
        of_job: torch.dtype = getattr(self, row_of(kind).element)
        return self.moments.get(kind, of_job)


class MemoryPlace(NamedTuple):
    """A device, and the kind of its memory.

    pinned: whether the memory is page-locked host memory, from and to which an accelerator copies by itself.
    """

    device: torch.device
    pinned: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this memory. A tensor may be pinned even if that is not required."""
        return tensor.device == self.device and (not self.pinned or is_pinned(tensor))

    def __str__(self) -> str:
        return f"{'pinned memory of ' if self.pinned else ''}{self.device}"


HERE = MemoryPlace(HOST)
"""Host memory that is not pinned. Its pages are allocated when they are first touched."""


@dataclass(frozen=True)
class Memory:
    """Element type and place of the buffers of a state kind."""

    dtype: torch.dtype
    place: MemoryPlace = HERE


def place_of(config: Any, kind: str, zero_stage: int) -> MemoryPlace:
    """Return the memory in which DeepSpeed keeps a state kind under a ZeRO stage.

    config: DeepSpeed's parsed configuration.

    State is on the device unless `offload_optimizer` or `offload_param` moves it to the host, where it is pinned if
    they say so. Moments, which the CPU optimizer allocates itself, and stage 3's masters are never pinned. Stage 3's
    offloaded weights are always pinned.
    """
    device, is_weight = compute_device(), kind == WEIGHT
    block = config.zero_config.offload_param if is_weight else config.zero_config.offload_optimizer
    is_on_device = block is None or str(getattr(block.device, "value", block.device)) == "none"
    if device == HOST or is_on_device or zero_stage == 0 or (is_weight and zero_stage < 3):
        return MemoryPlace(device)
    return MemoryPlace(HOST, pinned=is_weight or (bool(block.pin_memory) and zero_stage in row_of(kind).pinned_in))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in pinned memory, from and to which the accelerator copies by itself."""
    return bool(get_accelerator().is_pinned(tensor))
