"""Parts of a plan that go another way than by messages over the host."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ds_dynatrain.plan import Exchange, MemberPlan, Moves


def split(
    plan: MemberPlan, members: Collection[int], kinds: Collection[str], into: Collection[str] | None = None
) -> tuple[MemberPlan, list[Exchange]]:
    """Return the rest of a plan, and the moves between this member and `members` from buffers of `kinds`.

    into: kinds of the target buffers; None for all. Both ends of a pair split their plans alike if each has the other
    among its `members`, and the kinds are the same.
    """
    rest, apart = [], []
    for each in plan.rounds:
        if each.peer not in members:
            rest.append(each)
            continue
        (sent, sends), (received, receives) = _parts(each.sends, kinds, into), _parts(each.receives, kinds, into)
        if len(sent) or len(received):
            rest.append(Exchange(each.peer, sent, received))
        if len(sends) or len(receives):
            apart.append(Exchange(each.peer, sends, receives))
    return MemberPlan(plan.member, plan.local, plan.derived, tuple(rest)), apart


def _parts(moves: Moves, kinds: Collection[str], into: Collection[str] | None) -> tuple[Moves, Moves]:
    """Return all other moves, and those from buffers of `kinds` into buffers of `into`."""
    is_apart = np.array([kind.name in kinds for kind in moves.kinds], dtype=bool)[moves.source_kind]
    if into is not None:
        is_apart &= np.array([kind.name in into for kind in moves.kinds], dtype=bool)[moves.kind]
    return moves.select(np.flatnonzero(~is_apart)), moves.select(np.flatnonzero(is_apart))
