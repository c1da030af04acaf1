"""Random streams that DeepSpeed keeps beside torch's: the tracker of activation checkpointing, the accelerator's own.

Blocks that are run under `get_cuda_rng_tracker().fork(name)` draw from the tracker's named states, which are advanced
with every fork; nothing else in a job knows of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from ds_dynatrain.adapters.device import is_accelerated

_ACCELERATOR = "accelerator"
_TRACKED = "checkpointing:"


def further_streams() -> dict[str, np.ndarray[Any, Any]]:
    """Name -> state (bytes) of every stream that is in use."""
    states = {f"{_TRACKED}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    if is_accelerated():
        states[_ACCELERATOR] = get_accelerator().get_rng_state()
    return {name: state.cpu().numpy() for name, state in states.items()}


def restore_further_streams(streams: dict[str, np.ndarray[Any, Any]]) -> None:
    """Put states back; a tracked stream that is not among them is dropped."""
    states = {name: torch.from_numpy(state.copy()) for name, state in streams.items()}
    if _ACCELERATOR in states:
        get_accelerator().set_rng_state(states.pop(_ACCELERATOR))
    get_cuda_rng_tracker().set_states({name.removeprefix(_TRACKED): state for name, state in states.items()})


def seed_accelerator(seed: int) -> None:
    """Seed the accelerator's generator where it is not the CPU's; `further_streams` has its state."""
    if is_accelerated():
        get_accelerator().manual_seed(seed)


def is_of_tensor_index(name: str) -> bool:
    """Whether a stream is there to differ between tensor ranks: one of the tracker's."""
    return name.startswith(_TRACKED)


def seeded_stream(seed: int) -> np.ndarray[Any, Any]:
    """The state that the accelerator's generator has after `seed`; it is left as it was."""
    accelerator = get_accelerator()
    before = accelerator.get_rng_state()
    try:
        accelerator.manual_seed(seed)
        state: np.ndarray[Any, Any] = accelerator.get_rng_state().cpu().numpy()
        return state
    finally:
        accelerator.set_rng_state(before)
