"""Comparison of processes: their configurations, their models, and the values that extensions name must be equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ds_dynatrain.config import DynatrainConfig

FREE = ("dynatrain.report.", "dynatrain.timeout_seconds")
"""Keys of the configuration that may differ between processes."""


def described(own: Mapping[str, Any], settings: DynatrainConfig) -> dict[str, str]:
    """Return a map from path to value for all values of a configuration, for example {"optimizer.params.lr": "0.1"}."""
    found: dict[str, str] = {}
    _flatten({**own, "dynatrain": settings.model_dump()}, "", found)
    return {path: value for path, value in found.items() if not path.startswith(FREE)}


def differing_members(one: Mapping[str, Any], two: Mapping[str, Any], of_one: str, of_two: str) -> str:
    """Return a description of the first difference between two processes; "" if there is none.

    one: the record of a process, as read from JSON. Its "machine" maps names to values that extensions require to be
        equal, and its "rows" describe the parameters.
    """
    model = " (name, shape, type, form, requires_grad): build the same model on every process"
    first, other = ({f"parameter {place}": row for place, row in enumerate(each["rows"])} for each in (one, two))
    differs = differing(one["machine"], two["machine"], of_one, of_two, ": make them equal")
    return differs or differing(first, other, of_one, of_two, model)


def differing(first: Mapping[str, Any], other: Mapping[str, Any], of_first: str, of_other: str, way_out: str) -> str:
    """Return a description of the first value that differs between two maps; "" if none differs."""
    for name in {**first, **other}:
        one, two = first.get(name, "not given"), other.get(name, "not given")
        if one != two:
            return f"{name} is {one} {of_first} and {two} {of_other}{way_out}"
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
