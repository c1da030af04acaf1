"""The bytes that a rank sends in collectives, computed from the arguments of the calls, not from network traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as td
from torch.utils._python_dispatch import TorchDispatchMode

UNCOUNTED = ("barrier", "send", "recv_")


class SentBytes(TorchDispatchMode):
    """Context manager that counts the bytes sent in collectives, in `bytes_sent`.

    Raises RuntimeError for a collective that it cannot count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective, and run it; see `TorchDispatchMode`."""
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name not in UNCOUNTED:
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            given = next(named[key] for key in ("input_tensors", "input_tensor", "input", "tensors") if key in named)
            taken = next((named[key] for key in ("output_tensors", "output_tensor", "output") if key in named), given)
            ranks = td.ProcessGroup.unbox(named["process_group"]).size()
            self.bytes_sent += sent(name, size(given), size(taken), ranks)
        return func(*args, **(kwargs or {}))


def sent(name: str, given: int, taken: int, ranks: int) -> int:
    """Return the bytes that each of `ranks` ranks sends on a ring.

    name: the collective.
    given: the bytes that the rank passes to it.
    taken: the bytes that the rank receives from it.
    """
    match name:
        case "allreduce_":
            return 2 * given * (ranks - 1) // ranks
        case "reduce_" | "broadcast_" | "_reduce_scatter_base_":
            return given * (ranks - 1) // ranks
        case "allgather_" | "_allgather_base_":
            return given * (ranks - 1)
        case "alltoall_base_":  # a rank receives equally much from each rank, itself included
            return given - taken // ranks
    raise RuntimeError(f"bytes of {name!r} are not counted: give it a line here")


def size(tensors: torch.Tensor | Sequence[Any]) -> int:
    """Return the bytes of a tensor, or of all tensors in a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(size, tensors))
