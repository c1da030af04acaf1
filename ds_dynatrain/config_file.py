"""Reading of DeepSpeed configurations in every accepted form."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ds_dynatrain.errors import ConfigError

Config = str | os.PathLike[str] | Mapping[str, Any]
"""A DeepSpeed configuration: a dictionary, the path of a file, or JSON in URL-safe base64."""


def read_config(config: Config) -> dict[str, Any]:
    """Return a configuration as a dictionary, read the way DeepSpeed reads it: a file may contain comments, and no key
    may occur twice.

    Raises `ConfigError` if the configuration cannot be read or a key occurs twice.
    """
    if isinstance(config, Mapping):
        return dict(config)
    import hjson  # comes with DeepSpeed; not needed for a dictionary

    name = os.fspath(config)
    once = partial(_once, name)
    try:
        if os.path.exists(name):
            with open(name, encoding="utf-8") as file:
                read = hjson.load(file, object_pairs_hook=once)
        else:
            read = hjson.loads(base64.urlsafe_b64decode(name).decode("utf-8"), object_pairs_hook=once)
    except (OSError, UnicodeError, binascii.Error, hjson.HjsonDecodeError) as error:
        raise ConfigError(
            f"configuration {name!r}: neither a readable file nor JSON in base64 ({error}); give the path of a JSON "
            "file"
        ) from error
    if not isinstance(read, dict):
        raise ConfigError(
            f"configuration {name!r}: expected an object of keys, got {type_name(read)}; write it in braces, with a "
            "key for each setting"
        )
    return read


def _once(name: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dictionary of one JSON object of a configuration. Raises `ConfigError` for a repeated key."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"configuration {name!r}: the key {key!r} stands twice in one object; remove one of them")
        found[key] = value
    return found


def type_name(value: object) -> str:
    """Return the JSON name of a value's type."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list | tuple):
        return "list"
    return names.get(type(value), type(value).__name__)
