"""Comparison of processes: their configurations, their models, and the values that extensions name must be equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds_dynatrain.config import DynatrainConfig

FREE = ("dynatrain.report.", "dynatrain.timeout_seconds")
"""Keys of the configuration that may differ between processes."""


def described(own: Mapping[str, Any], settings: DynatrainConfig) -> dict[str, str]:
    """Return a map from path to value for all values of a configuration, for example {"optimizer.params.lr": "0.1"}."""
    found: dict[str, str] = {}
    _flatten({**own, "dynatrain": settings.model_dump()}, "", found)
    return {path: value for path, value in found.items() if not path.startswith(FREE)}


def differing_key(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return a description of the first key that differs between a newcomer and the running job; "" if none differs."""
    for path in sorted({*mine, *theirs}):
        if mine.get(path) != theirs.get(path):
            here, there = mine.get(path, "not given"), theirs.get(path, "not given")
            return f"{path} is {here} here and {there} in the running job: start it with the same configuration"
    return ""


def differing_parameter(
    first: Sequence[Any], other: Sequence[Any], of_first: str = "on member 0", of_other: str = "here"
) -> str:
    """Return a description of the first parameter that differs between two models; "" if none differs."""
    first, other = plain(first), plain(other)
    for place in range(max(len(first), len(other))):
        theirs = first[place] if place < len(first) else None
        mine = other[place] if place < len(other) else None
        if mine != theirs:
            return (
                f"parameter {place} is {theirs} {of_first} and {mine} {of_other} (name, shape, type, form, "
                "requires_grad): build the same model on every process"
            )
    return ""


def differing_machine(first: Mapping[str, str], other: Mapping[str, str], of_first: str, of_other: str = "here") -> str:
    """Return a description of the first value that differs although extensions require it to be equal; "" if none
    differs."""
    for name, value in first.items():
        if other[name] != value:
            return f"{name} is {value} {of_first} and {other[name]} {of_other}: make them equal"
    return ""


def plain(value: Any) -> Any:
    """Return a value in the form that it has after a round trip through JSON. Raises TypeError if JSON cannot hold
    it."""
    return json.loads(json.dumps(value))


def _flatten(value: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _flatten(part, f"{path}.{key}" if path else str(key), found)
    else:
        found[path] = json.dumps(value, default=str)
