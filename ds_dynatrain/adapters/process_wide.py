"""What DeepSpeed sets once for a process, and not for an engine, apart from groups (`parallel_state`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed.runtime import torch_autocast

from ds_dynatrain.adapters.stage3 import restore_linear


@dataclass(frozen=True)
class ProcessWide:
    """linear: `torch.nn.functional.linear`, which stage 3 replaces by one with other roundings. is_autocast, autocast:
    whether torch autocast was configured, and in which type ranks add gradients up then.
    """

    linear: Callable[..., torch.Tensor]
    is_autocast: bool = False
    autocast: torch.dtype | None = None

    @staticmethod
    def capture() -> ProcessWide:
        """As it is at present."""
        given = torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE
        return ProcessWide(torch.nn.functional.linear, *given)

    def put(self) -> None:
        """Make it so."""
        torch.nn.functional.linear = self.linear
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = self.is_autocast
        torch_autocast.TORCH_AUTOCAST_DTYPE = self.autocast


def put_plain() -> None:
    """As in a process without an engine."""
    restore_linear()
    ProcessWide(torch.nn.functional.linear).put()
