"""Records on the board: plain JSON, in which arrays of numbers lie as they do in memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ds_dynatrain.errors import TransferError

_WITH_ARRAYS = b"\x00"
_LENGTH = 8
_MARK = "__array__"


def pack(value: Any) -> bytes:
    """`value`, plain JSON whose leaves may be one-dimensional uint64 arrays, as bytes."""
    parts: list[bytes] = []
    text = json.dumps(value, default=lambda held: _placed(held, parts)).encode()
    if not parts:
        return text
    return b"".join([_WITH_ARRAYS, len(text).to_bytes(_LENGTH, "little"), text, *parts])


def unpack(data: bytes) -> Any:
    """The inverse of `pack`; TransferError for what it does not make. Arrays are views of `data`."""
    if not data.startswith(_WITH_ARRAYS):
        return json.loads(data)
    begin = len(_WITH_ARRAYS) + _LENGTH
    end = begin + int.from_bytes(data[len(_WITH_ARRAYS) : begin], "little")
    try:
        return json.loads(data[begin:end], object_hook=lambda held: _found(held, data, end))
    except ValueError as error:
        raise TransferError(f"a record of {len(data)} bytes cannot be read: {error}") from None


def _placed(held: Any, parts: list[bytes]) -> dict[str, list[int]]:
    """Where an array lies behind the text; TypeError, as of `json`, for anything else."""
    if not isinstance(held, np.ndarray) or held.dtype != np.uint64 or held.ndim != 1:
        raise TypeError(f"a {type(held).__name__} is neither plain JSON nor an array of uint64")
    start = sum(map(len, parts))
    parts.append(held.tobytes())
    return {_MARK: [start, len(held)]}


def _found(held: dict[str, Any], data: bytes, base: int) -> Any:
    if _MARK not in held:
        return held
    start, count = held[_MARK]
    return np.frombuffer(data, np.uint64, count, base + start)
