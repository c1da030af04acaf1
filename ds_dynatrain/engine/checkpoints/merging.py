"""The shared carry of now with what a checkpoint of another tool says of it: what it does not say stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_dynatrain.adapters.optimizers import rule_of
from ds_dynatrain.adapters.scaler import taken_from
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import CheckpointError


def over(present: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The whole carry. said: keys as `checkpoint.others.foreign` has them; groups and scalars are numbered as here."""
    taken = {key: said[key] for key in ("windows", "scalars") if key in said}
    taken["counters"] = {**present["counters"], **said.get("counters", {})}
    if "groups" in said:
        taken["groups"] = [
            {name: there.get(name, value) for name, value in here.items()}
            for here, there in zip(present["groups"], said["groups"], strict=True)
        ]
    if "scaler" in said:
        taken["scaling"] = taken_from(present["scaling"], said["scaler"])
    for key in ("scheduler", "random-LTD"):
        if present[key] is not None and said.get(key) is not None:
            taken[key] = said[key]
    return {**present, **taken}


def kept_scalars(
    engine: EngineCore, find: Callable[[str, int], Any], has_moments: Callable[[int], bool]
) -> dict[str, dict[str, float]]:
    """The scalars that the present optimizer keeps: name -> number of the tensor -> value.

    find: value of (name, number), None if it is not there. CheckpointError for one that is missing of a tensor whose
    moments are there.
    """
    basic, found = engine.host.basic_optimizer, dict[str, dict[str, float]]()
    for number, tensor in enumerate(engine.vps.tensors):
        if not tensor.trainable or not tensor.numel:
            continue
        for name in rule_of(basic).scalars_of(basic.param_groups[tensor.group]):
            value = find(name, number)
            if value is not None:
                found.setdefault(name, {})[str(number)] = float(value)
            elif has_moments(number):
                raise CheckpointError(
                    f"its optimizer has no {name!r} of {tensor.name!r}; use the optimizer of the job that saved it"
                )
    return found
