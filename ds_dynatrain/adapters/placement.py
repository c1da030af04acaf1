"""Element type and memory of each state kind: one table for all code that allocates or checks buffers.

On a CPU there is one memory. With an accelerator there are two: states are on the device, except for those that ZeRO
offloads, which lie where DeepSpeed's constructors put them (0.19.8, `stage_1_and_2.py`, `stage3.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynatrain.adapters.device import HOST, compute_device
from ds_dynatrain.space import WEIGHT, row_of


@dataclass(frozen=True)
class ElementTypes:
    """Element type of each state kind; the same in every layout.

    weight: type of the parameters. gradient: type of accumulated gradients, and so of ZeRO-3's last ones. moments:
    types by name; a moment that is not listed has the master's type.
    """

    weight: torch.dtype
    gradient: torch.dtype
    master: torch.dtype = torch.float32
    moments: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, kind: str) -> torch.dtype:
        """Return the element type of one kind."""
        of_job: torch.dtype = getattr(self, row_of(kind).element)
        return self.moments.get(kind, of_job)


class Place(NamedTuple):
    """A device. pinned: whether it is host memory that an accelerator copies from and to by itself."""

    device: torch.device
    pinned: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies there; it may be pinned without need."""
        return tensor.device == self.device and (not self.pinned or is_pinned(tensor))

    def __str__(self) -> str:
        return f"{'pinned memory of ' if self.pinned else ''}{self.device}"


HERE = Place(HOST)
"""Host memory whose pages come when they are touched."""


@dataclass(frozen=True)
class Memory:
    """Element type and place of the buffers of a state kind."""

    dtype: torch.dtype
    place: Place = HERE


@dataclass(frozen=True)
class Placement:
    """The memories in which ZeRO keeps the states of an engine: `device`, or the host for what is offloaded.

    optimizer, parameters: places that `offload_optimizer` and `offload_param` choose, the device without them; pinned
    if the configuration says so.
    """

    device: torch.device = HOST
    optimizer: Place = HERE
    parameters: Place = HERE

    @staticmethod
    def of(config: Any) -> Placement:
        """Read the placement off DeepSpeed's parsed configuration."""
        device, zero = compute_device(), config.zero_config

        def place(block: Any) -> Place:
            is_on_device = block is None or str(getattr(block.device, "value", block.device)) == "none"
            return Place(device) if is_on_device else Place(HOST, device != HOST and bool(block.pin_memory))

        return Placement(device, place(zero.offload_optimizer), place(zero.offload_param))

    @property
    def offloads_optimizer(self) -> bool:
        """Whether there are two memories, and the optimizer's states are in the host's."""
        return self.optimizer.device != self.device

    def place(self, kind: str, zero_stage: int) -> Place:
        """Return the place of one state kind under a stage.

        Moments, which the CPU optimizer allocates itself, are not pinned, nor are stage 3's masters; its trainable
        weights always are.
        """
        if zero_stage == 0:
            return Place(self.device)
        if kind == WEIGHT:
            on_host = zero_stage == 3 and self.parameters.device != self.device
            return Place(HOST, pinned=True) if on_host else Place(self.device)
        return self.optimizer if zero_stage in row_of(kind).pinned_in else Place(self.optimizer.device)

    def memory(self, types: ElementTypes, kinds: tuple[str, ...], zero_stage: int) -> dict[str, Memory]:
        """Return the element type and the place of the buffers of each of `kinds`."""
        return {kind: Memory(types.of(kind), self.place(kind, zero_stage)) for kind in kinds}


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether the accelerator copies from and to a tensor by itself."""
    return bool(get_accelerator().is_pinned(tensor))
