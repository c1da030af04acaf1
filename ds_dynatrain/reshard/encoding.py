"""Encoding of Python values as plain JSON plus a list of tensors: no pickle, and nothing that is read is executed."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ds_dynatrain.errors import ConfigError, TransferError

_MARK = "__"
MOST_DEPTH = 200
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def encode(value: Any, tensors: list[torch.Tensor], path: str = "") -> Any:
    """Return `value` as JSON; tensors are appended to `tensors` and replaced by their number, type and shape.

    Takes None, booleans, numbers, strings, lists, tuples, dictionaries, torch tensors, numpy arrays and numbers, bytes.
    Raises ConfigError, naming the path and the type, for anything else.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"__tensor__": len(tensors) - 1, "dtype": str(value.dtype).partition(".")[2], "shape": list(value.shape)}
    if isinstance(value, np.ndarray):
        whole = np.ascontiguousarray(value).reshape(value.shape)  # ascontiguousarray gives a scalar one dimension
        return {"__array__": encode(torch.from_numpy(whole), tensors, path)}
    if isinstance(value, np.generic):
        return {"__number__": encode(torch.from_numpy(np.atleast_1d(value)), tensors, path)}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(part, tensors, f"{path}[{i}]") for i, part in enumerate(value)]}
    if isinstance(value, list):
        return [encode(part, tensors, f"{path}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return {key: encode(part, tensors, f"{path}.{key}") for key, part in value.items()}
        pairs = [[encode(key, tensors, path), encode(part, tensors, f"{path}[{key!r}]")] for key, part in value.items()]
        return {"__items__": pairs}
    raise ConfigError(
        f"{path.lstrip('.') or 'value'} is a {type(value).__name__}, which cannot be carried to another member; give "
        "numbers, strings, lists, tuples, dictionaries, tensors or arrays in state_dict()"
    )


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value that `encode` made JSON of; raise TransferError, saying what, for any other JSON."""
    return _decoded(value, tensors, 0)


def _decoded(value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise TransferError(f"an encoded value is nested more than {MOST_DEPTH} deep")
    if isinstance(value, list):
        return [_decoded(part, tensors, depth + 1) for part in value]
    if not isinstance(value, dict):
        return value
    mark = next((key for key in value if key.startswith(_MARK)), None)
    if mark is None:
        return {key: _decoded(part, tensors, depth + 1) for key, part in value.items()}
    make = _MAKERS.get(mark)
    if make is None:
        raise TransferError(f"an encoded value has the unknown mark {mark!r}")
    held = value[mark]
    return make(held if make in (_tensor, _bytes) else _decoded(held, tensors, depth + 1), tensors)


def _tensor(number: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(tensors):
        raise TransferError(f"an encoded value is tensor {number!r}, and there are {len(tensors)}")
    return tensors[number]


def _bytes(text: Any, tensors: list[torch.Tensor]) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise TransferError(f"encoded bytes are no base64: {error}") from None


def _array(held: Any, tensors: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    if not isinstance(held, torch.Tensor) or held.dtype in _NOT_OF_NUMPY:
        raise TransferError(f"an encoded array is a {type(held).__name__} that is none of numpy's")
    found: np.ndarray[Any, Any] = held.numpy()
    return found


def _number(held: Any, tensors: list[torch.Tensor]) -> Any:
    found = _array(held, tensors)
    if found.shape != (1,):
        raise TransferError(f"an encoded number is of shape {found.shape}")
    return found[0]


def _tuple(held: Any, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    if not isinstance(held, list):
        raise TransferError(f"an encoded tuple is a {type(held).__name__}")
    return tuple(held)


def _items(held: Any, tensors: list[torch.Tensor]) -> dict[Any, Any]:
    if not isinstance(held, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in held):
        raise TransferError("an encoded table is no list of pairs")
    try:
        return dict(held)
    except TypeError as error:
        raise TransferError(f"a key of an encoded table cannot be one: {error}") from None


_MAKERS: Mapping[str, Callable[[Any, list[torch.Tensor]], Any]] = {
    "__tensor__": _tensor,
    "__array__": _array,
    "__number__": _number,
    "__bytes__": _bytes,
    "__tuple__": _tuple,
    "__items__": _items,
}
"""Function for each mark that makes the value from what is marked, which is decoded first if it is a value itself."""


def announced(value: Any) -> dict[int, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the (type, shape) of each tensor of an encoded value, by number; raise TransferError for an impossible
    one.
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
    """Return empty tensors of the types and shapes of an encoded value, in the order of their numbers."""
    found = announced(value)
    return [torch.empty(shape, dtype=dtype) for _, (dtype, shape) in sorted(found.items())]


def fingerprint(value: Any) -> str:
    """Return a short hexadecimal hash of any value that `encode` takes, tensors by their bytes."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(encode(value, tensors), sort_keys=True)
    sum_of = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors:
        flat = tensor.to("cpu").contiguous().reshape(-1)
        sum_of.update(flat.view(torch.uint8).numpy().tobytes())
    return sum_of.hexdigest()
