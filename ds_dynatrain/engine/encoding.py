"""Python values as plain JSON plus a list of tensors: nothing is pickled, and nothing that is read is executed."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np
import torch

from ds_dynatrain.errors import ConfigError, TransferError

_MARK = "__"


def encode(value: Any, tensors: list[torch.Tensor], path: str = "") -> Any:
    """`value` as JSON; tensors are appended to `tensors` and replaced by their number, type and shape.

    None, booleans, numbers, strings, lists, tuples, dictionaries, torch tensors, numpy arrays and numbers, bytes.
    ConfigError, naming the path and the type, for anything else.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"__tensor__": len(tensors) - 1, "dtype": str(value.dtype).partition(".")[2], "shape": list(value.shape)}
    if isinstance(value, np.ndarray):
        whole = np.ascontiguousarray(value).reshape(value.shape)  # it makes one dim of none
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
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__array__" in value:
        return decode(value["__array__"], tensors).numpy()
    if "__number__" in value:
        return decode(value["__number__"], tensors).numpy()[0]
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__tuple__" in value:
        return tuple(decode(part, tensors) for part in value["__tuple__"])
    if "__items__" in value:
        return {decode(key, tensors): decode(part, tensors) for key, part in value["__items__"]}
    return {key: decode(part, tensors) for key, part in value.items()}


def announced(value: Any) -> dict[int, tuple[torch.dtype, tuple[int, ...]]]:
    """Number -> (type, shape) of the tensors that an encoded value asks for; TransferError for a type of no tensor."""
    found: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}

    def visit(part: Any) -> None:
        if isinstance(part, list):
            for entry in part:
                visit(entry)
        elif isinstance(part, dict):
            if "__tensor__" in part:
                dtype = getattr(torch, part["dtype"], None)
                if not isinstance(dtype, torch.dtype):
                    raise TransferError(f"a tensor of type {part['dtype']!r} was announced, which torch does not know")
                found[part["__tensor__"]] = dtype, tuple(part["shape"])
            else:
                for entry in part.values():
                    visit(entry)

    visit(value)
    return found


def blank_tensors(value: Any) -> list[torch.Tensor]:
    """Empty tensors of the types and shapes that an encoded value asks for, in the order of their numbers."""
    found = announced(value)
    return [torch.empty(shape, dtype=dtype) for _, (dtype, shape) in sorted(found.items())]


def fingerprint(value: Any) -> str:
    """A short hexadecimal hash of any value that `encode` takes, tensors by their bytes."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(encode(value, tensors), sort_keys=True)
    sum_of = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors:
        flat = tensor.to("cpu").contiguous().reshape(-1)
        sum_of.update(flat.view(torch.uint8).numpy().tobytes())
    return sum_of.hexdigest()
