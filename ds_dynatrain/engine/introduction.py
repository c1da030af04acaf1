"""What a process tells the others before it has an engine, and what it has to have in common with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.incoming import Incoming, Row
from ds_dynatrain.adapters.settings import BatchSizes
from ds_dynatrain.engine.members.description import differing_key, differing_machine, differing_parameter
from ds_dynatrain.engine.members.entry import Entry
from ds_dynatrain.errors import ConfigError, ElasticError
from ds_dynatrain.space import Layout


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
