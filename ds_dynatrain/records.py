"""Records: frozen dataclasses as plain JSON, and back with their types checked.

Members exchange records, and files store them. A class that is exchanged is a plain dataclass without code for it:
`to_record` reads its fields, and `from_record` checks each field against its annotation.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from ds_dynatrain.errors import TransferError

T = TypeVar("T")


def to_record(value: Any) -> Any:
    """Return a dataclass as plain JSON: dictionaries, lists, numbers, strings and None."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json")


def from_record(kind: type[T], record: Any) -> T:
    """Return the object of class `kind` that `to_record` turned into `record`.

    Raises TransferError if the record lacks a field, has an unknown field, or has a value of a wrong type.
    """
    known: Any = kind
    try:
        found: T = _adapter(known).validate_python(record)
        return found
    except ValidationError as error:
        raise TransferError(f"this is no record of a {kind.__name__}: {error}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind))
