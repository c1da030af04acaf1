"""Of what type the elements of each state kind are, and in which memory: one table for all who allocate and check.

On a CPU there is one memory. With an accelerator there are two: states are on the device but for what ZeRO offloads,
which is where DeepSpeed's constructors put it (0.19.8, `stage_1_and_2.py`, `stage3.py`).
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
    """Of what type the elements of each state kind are, in whatever layout.

    weight: of the parameters. gradient: of accumulated gradients, thus of ZeRO-3's last ones. moments: by name; one
    that is not named is of the master's type.
    """

    weight: torch.dtype
    gradient: torch.dtype
    master: torch.dtype = torch.float32
    moments: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, kind: str) -> torch.dtype:
        """The type of one kind."""
        of_job: torch.dtype = getattr(self, row_of(kind).element)
        return self.moments.get(kind, of_job)


class Place(NamedTuple):
    """A device; pinned: host memory that an accelerator copies from and to by itself."""

    device: torch.device
    pinned: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies there; more of it may be pinned than has to be."""
        return tensor.device == self.device and (not self.pinned or is_pinned(tensor))

    def __str__(self) -> str:
        return f"{'pinned memory of ' if self.pinned else ''}{self.device}"


HERE = Place(HOST)
"""Pages of the process, which come when they are touched."""


@dataclass(frozen=True)
class Memory:
    """What the buffers of a state kind are made of."""

    dtype: torch.dtype
    place: Place = HERE


@dataclass(frozen=True)
class Placement:
    """Where ZeRO keeps the states of an engine: `device`, or the host for what is offloaded.

    optimizer, parameters: where `offload_optimizer` and `offload_param` keep theirs, the device without them; pinned as
    the configuration says.
    """

    device: torch.device = HOST
    optimizer: Place = HERE
    parameters: Place = HERE

    @staticmethod
    def of(config: Any) -> Placement:
        """By DeepSpeed's parsed configuration."""
        device, zero = compute_device(), config.zero_config

        def place(block: Any) -> Place:
            is_on_device = block is None or str(getattr(block.device, "value", block.device)) == "none"
            return Place(device) if is_on_device else Place(HOST, device != HOST and bool(block.pin_memory))

        return Placement(device, place(zero.offload_optimizer), place(zero.offload_param))

    @property
    def offloads_optimizer(self) -> bool:
        """Whether there are two memories, and the optimizer's is the host's."""
        return self.optimizer.device != self.device

    def place(self, kind: str, zero_stage: int) -> Place:
        """Of one state kind under a stage.

        What the CPU optimizer makes for itself, its moments, is not pinned, nor are stage 3's masters; its trainable
        weights always are.
        """
        if zero_stage == 0:
            return Place(self.device)
        if kind == WEIGHT:
            on_host = zero_stage == 3 and self.parameters.device != self.device
            return Place(HOST, pinned=True) if on_host else Place(self.device)
        return self.optimizer if zero_stage in row_of(kind).pinned_in else Place(self.optimizer.device)

    def memory(self, types: ElementTypes, kinds: tuple[str, ...], zero_stage: int) -> dict[str, Memory]:
        """What the buffers of each of `kinds` are made of."""
        return {kind: Memory(types.of(kind), self.place(kind, zero_stage)) for kind in kinds}


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the accelerator copies from and to a tensor by itself."""
    return bool(get_accelerator().is_pinned(tensor))
