"""Destinations of a change of members, computed by the member that leads it: the layout for each engine, and the member
at each of its ranks.

The layout for a world of n members follows a rule, which `dynatrain.layouts` of the configuration names. "data" (the
default) grows and shrinks the data axis, and leaves the others unchanged. "best" takes the layout that an extension
finds best. A table names layouts by world size. "module:function" names a user's function: `function(members, present)`
returns a `Layout`, a dictionary such as `{"data": 4, "zero_stage": 2}`, or None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_dynatrain.config import BEST
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused
from ds_dynatrain.space.layout import Layout

Destination = tuple[Layout, tuple[int, ...]]
"""A layout, and the member at each of its ranks."""

WITH_NEWCOMERS = 2
"""Number of attempts at a change that include newcomers.

Later attempts include only members that already hold the state, provided that one of them stays and that there is a
layout for them.
"""


@dataclass(frozen=True)
class Registry:
    """Map from the id of each member of a job to the member's number; `following` is the number for the next new
    member.

    All members of a generation have the same registry, so whichever of them leads the next change gives the same
    numbers.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    following: int = 0

    def extended(self, members: Iterable[str]) -> Registry:
        """Return a registry that also contains these members; new ones are numbered in the given order."""
        numbers, following = dict(self.numbers), self.following
        for member in members:
            if member not in numbers:
                numbers[member], following = following, following + 1
        return Registry(numbers, following)

    def only(self, members: Iterable[str]) -> Registry:
        """Return a registry of these members only. The numbers of removed members are not used again. Raises KeyError
        for an unknown member."""
        return Registry({member: self.numbers[member] for member in members}, self.following)

    def ids_of(self, numbers: Iterable[int]) -> frozenset[str]:
        """Return the ids of the members with these numbers."""
        wanted = set(numbers)
        return frozenset(member for member, its in self.numbers.items() if its in wanted)


@dataclass(frozen=True)
class DestinationFacts:
    """Facts from which a leader chooses the new layouts.

    world: the generation to enter.
    registry: the numbers of all members.
    present: the current layout and members of each engine.
    tries: the number of attempts that have failed.
    restores: whether the state comes from copies or a checkpoint, because the members no longer hold all of it.
    has_copies: whether the state comes from copies. A rank's copy is on the member of that rank, or on another member
        that keeps it.
    """

    world: Generation
    registry: Registry
    present: tuple[Destination, ...]
    tries: int = 0
    restores: bool = False
    has_copies: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the generation's members, in the order in which the generation lists them."""
        return tuple(self.registry.numbers[member] for member in self.world.members)


@dataclass(frozen=True)
class Rules:
    """Functions that choose the new layout of one engine.

    choose: returns the layout for a number of members.
    assign: takes a layout and the available members; returns the layout with its order of tensors, and the member at
        each rank.
    """

    choose: Callable[[int], ChosenLayout]
    assign: Callable[[Layout, tuple[int, ...]], Destination]


def destinations(
    asked: DestinationFacts, engines: Sequence[Rules], say: Callable[[str], None]
) -> list[Destination] | None:
    """Return the new layout and members of each engine; None if no layout is possible. If nothing has to move, these
    are the current ones.

    say: logs a message for users.
    """
    world, present = asked.world, list(asked.present)
    if not world.members:  # all members leave: they meet in their current layout, to save and end at one step
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
    if any(choice.layout is None for choice in choices):  # newcomers are needed, even after failed attempts
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
        targets.append(engine.assign(layout, able))
        able = targets[-1][1]  # all engines get the same members as the first
    return targets


def _of_restoring(
    asked: DestinationFacts, engines: Sequence[Rules], say: Callable[[str], None]
) -> list[Destination] | None:
    members = asked.members
    choices = _choices(engines, len(members))
    layouts = [choice.layout for choice in choices if choice.layout is not None]
    if len(layouts) < len(choices):
        refusals = [refusal for choice in choices for refusal in choice.refusals]
        say(f"no layout for {len(members)} members ({'; '.join(refusals)}): waiting for others")
        return None
    return [
        engine.assign(layout, members) if asked.has_copies else (layout, members[: layout.world_size])
        for engine, layout in zip(engines, layouts, strict=True)
    ]


