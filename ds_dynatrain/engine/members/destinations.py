"""Where the leader of a change sends each engine: a layout, and the member at each of its ranks. Arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.members.policy import Choice
from ds_dynatrain.engine.members.registry import Registry
from ds_dynatrain.space import Layout

Destination = tuple[Layout, tuple[int, ...]]
"""A layout, and the member at each of its ranks."""

WITH_NEWCOMERS = 2
"""A change is tried so often with those who come; after that only with those who hold the state already, if one of
them stays, and there is a layout for these."""


@dataclass(frozen=True)
class Question:
    """What a leader has to answer. registry: all members' numbers; present: where each engine is; tries: attempts that
    failed; restores: nobody has the whole state any more, and it comes from copies or a checkpoint; has_copies: from
    copies, which lie where the ranks were."""

    world: World
    registry: Registry
    present: tuple[Destination, ...]
    tries: int = 0
    restores: bool = False
    has_copies: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the generation's members, in its order."""
        return tuple(self.registry.numbers[member] for member in self.world.members)


@dataclass(frozen=True)
class Rules:
    """An engine's own. choose: the layout for so many members; assign: who of them gets which rank of a layout."""

    choose: Callable[[int], Choice]
    assign: Callable[[Layout, tuple[int, ...]], tuple[int, ...]]


def destinations(asked: Question, engines: Sequence[Rules], say: Callable[[str], None]) -> list[Destination] | None:
    """Of each engine; the present places if nothing has to move, None if there is no way. say: to people."""
    world, present = asked.world, list(asked.present)
    if not world.members:  # all go: they meet as they are, to save and end at one step
        return present
    if asked.restores:
        return _of_restoring(asked, engines, say)
    pool = tuple(sorted(asked.members))
    holders = {member for _, members in present for member in members}
    all_stay = holders <= set(pool) and all(set(members) == holders for _, members in present)
    with_newcomers = asked.tries < WITH_NEWCOMERS or holders.isdisjoint(pool)
    if not with_newcomers and all_stay:
        return present
    able = pool if with_newcomers else tuple(one for one in pool if one in holders)
    choices = _choices(engines, len(able))
    if any(choice.layout is None for choice in choices):  # those who come are needed, however often it was in vain
        able = pool
        choices = _choices(engines, len(able))
    layouts = [choice.layout for choice in choices if choice.layout is not None]
    refusals = [refusal for choice in choices for refusal in choice.refusals]
    if layouts and len(able) > layouts[0].world_size:
        why = f" ({refusals[0]})" if refusals else ""
        waiting = len(able) - layouts[0].world_size
        say(f"{layouts[0]}: {waiting} of {len(able)} members wait{why}; see dynatrain.layouts")
    is_none = len(layouts) < len(engines)
    if all_stay and (is_none or layouts == [layout for layout, _ in present]):
        return present
    if is_none:
        say(
            f"generation {world.generation}: no layout for {len(able)} members "
            f"({'; '.join(refusals) or 'dynatrain.layouts names none'}); members that were told to leave "
            "cannot hand over their state"
        )
        return None
    targets: list[Destination] = []
    for engine, layout in zip(engines, layouts, strict=True):
        able = engine.assign(layout, able)  # the members of the first are those of all
        targets.append((layout, able))
    return targets


def _of_restoring(asked: Question, engines: Sequence[Rules], say: Callable[[str], None]) -> list[Destination] | None:
    members = asked.members
    choices = _choices(engines, len(members))
    targets: list[Destination] = []
    for engine, layout in zip(engines, [choice.layout for choice in choices], strict=True):
        if layout is not None:
            first = members[: layout.world_size]
            targets.append((layout, engine.assign(layout, members) if asked.has_copies else first))
    if len(targets) < len(choices):
        refusals = [refusal for choice in choices for refusal in choice.refusals]
        say(f"no layout for {len(members)} members ({'; '.join(refusals)}): waiting for others")
        return None
    return targets


def _choices(engines: Sequence[Rules], members: int) -> list[Choice]:
    """Each engine's layout for so many members, or for fewer, but of all engines for the same number."""
    while True:
        choices = [engine.choose(members) for engine in engines]
        sizes = {0 if choice.layout is None else choice.layout.world_size for choice in choices}
        if len(sizes) == 1 or 0 in sizes:
            return choices
        members = min(sizes)
