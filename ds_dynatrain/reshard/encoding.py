"""Encoding of Python values as plain JSON plus a list of tensors. It uses no pickle, and decoding never executes
code."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np
import torch

from ds_dynatrain.errors import ConfigError, TransferError

_MARK = "__"
MOST_DEPTH = 200
MOST_TEXT = 80
"""Maximum number of characters of an invalid value that an error quotes."""
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def encode(value: Any, tensors: list[torch.Tensor] | None, path: str = "") -> Any:
    """Return `value` as JSON. Its tensors are appended to `tensors`, and the JSON contains their index, dtype and shape
    instead.

    path: the location of the value in a larger one, for errors.

    Supports None, booleans, numbers, strings, lists, tuples, dictionaries, torch tensors, numpy arrays, numpy numbers
    and bytes. Raises ConfigError, naming the path and the type, for anything else, and for tensors and numpy values if
    `tensors` is None.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        if tensors is None:
            raise ConfigError(f"{path.lstrip('.') or 'value'} is a tensor or a numpy value; use a number: float(value)")
        tensors.append(value.detach())
        return {"__tensor__": len(tensors) - 1, "dtype": str(value.dtype).partition(".")[2], "shape": list(value.shape)}
    if isinstance(value, np.ndarray):
        whole = np.ascontiguousarray(value).reshape(value.shape)  # ascontiguousarray gives a scalar one dimension
        return {"__array__": encode(torch.from_numpy(whole), tensors, path)}
    if isinstance(value, np.generic):
        return {"__number__": encode(torch.from_numpy(np.atleast_1d(value)), tensors, path)}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        parts = [encode(part, tensors, f"{path}[{number}]") for number, part in enumerate(value)]
        return parts if isinstance(value, list) else {"__tuple__": parts}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return {key: encode(part, tensors, f"{path}.{key}") for key, part in value.items()}
        pairs = [[encode(key, tensors, path), encode(part, tensors, f"{path}[{key!r}]")] for key, part in value.items()]
        return {"__items__": pairs}
    raise ConfigError(
        f"{path.lstrip('.') or 'value'} is a {type(value).__name__}, which cannot be carried to another member; give "
        "numbers, strings, lists, tuples, dictionaries, tensors or arrays in state_dict()"
    )


def decode(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    """Return the value from which `encode` made this JSON. Raises TransferError for JSON that `encode` does not
    produce.

    tensors: the tensors that belong to the value.
    """
    if depth > MOST_DEPTH:
        raise TransferError(f"an encoded value is nested more than {MOST_DEPTH} deep")
    if isinstance(value, list):
        return [decode(part, tensors, depth + 1) for part in value]
    if not isinstance(value, dict):
        return value
    for mark in value:
        if mark.startswith(_MARK):
            held = value[mark] if mark in ("__tensor__", "__bytes__") else decode(value[mark], tensors, depth + 1)
            return _marked(mark, held, tensors)
    return {key: decode(part, tensors, depth + 1) for key, part in value.items()}


def _marked(mark: str, held: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value that is encoded by a mark, such as "__tuple__", and its contents. Raises TransferError if they
    are invalid."""
    is_array = isinstance(held, torch.Tensor) and held.dtype not in _NOT_OF_NUMPY
    try:
        if mark == "__tensor__" and type(held) is int and 0 <= held < len(tensors):
            return tensors[held]
        if mark == "__bytes__" and isinstance(held, str):
            return base64.b64decode(held, validate=True)
        if mark == "__array__" and is_array:
            return held.numpy()
        if mark == "__number__" and is_array and held.shape == (1,):
            return held.numpy()[0]
        if mark == "__tuple__" and isinstance(held, list):
            return tuple(held)
        if mark == "__items__" and isinstance(held, list) and all(isinstance(pair, list) for pair in held):
            return dict(held)
    except (TypeError, ValueError) as error:
        raise TransferError(f"an encoded value with the mark {mark!r} is impossible: {error}") from None
    raise TransferError(f"an encoded value with the mark {mark!r} is {str(held)[:MOST_TEXT]}, which there cannot be")


def announced(value: Any) -> dict[int, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor of an encoded value, keyed by the tensor's index.

    Raises TransferError for an invalid dtype, index or shape.
    """
    found: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}

    def visit(part: Any, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise TransferError(f"an encoded value is nested more than {MOST_DEPTH} deep")
        if isinstance(part, dict) and "__tensor__" in part:
            number, name, shape = (part.get(key) for key in ("__tensor__", "dtype", "shape"))
            dtype = getattr(torch, name, None) if isinstance(name, str) else None
            if not isinstance(dtype, torch.dtype):
                raise TransferError(f"a tensor of type {name!r} was announced, which torch does not know")
            if not isinstance(number, int) or not isinstance(shape, list) or not all(map(_is_size, shape)):
                raise TransferError(f"tensor {number!r} of shape {shape!r} was announced, which there cannot be")
            found[number] = dtype, tuple(shape)
        elif isinstance(part, list | dict):
            for entry in part.values() if isinstance(part, dict) else part:
                visit(entry, depth + 1)

    visit(value, 0)
    return found


def _is_size(dim: object) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < 1 << 56


def blank_tensors(value: Any) -> list[torch.Tensor]:
    """Return uninitialized tensors with the dtypes and shapes that an encoded value announces, in the order of their
    indices."""
    found = announced(value)
    return [torch.empty(shape, dtype=dtype) for _, (dtype, shape) in sorted(found.items())]


def fingerprint(value: Any) -> str:
    """Return a short hexadecimal hash of any value that `encode` accepts. Tensors contribute their bytes."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(encode(value, tensors), sort_keys=True)
    sum_of = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors:
        flat = tensor.to("cpu").contiguous().reshape(-1)
        sum_of.update(flat.view(torch.uint8).numpy().tobytes())
    return sum_of.hexdigest()
