"""What an engine of this process holds, as `change.ChangeMachine` is told of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ds_dynatrain.engine.copies.copy import lacks_frozen
from ds_dynatrain.engine.copies.whole import Had, WholeCopies
from ds_dynatrain.engine.members.actions import Held
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout


def held_by(engine: EngineParts, say: Callable[[str], None], replaced: Callable[[], tuple[int, ...] | None]) -> Held:
    """By one engine of this process, just now. say: to people. replaced: what others may have said of loads."""
    number = engine.control.member
    return Held(
        number=number,
        layout=engine.layout,
        members=engine.members,
        rank=None if engine.idle else engine.members.index(number),
        attempt=engine.attempt,
        generation=engine.generation,
        step=engine.global_steps,
        is_clean=not engine.is_stepping and not engine.is_in_doubt,
        is_switching=engine.is_switching,
        can_restore=engine.settings.fallback is not None,
        registered=len(engine.registered),
        since=partial(_since, engine, replaced),
        copies=partial(_copies, engine),
        damaged=partial(_damaged, engine),
        frozen=_frozen(engine),
        goes_late=partial(_goes_late, engine, say),
    )


def _goes_late(engine: EngineParts, say: Callable[[str], None], layout: Layout) -> bool:
    """As the configuration asks, where it can be."""
    if not engine.settings.late:
        return False
    try:
        engine.targets.check_late(layout)
    except SwitchRefused as refusal:
        say(f"members come and go without dynatrain.late: {refusal.reason}")
        return False
    return True


def _frozen(engine: EngineParts) -> tuple[dict[str, Any], int] | None:
    """See `Survivor`."""
    kept = engine.kept
    if kept is None or not kept.frozen or kept.frozen_of is None:
        return None
    layout, rank = kept.frozen_of
    return layout.to_dict(), rank


def _since(engine: EngineParts, replaced: Callable[[], tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """See `Survivor`. Who works has taken part in each load, unless the others have gone on without it."""
    kept = engine.kept
    if kept is None:
        return ()
    said = replaced()
    return None if said is None and engine.idle else max(kept.since, said or ())


def _copies(engine: EngineParts) -> tuple[Had, ...]:
    """What is there; nothing of it is read."""
    kept, mine = engine.kept, engine.control.member
    rank = engine.members.index(mine) if mine in engine.members else None
    return tuple(
        Had(
            copy.mark,
            copy.rank,
            is_own=(copy.rank, copy.mark.generation) == (rank, engine.generation),
            lacks_frozen=lacks_frozen(engine.vps, copy.mark.layout),
        )
        for copy in (() if kept is None else kept.copies())
    )


def _damaged(engine: EngineParts, whole: WholeCopies) -> tuple[int, ...]:
    """Of which ranks the copy that this member is to give is damaged."""
    kept, mine, found = engine.kept, engine.control.member, list[int]()
    for rank in [rank for rank, holder in enumerate(whole.holders) if holder == mine]:
        copy = None if kept is None else kept.find(whole.mark, rank)
        if copy is None or not copy.is_sound(engine.vps):
            logger.error(
                "the copy of rank %d of step %d is damaged; another one is taken, or the fallback checkpoint",
                *(rank, whole.mark.step),
            )
            found.append(rank)
    return tuple(found)
