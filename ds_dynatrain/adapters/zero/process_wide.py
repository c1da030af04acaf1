"""State that DeepSpeed keeps once per process rather than per engine, apart from groups (`worlds`).

It consists of globals that DeepSpeed sets, and of random streams in addition to torch's: those of the tracker of
activation checkpointing, and the accelerator's own. Code that runs under `get_cuda_rng_tracker().fork(name)` draws from
the tracker's named states, which every fork advances. Nothing else in a job saves these states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.adapters.zero.stages import restore_linear


@dataclass(frozen=True)
class ProcessWide:
    """Globals that an engine sets for its whole process.

    linear: `torch.nn.functional.linear`, which stage 3 replaces with a function that rounds differently.
    is_autocast: whether torch autocast was configured.
    autocast: the type in which ranks add up gradients under autocast.
    """

    linear: Callable[..., torch.Tensor]
    is_autocast: bool = False
    autocast: torch.dtype | None = None

    @staticmethod
    def capture() -> ProcessWide:
        """Return the current values of the globals."""
        given = torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE
        return ProcessWide(torch.nn.functional.linear, *given)

    def put(self) -> None:
        """Set the globals to these values."""
        torch.nn.functional.linear = self.linear
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = self.is_autocast
        torch_autocast.TORCH_AUTOCAST_DTYPE = self.autocast


def put_plain() -> None:
    """Set the globals to the values that they have in a process without an engine."""
    restore_linear()
    ProcessWide(torch.nn.functional.linear).put()


StreamState = np.ndarray[Any, Any]
"""State of a random stream, as bytes."""
_ACCELERATOR = "accelerator"
_TRACKED = "checkpointing:"


def further_streams() -> dict[str, StreamState]:
    """Return a map from the name of each random stream in use that is not torch's own to its state, as bytes."""
    found: dict[str, StreamState] = {}
    for name, state in get_cuda_rng_tracker().get_states().items():
        found[f"{_TRACKED}{name}"] = state.cpu().numpy()
    if is_accelerated():
        found[_ACCELERATOR] = get_accelerator().get_rng_state().cpu().numpy()
    return found


def restore_further_streams(streams: dict[str, StreamState]) -> None:
    """Restore random streams from `further_streams`. The tracker's other streams are removed."""
    tracked: dict[str, torch.Tensor] = {}
    for name, held in streams.items():
        state = torch.from_numpy(held.copy())
        if name == _ACCELERATOR:
            get_accelerator().set_rng_state(state)
        else:
            tracked[name.removeprefix(_TRACKED)] = state
    get_cuda_rng_tracker().set_states(tracked)


def seed_accelerator(seed: int) -> None:
    """Seed the accelerator's random generator. Does nothing if DeepSpeed's accelerator is the CPU."""
    if is_accelerated():
        get_accelerator().manual_seed(seed)


def is_of_tensor_index(name: str) -> bool:
    """Return whether a random stream belongs to the tracker, whose streams are meant to differ between tensor ranks."""
    return name.startswith(_TRACKED)


def seeded_stream(seed: int) -> StreamState:
    """Return the state that the accelerator's generator would have if seeded with `seed`.

    The generator is not changed.
    """
    accelerator = get_accelerator()
    before = accelerator.get_rng_state()
    try:
        accelerator.manual_seed(seed)
        state: StreamState = accelerator.get_rng_state().cpu().numpy()
        return state
    finally:
        accelerator.set_rng_state(before)
