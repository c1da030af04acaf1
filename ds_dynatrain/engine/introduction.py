"""What a process tells the others before it has an engine, and what it has to have in common with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.incoming import Incoming, Row
from ds_dynatrain.adapters.settings import BatchSizes
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.members.entry import Entry
from ds_dynatrain.errors import ConfigError, ElasticError
from ds_dynatrain.space import Layout

FREE = ("dynatrain.report.", "dynatrain.timeout_seconds")
"""Keys that may differ from process to process."""


def of_running_job(record: dict[str, Any], said: dict[str, str]) -> tuple[Layout, BatchSizes]:
    """The layout and batch of a job that this process joins; ConfigError if it was configured otherwise."""
    differs = differing_key(said, record["described"])
    if differs:
        raise ConfigError(f"this process cannot join the job: {differs}")
    return Layout.from_dict(record["layout"]), BatchSizes(**record["batch_sizes"])


def lists_of(arguments: Mapping[str, Any]) -> list[list[nn.Parameter]]:
    """The lists of parameters that the caller has, of an optimizer's groups or in place of them."""
    given = getattr(arguments["optimizer"], "param_groups", arguments["model_parameters"])
    if not isinstance(given, list):
        return []
    groups = [group for group in given if isinstance(group, dict)]
    for group in groups:
        if not isinstance(group["params"], torch.Tensor | list):
            group["params"] = list(group["params"])
    return [group["params"] for group in groups if isinstance(group["params"], list)] if groups else [given]


def rows_of(entry: Entry, incoming: Incoming) -> list[Row]:
    """What must be equal on all processes; of one that joins a job all values come from there, in whatever form."""
    rows = incoming.rows()
    if entry.record is None:
        return rows
    forms = {name: form for name, _, _, form, _ in entry.record["rows"]}
    return [(name, shape, dtype, forms.get(name, form), trained) for name, shape, dtype, form, trained in rows]


def refuse_without_values(entry: Entry, incoming: Incoming, came_to_join: bool) -> None:
    """ElasticError for a model that was built for a job which runs, in a process that starts one now."""
    if came_to_join and incoming.draws and not entry.joins:
        raise ElasticError(
            "the job that this process came to join has ended, and its model was built without values; start this "
            "process again"
        )


def introduce(entry: Entry, rows: Sequence[Row], machine: dict[str, str]) -> dict[int, dict[str, Any]]:
    """Tell the others about this member, and see that all have the same model.

    rows: `rows_of`; machine: what must be equal besides. ConfigError, on all of them, names the first parameter that
    differs, or what of the machines; in a process that joins a running job on that one alone.
    """
    if entry.record is not None:
        differs = differing_machine(entry.record["machine"], machine, "in the running job") or differing_parameter(
            entry.record["rows"], rows, "in the running job"
        )
        if differs:
            raise ConfigError(f"this process cannot join the job: {differs}")
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()
    record = {"node": entry.membership.node, "seed": torch.initial_seed(), "model": digest, "parameters": rows}
    record["machine"] = machine
    records = entry.exchange("member", record)
    for member, other in sorted(records.items()):
        first = records[min(records)]
        whose = f"on member {min(records)}", f"on member {member}"
        if differs := differing_machine(first["machine"], other["machine"], *whose):
            raise ConfigError(differs)
        if other["model"] != first["model"]:
            differs = differing_parameter(first["parameters"], other["parameters"], of_other=f"on member {member}")
            raise ConfigError(
                differs or f"the model of member {member} differs from that of member 0: build the same one on both"
            )
    return records


# ---- what must be equal on all processes -----------------------------------------------------------------------------


def described(own: Mapping[str, Any], settings: DynatrainConfig) -> dict[str, str]:
    """Every value of a configuration by its path, such as {"optimizer.params.lr": "0.1"}."""
    found: dict[str, str] = {}
    _flatten({**own, "dynatrain": settings.model_dump()}, "", found)
    return {path: value for path, value in found.items() if not path.startswith(FREE)}


def differing_key(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first key that differs between a newcomer and the running job, in words; empty if none does."""
    for path in sorted({*mine, *theirs}):
        if mine.get(path) != theirs.get(path):
            here, there = mine.get(path, "not given"), theirs.get(path, "not given")
            return f"{path} is {here} here and {there} in the running job: start it with the same configuration"
    return ""


def differing_parameter(
    first: Sequence[Any], other: Sequence[Any], of_first: str = "on member 0", of_other: str = "here"
) -> str:
    """The first parameter that differs between two models, in words; empty if none does."""
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
    """Return the first thing that an extension wants to be equal and that differs, in words; "" if nothing does."""
    for name, value in first.items():
        if other[name] != value:
            return f"{name} is {value} {of_first} and {other[name]} {of_other}: make them equal"
    return ""


def plain(value: Any) -> Any:
    """A value as it comes back from JSON; TypeError for what JSON has no word for."""
    return json.loads(json.dumps(value))


def _flatten(value: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _flatten(part, f"{path}.{key}" if path else str(key), found)
    else:
        found[path] = json.dumps(value, default=str)
