"""Which per-element states and scalars an optimizer keeps: a table of known classes, never a guess from live state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynatrain.adapters.state import Scalars
from ds_dynatrain.errors import CensusError, SwitchRefused, UnsupportedError


@dataclass(frozen=True)
class OptimizerRule:
    """moments: names of per-element fp32 states; scalars: names of 0-dim tensors kept beside them."""

    moments: tuple[str, ...]
    scalars: tuple[str, ...] = ("step",)


ADAM = OptimizerRule(("exp_avg", "exp_avg_sq"))

KNOWN: Mapping[type[torch.optim.Optimizer], OptimizerRule] = {torch.optim.Adam: ADAM, torch.optim.AdamW: ADAM}
"""Exact classes (a subclass may keep other states)."""


def rule_of(optimizer: torch.optim.Optimizer) -> OptimizerRule:
    """The rule of an optimizer; UnsupportedError, naming the class, for one whose states are not known."""
    rule = KNOWN.get(type(optimizer))
    if rule is None:
        names = ", ".join(sorted(known.__name__ for known in KNOWN))
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} is not among those whose states are known ({names}); use one of them"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("amsgrad"):
            raise UnsupportedError(f"optimizer group {number}: amsgrad keeps a third moment; set amsgrad to false")
    return rule


def read_state(
    optimizer: torch.optim.Optimizer, holder: torch.Tensor, rule: OptimizerRule
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(moment -> flat view, scalar -> value) that `optimizer` keeps for `holder`; both empty before the first step."""
    state: dict[str, Any] = optimizer.state.get(holder, {})
    if not state:
        return {}, {}
    missing = {*rule.moments, *rule.scalars} ^ set(state)
    if missing:
        raise CensusError(
            f"{type(optimizer).__name__} keeps {sorted(state)}; expected {[*rule.moments, *rule.scalars]}"
        )
    return (
        {name: state[name].detach().view(-1) for name in rule.moments},
        {name: float(state[name]) for name in rule.scalars},
    )


def write_state(
    optimizer: torch.optim.Optimizer, holder: torch.Tensor, moments: dict[str, torch.Tensor], scalars: dict[str, float]
) -> None:
    """Give `holder` these flat moments (shaped as the holder is) and scalars; nothing if there are none yet."""
    if not moments:
        return
    state = {name: flat.view(holder.shape) for name, flat in moments.items()}
    steps = {name: torch.tensor(value, dtype=torch.float32) for name, value in scalars.items()}
    optimizer.state[holder] = {**steps, **state}


def common_scalars(scalars: Scalars, tensors: list[int], where: str) -> dict[str, float]:
    """The scalars that all `tensors` of one flat buffer share.

    SwitchRefused if they differ: a tensor that some steps did not use cannot share a step count with the others.
    """
    first = scalars.of(tensors[0]) if tensors else {}
    for tensor in tensors[1:]:
        other = scalars.of(tensor)
        if other != first:
            raise SwitchRefused(
                f"{where}: tensor {tensors[0]} has {first}, tensor {tensor} has {other}, and the target layout keeps "
                "one value for both",
                "stay in ZeRO stage 0, or give such parameters an optimizer group of their own",
            )
    return first
