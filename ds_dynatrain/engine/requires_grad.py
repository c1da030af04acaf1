"""What of a model requires a gradient now, where a member holds a part of it: each says so for what it holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ds_dynatrain.adapters.regroup import Wanted
from ds_dynatrain.engine.transaction.session import ASK_ALIKE, ASK_ALL, Session
from ds_dynatrain.errors import MemberMissing, SwitchRefused


def with_others(session: Session, mine: Wanted) -> Wanted:
    """What all members want together, from what each wants of the parameters that it holds.

    SwitchRefused if they do not want the same of a parameter that several hold, or give different numbers of groups; on
    all alike if one does not say it within the time-out.
    """
    said = {
        "requires_grad": dict(mine.requires_grad),
        "groups": [list(names) for names, _ in mine.groups],
        "begun": mine.begun,
    }
    try:
        doing = f"{session.what}: every working member has to ask for it"
        found = session.reduce("wanted", said, _joined, doing=doing)
    except MemberMissing as missing:
        raise SwitchRefused(str(missing), ASK_ALL) from None
    groups = found["groups"]
    if len(groups) != len(mine.groups):
        raise SwitchRefused(
            f"engine.update_param_groups: {len(mine.groups)} groups are given here and {len(groups)} on another member",
            "give every member all groups; {'params': []} where it holds none of the parameters",
        )
    held = mine.requires_grad
    differing = [name for name, flag in held.items() if found["requires_grad"][name] != flag]
    for (names, _), together in zip(mine.groups, groups, strict=True):
        differing += set(together).intersection(held).symmetric_difference(names)
    if differing:
        raise SwitchRefused(
            f"another member that holds {differing[0]!r} too gives it another requires_grad, or another group",
            ASK_ALIKE,
        )
    rests = (rest for _, rest in mine.groups)
    named = tuple((tuple(names), rest) for names, rest in zip(groups, rests, strict=True))
    return replace(mine, requires_grad=found["requires_grad"], groups=named, begun=found["begun"])


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of what both hold the first one's word counts; who sees that it is not its own objects."""
    pairs = zip_longest(one["groups"], other["groups"], fillvalue=())
    return {
        "requires_grad": {**other["requires_grad"], **one["requires_grad"]},
        "groups": [list(dict.fromkeys([*mine, *theirs])) for mine, theirs in pairs],
        "begun": one["begun"] or other["begun"],
    }
