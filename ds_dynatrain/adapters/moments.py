"""State of an optimizer for one tensor that it steps, read and written by the rule of its class (see `optimizers`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_dynatrain.adapters.device import HOST
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.optimizers import Number, full_name, rule_of
from ds_dynatrain.adapters.state import Buffers, Scalars
from ds_dynatrain.errors import CensusError, SwitchRefused
from ds_dynatrain.space import BufferId


def read_state(
    optimizer: torch.optim.Optimizer, holder: torch.Tensor, group: int, whole: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return (moment -> flat view, scalar -> value) that `optimizer` keeps for `holder`, which it steps in `group`.

    whole: elements of all tensors of which the holder has a part, if moments of whole tensors are kept for these. Both
    results are empty before the first step. CensusError for states that its rule does not list.
    """
    state: dict[str, Any] = optimizer.state.get(holder, {})
    if not state:
        return {}, {}
    moments, scalars = _names(optimizer, group)
    if {*moments, *scalars} ^ set(state):
        raise CensusError(
            f"{full_name(type(optimizer))} keeps {sorted(state)} in group {group}; expected {[*moments, *scalars]}"
        )
    overlapping = () if whole is None else rule_of(optimizer).whole_tensors
    for name in moments:
        numel = whole if name in overlapping else holder.numel()
        if not isinstance(state[name], torch.Tensor) or state[name].numel() != numel:
            raise CensusError(
                f"{full_name(type(optimizer))}: {name} in group {group} is not one value per element of its tensor"
            )
    return (
        {name: state[name].detach().view(-1) for name in moments},
        {name: float(state[name]) for name in scalars},
    )


def write_state(
    optimizer: torch.optim.Optimizer,
    holder: torch.Tensor,
    group: int,
    moments: dict[str, torch.Tensor],
    scalars: dict[str, float],
) -> None:
    """Give `holder` these moments (in its shape, unless it is flat) and scalars. Does nothing if there are none yet."""
    if not moments and not scalars:
        return
    first = _names(optimizer, group)[1]
    state = {name: flat if holder.dim() == 1 else flat.view(holder.shape) for name, flat in moments.items()}
    device = holder.device if optimizer.param_groups[group].get("fused") else HOST
    counts = {name: _as_stored(value, first[name], device) for name, value in scalars.items()}
    optimizer.state[holder] = {**counts, **state}


def held_moments(
    optimizer: torch.optim.Optimizer, group: int, buffers: Buffers, name: BufferId
) -> dict[str, torch.Tensor]:
    """Return the buffers called `name` of the moments of `group`'s tensors, by moment; {} before the first step."""
    moments, _ = _names(optimizer, group)
    return {moment: buffers[moment, name] for moment in moments if (moment, name) in buffers}


def level_counts(optimizer: torch.optim.Optimizer, scalars: Scalars, groups: Sequence[int]) -> None:
    """Give each tensor of a group the highest count in it, if the optimizer counts on one tensor of a group for all.

    groups: the optimizer group of each tensor number.
    """
    if not rule_of(optimizer).counts_by_group:
        return
    for table in scalars.values.values():
        highest: dict[int, float] = {}
        for tensor, value in table.items():
            highest[groups[tensor]] = max(value, highest.get(groups[tensor], value))
        table.update({tensor: highest[groups[tensor]] for tensor in table})


def fill_absent(optimizer: torch.optim.Optimizer, model: ModelMap, buffers: Buffers, scalars: Scalars) -> None:
    """Add empty moments, and counts, for trained tensors that this rank has no part of (other pipeline stages do).

    Their counts are those of another tensor here, if possible of the same group. If a tensor was left out of a step,
    stages then disagree, and the certificate says so.
    """
    counted = {number for table in scalars.values.values() for number in table}
    for number, tensor in enumerate(model.tensors[: model.trainable]):
        beside = [other for other in counted if model.tensors[other].group == tensor.group] or list(counted)
        if tensor.numel or not beside:
            continue
        moments, counts = _names(optimizer, tensor.group)
        for name in moments:
            like = next((held for (kind, _), held in buffers.items() if kind == name), torch.empty(0))
            buffers[name, BufferId("tensor", number)] = like.new_empty(0)
        for name in counts:
            scalars.values.setdefault(name, {})[number] = max(scalars.of(other).get(name, 0.0) for other in beside)


def common_scalars(scalars: Scalars, tensors: list[int], where: str) -> dict[str, float]:
    """Return the scalars that all `tensors` of one flat buffer share.

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


def _names(optimizer: torch.optim.Optimizer, group: int) -> tuple[tuple[str, ...], dict[str, Number]]:
    rule, settings = rule_of(optimizer), optimizer.param_groups[group]
    return rule.moments_of(settings), rule.scalars_of(settings)


def _as_stored(value: float, first: Number, device: torch.device) -> Number:
    """Return a scalar in the type of its first value; torch's fused optimizers count on the stepped tensor's device."""
    if isinstance(first, torch.Tensor):
        return torch.tensor(value, dtype=first.dtype, device=device)
    return type(first)(value)
