"""What freezing and unfreezing leaves of the state, for the tests of several kinds of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as td
from torch import nn

from tests.engine import oracle


def trained(model: nn.Module) -> set[str]:
    """The names of what requires a gradient here."""
    return {name for name, held in model.named_parameters() if held.requires_grad}


def flip(model: nn.Module, on: Sequence[str], off: Sequence[str]) -> None:
    """Train what begins with one of `on`, freeze what begins with one of `off`."""
    for name, held in model.named_parameters():
        held.requires_grad_((held.requires_grad or name.startswith(tuple(on))) and not name.startswith(tuple(off)))


def wrong_after(before: oracle.State, after: oracle.State, was: set[str], now: set[str]) -> list[str]:
    """What of the state is not as a registration should leave it, in words."""
    found = [f"steps of {sorted(after.steps.keys() ^ now)}"] if after.steps.keys() ^ now else []
    for (name, kind), held in after.tensors.items():
        if kind == "weight" or (name in now and name in was):
            expected = before.tensors[name, kind]
        elif name not in now:
            continue  # plain torch has its frozen parameters in its groups
        else:
            expected = before.tensors[name, "weight"].float() if kind == "master" else torch.zeros_like(held)
        if not torch.equal(held, expected):
            found.append(f"{kind} of {name}")
    found += [name for name in now & was if after.steps[name] != before.steps[name]]
    found += [f"{name}: {after.steps[name]}" for name in now - was if set(after.steps[name].values()) != {0.0}]
    found += [name for name in now for kind in ("master", "exp_avg", "exp_avg_sq") if (name, kind) not in after.tensors]
    return found


def change(engine: Any, on: Sequence[str], off: Sequence[str], places: oracle.Places | None = None) -> list[str]:
    """Change what is trained, where each rank may have a part of the model; what is not as it should be, in words."""
    was = _of_all(_logical(engine, places))
    flip(engine.module, on, off)
    before, now = oracle.gather(engine, places), _of_all(_logical(engine, places))
    assert engine.update_param_groups()
    assert not engine.update_param_groups(), "nothing has changed since"
    return wrong_after(before, oracle.gather(engine, places), was, now)


def _logical(engine: Any, places: oracle.Places | None) -> set[str]:
    """What requires a gradient here, by the names of logical tensors."""
    known = {} if places is None else places(engine)
    return {known[name].name if name in known else name for name in trained(engine.module)}


def _of_all(names: set[str]) -> set[str]:
    gathered: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(gathered, names)
    return set().union(*gathered)
