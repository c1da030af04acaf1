"""Bytes that a rank sends in collectives, counted by what they are called with and not by what a network carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as td
from torch.utils._python_dispatch import TorchDispatchMode

UNCOUNTED = ("barrier", "send", "recv_")


class SentBytes(TorchDispatchMode):
    """bytes_sent: inside the block, in collectives. RuntimeError for one that it cannot count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name not in UNCOUNTED:
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            given = next(named[key] for key in ("input_tensors", "input_tensor", "input", "tensors") if key in named)
            taken = next((named[key] for key in ("output_tensors", "output_tensor", "output") if key in named), given)
            ranks = td.ProcessGroup.unbox(named["process_group"]).size()
            self.bytes_sent += sent(name, size(given), size(taken), ranks)
        return func(*args, **(kwargs or {}))


def sent(name: str, given: int, taken: int, ranks: int) -> int:
    """What one of so many ranks sends on a ring, if it gives and takes so many bytes."""
    match name:
        case "allreduce_":
            return 2 * given * (ranks - 1) // ranks
        case "reduce_" | "broadcast_" | "_reduce_scatter_base_":
            return given * (ranks - 1) // ranks
        case "allgather_" | "_allgather_base_":
            return given * (ranks - 1)
        case "alltoall_base_":  # a rank takes as much from itself as from each other
            return given - taken // ranks
    raise RuntimeError(f"bytes of {name!r} are not counted: give it a line here")


def size(tensors: torch.Tensor | Sequence[Any]) -> int:
    """Bytes of a tensor, or of all in a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(size, tensors))
