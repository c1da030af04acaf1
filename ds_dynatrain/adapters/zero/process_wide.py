"""State that DeepSpeed keeps once per process rather than per engine, apart from groups (`worlds`).

It consists of globals that DeepSpeed sets, and of random streams: the default generators of torch, numpy and Python,
those of the tracker of activation checkpointing, and the accelerator's own. Code that runs under
`get_cuda_rng_tracker().fork(name)` draws from the tracker's named states, which every fork advances. Nothing else in a
job saves these states.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping
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
        """Set the globals to the values of this object."""
        torch.nn.functional.linear = self.linear
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = self.is_autocast
        torch_autocast.TORCH_AUTOCAST_DTYPE = self.autocast


def put_plain() -> None:
    """Set the globals to the values that they have in a process without an engine."""
    restore_linear()
    ProcessWide(torch.nn.functional.linear).put()


Streams = dict[str, Any]
"""A map from the name of a generator to its state, as plain JSON."""
_ACCELERATOR = "accelerator"
_TRACKED = "checkpointing:"


def capture() -> Streams:
    """Return the states of torch's, numpy's and Python's default generators, and of those that DeepSpeed keeps."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, spare = random.getstate()
    return {
        "torch": _text(torch.get_rng_state().numpy()),
        "numpy": [name, _text(np.asarray(keys)), int(position), int(has_gauss), float(gauss)],
        "python": [version, _text(np.array(words, dtype=np.uint32)), spare],
        "further": further_streams(),
    }


def restore(streams: Streams) -> None:
    """Set all generators to states from `capture`."""
    name, keys, *others = streams["numpy"]
    version, words, spare = streams["python"]
    torch.set_rng_state(torch.from_numpy(_array(streams["torch"], np.uint8)))
    np.random.set_state((name, _array(keys, np.uint32), *others))
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), spare))
    restore_further_streams(streams["further"])


def further_streams() -> dict[str, str]:
    """Return the states of all random streams in use that are no default generators, keyed by the stream's name."""
    found = {f"{_TRACKED}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    if is_accelerated():
        found[_ACCELERATOR] = get_accelerator().get_rng_state()
    return {name: _text(state.cpu().numpy()) for name, state in sorted(found.items())}


def restore_further_streams(streams: Mapping[str, str]) -> None:
    """Restore random streams from the result of `further_streams`.

    Other streams in the tracker of activation checkpointing are removed.
    """
    tracked: dict[str, torch.Tensor] = {}
    for name, held in streams.items():
        state = torch.from_numpy(_array(held, np.uint8))
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
    """Return whether a random stream differs between tensor ranks, as those of activation checkpointing do."""
    return name.startswith(_TRACKED)


def seeded_stream(seed: int) -> str:
    """Return the state that the accelerator's generator would have if seeded with `seed`.

    The generator is not changed.
    """
    accelerator = get_accelerator()
    before = accelerator.get_rng_state()
    try:
        accelerator.manual_seed(seed)
        return _text(accelerator.get_rng_state().cpu().numpy())
    finally:
        accelerator.set_rng_state(before)


def _text(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
