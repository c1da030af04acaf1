"""Random streams: they belong to a place on the data axis, not to a process, and move with it.

An index that lives on keeps its streams, whoever holds it; a new index gets streams seeded from (job seed, name, index,
generation); a vanished one is dropped.
"""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch

from ds_dynatrain.adapters.rng import further_streams, restore_further_streams, seeded_stream

Streams = dict[str, Any]
"""Name of a generator -> its state as plain JSON."""


def capture() -> Streams:
    """The states of torch's, numpy's and Python's default generators, and of those that DeepSpeed keeps."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, spare = random.getstate()
    return {
        "torch": _text(torch.get_rng_state().numpy()),
        "numpy": [name, _text(np.asarray(keys)), int(position), int(has_gauss), float(gauss)],
        "python": [version, _text(np.array(words, dtype=np.uint32)), spare],
        "further": {stream: _text(state) for stream, state in sorted(further_streams().items())},
    }


def restore(streams: Streams) -> None:
    """Put captured states back."""
    torch.set_rng_state(torch.from_numpy(_array(streams["torch"], np.uint8)))
    name, keys, position, has_gauss, gauss = streams["numpy"]
    np.random.set_state((name, _array(keys, np.uint32), position, has_gauss, gauss))
    version, words, spare = streams["python"]
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), spare))
    restore_further_streams({name: _array(state, np.uint8) for name, state in streams["further"].items()})


def seeded(job_seed: int, index: int, generation: int) -> Streams:
    """The streams of a data index that did not exist before, of all generators that this process has; the caller's own
    are left as they are.
    """
    before = capture()
    try:
        torch.manual_seed(_seed(job_seed, "torch", index, generation))
        np.random.seed(_seed(job_seed, "numpy", index, generation) % 2**32)
        random.seed(_seed(job_seed, "python", index, generation))
        restore_further_streams(
            {name: seeded_stream(_seed(job_seed, name, index, generation)) for name in further_streams()}
        )
        return capture()
    finally:
        restore(before)


def _seed(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _text(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
