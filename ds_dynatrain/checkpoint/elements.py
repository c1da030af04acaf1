"""Element types: torch's, by the names that stand in a checkpoint, and how Arrow says them."""

from __future__ import annotations

import torch

from ds_dynatrain.checkpoint.arrow import Column, Type
from ds_dynatrain.checkpoint.flatbuffer import FormatError

_FAMILIES = {
    torch.float16: "float",
    torch.float32: "float",
    torch.float64: "float",
    torch.int8: "int",
    torch.int16: "int",
    torch.int32: "int",
    torch.int64: "int",
    torch.uint8: "uint",
}
"""Types that Arrow has, too; all others are bytes of a fixed number."""


def name_of(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).partition(".")[2]


def named(name: str) -> torch.dtype:
    """The inverse of `name_of`; FormatError for a name that torch does not know as a type."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or name != name_of(found):
        raise FormatError(f"elements of type {name!r}, which this torch does not know")
    return found


def values_column(dtype: torch.dtype) -> Column:
    """The one column of a data file: Arrow's own type, or as many bytes with torch's name beside them."""
    family = _FAMILIES.get(dtype, "bytes")
    return Column("values", Type(family, dtype.itemsize), {"dtype": name_of(dtype)})
