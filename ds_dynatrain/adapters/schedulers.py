"""Schedulers' lists with one entry per optimizer group: they follow when groups are added or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_dynatrain.errors import SwitchRefused

KNOWN_MODULES = ("torch.optim.lr_scheduler", "deepspeed.runtime.lr_schedules")
PER_GROUP = """
    base_lrs _last_lr lr_lambdas min_lrs max_lrs base_momentums max_momentums
    delta_lrs org_lrs min_lr min_moms max_moms
""".split()
Lists = list[tuple[Any, str, list[Any]]]
"""(scheduler, attribute, list)."""


def lists_per_group(scheduler: Any, groups: int) -> Lists:
    """Every list of a scheduler, and of those inside it, that has one entry per group.

    SwitchRefused, naming the class, for a scheduler whose lists are not known.
    """
    found: Lists = []
    for each in _all_of(scheduler):
        cls = type(each)
        if cls.__module__ not in KNOWN_MODULES:
            name = f"{cls.__module__}.{cls.__qualname__}"
            raise SwitchRefused(
                f"the scheduler is a {name}: what it keeps per optimizer group is not known",
                "use a scheduler of torch's or DeepSpeed's, or list all parameters in their groups at the start",
            )
        for name in PER_GROUP:
            held = each.__dict__.get(name)
            if isinstance(held, list):
                if len(held) != groups:
                    raise SwitchRefused(
                        f"{cls.__qualname__}.{name} has {len(held)} entries and the optimizer {groups} groups",
                        "add groups with engine.update_param_groups only",
                    )
                found.append((each, name, held))
    return found


def follow(lists: Lists, origins: Sequence[int]) -> None:
    """Give each list one entry per new group: that of the group which it comes from."""
    for scheduler, name, held in lists:
        setattr(scheduler, name, [held[origin] for origin in origins])


def put_lists_back(lists: Lists) -> None:
    """The lists as `lists_per_group` found them."""
    for scheduler, name, held in lists:
        setattr(scheduler, name, held)


def _all_of(scheduler: Any) -> Iterator[Any]:
    if scheduler is None:
        return
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all_of(inner)