def _choices(engines: Sequence[Rules], members: int) -> list[ChosenLayout]:
    """Choose a layout for each engine so that all have the same world size: `members`, or the largest size that all
    engines can use."""
    while True:
        choices = [engine.choose(members) for engine in engines]
        sizes = {0 if choice.layout is None else choice.layout.world_size for choice in choices}
        if len(sizes) == 1 or 0 in sizes:
            return choices
        members = min(sizes)


# ---- the layout for a number of members ------------------------------------------------------------------------------

GROWS = "data"

Rule = Callable[[int, Layout], Iterator[Layout]]
"""Function of (number of members, current layout) that yields layouts, best first."""


@dataclass(frozen=True)
class ChosenLayout:
    """Layout to switch to, or None if no layout is possible.

    refusals: the reasons why layouts that the rule prefers are not possible.
    """

    layout: Layout | None
    refusals: tuple[str, ...] = ()


def rule_of(layouts: str | Mapping[str, Mapping[str, Any]], best: Rule | None = None) -> Rule:
    """Return the rule that the setting `dynatrain.layouts` describes. Raises ConfigError for an invalid setting.

    best: the rule to use for "best"; without it, "best" means the same as "data", which grows the data axis.
    """
    if layouts == BEST:
        return best or growing
    if isinstance(layouts, str):
        return growing if layouts == GROWS else _of_function(layouts)
    return _of_table({int(size): dict(values) for size, values in layouts.items()})


def choose(rule: Rule, members: int, present: Layout, check: Callable[[Layout], None]) -> ChosenLayout:
    """Return the first layout yielded by a rule that has at most `members` ranks and that `check` does not refuse.

    present: the current layout.
    check: raises SwitchRefused for a layout in which this model cannot be trained.
    """
    refusals: list[str] = []
    try:
        for layout in rule(members, present):
            try:
                if layout.world_size > members:
                    needs = f"{layout} needs {layout.world_size} members, and there are {members}"
                    raise SwitchRefused(needs, "start more members")
                check(layout)
                return ChosenLayout(layout, tuple(refusals))
            except SwitchRefused as refusal:
                refusals.append(f"{layout}: {refusal.reason}")
    except SwitchRefused as refusal:  # the rule itself
        refusals.append(refusal.reason)
    return ChosenLayout(None, tuple(refusals))


def growing(members: int, present: Layout) -> Iterator[Layout]:
    """Yield the current layout with other sizes of the data axis, beginning with the largest for which there are enough
    members."""
    for data in range(members // (present.world_size // present.data), 0, -1):
        try:
            yield present.replace(data=data)
        except LayoutError:  # experts require a multiple of their number
            continue


def _of_table(table: Mapping[int, Mapping[str, Any]]) -> Rule:
    for size, values in table.items():
        try:
            needed = _completed(values).world_size
        except LayoutError as error:
            raise ConfigError(f"dynatrain.layouts.{size}: {error}") from error
        if needed > size:
            raise ConfigError(f'dynatrain.layouts.{size}: its layout needs {needed} members; put it under "{needed}"')

    def rule(members: int, present: Layout) -> Iterator[Layout]:
        for size in sorted(table, reverse=True):
            if size <= members:
                yield _completed(table[size], present.zero_stage)

    return rule


def _completed(values: Mapping[str, Any], stage: int = 0) -> Layout:
    given = {name: value for name, value in values.items() if value is not None}
    return Layout.from_dict({"zero_stage": stage, **given})


def _of_function(name: str) -> Rule:
    module, colon, function = name.partition(":")
    try:
        chosen = getattr(importlib.import_module(module), function) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"dynatrain.layouts: {name!r} cannot be imported: {error}; give MODULE:FUNCTION, and put the module on "
            "PYTHONPATH"
        ) from error
    if not callable(chosen):
        raise ConfigError(
            f'dynatrain.layouts: expected "{GROWS}", "{BEST}", a table by world size or "module:function", got {name!r}'
        )

    def rule(members: int, present: Layout) -> Iterator[Layout]:
        answer = chosen(members, present)
        if answer is None:
            return
        try:
            yield answer if isinstance(answer, Layout) else _completed(dict(answer), present.zero_stage)
        except (TypeError, ValueError, LayoutError) as error:
            raise SwitchRefused(
                f"{name}({members}, {present}) returned {answer!r}: {error}",
                "return a Layout, a table of its sizes, or None",
            ) from error

    return rule
