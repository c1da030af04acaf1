"""Which layout a world of n members gets: `dynatrain.layouts` of the configuration, read as a rule.

"data" (the default) lets the data axis grow and shrink, and leaves the others as they are. "best" takes what an
extension finds best. A table names layouts by world size. "module:function" names a function of the user's:
`function(members, present)` returns a `Layout`, a dictionary such as `{"data": 4, "zero_stage": 2}`, or None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.config import BEST
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused
from ds_dynatrain.space import Layout

GROWS = "data"

Rule = Callable[[int, Layout], Iterator[Layout]]
"""Layouts for so many members, the best first; the other argument is the present layout."""


@dataclass(frozen=True)
class Choice:
    """The layout to go to; None if there is none for so many members. refusals: why better ones are not possible."""

    layout: Layout | None
    refusals: tuple[str, ...] = ()


def rule_of(layouts: str | Mapping[str, Mapping[str, Any]], best: Rule | None = None) -> Rule:
    """The rule that `dynatrain.layouts` describes; ConfigError if it describes none. best: that of an engine."""
    if layouts == BEST:
        return best or growing
    if isinstance(layouts, str):
        return growing if layouts == GROWS else _of_function(layouts)
    return _of_table({int(size): dict(values) for size, values in layouts.items()})


def choose(rule: Rule, members: int, present: Layout, check: Callable[[Layout], None]) -> Choice:
    """The first layout of a rule that has a rank for no more than `members`, and that `check` does not refuse.

    check: raises SwitchRefused for a layout in which this model cannot be trained.
    """
    refusals: list[str] = []
    layouts = rule(members, present)
    while True:
        try:
            layout = next(layouts, None)
        except SwitchRefused as refusal:
            return Choice(None, (*refusals, refusal.reason))
        if layout is None:
            return Choice(None, tuple(refusals))
        try:
            if layout.world_size > members:
                raise SwitchRefused(
                    f"{layout} needs {layout.world_size} members, and there are {members}",
                    "start more members",
                )
            check(layout)
        except SwitchRefused as refusal:
            refusals.append(f"{layout}: {refusal.reason}")
            continue
        return Choice(layout, tuple(refusals))


def growing(members: int, present: Layout) -> Iterator[Layout]:
    """As many data ranks as there can be."""
    for data in range(members // (present.world_size // present.data), 0, -1):
        try:
            yield present.replace(data=data)
        except LayoutError:  # experts ask for a multiple of their number
            continue


def _of_table(table: Mapping[int, Mapping[str, Any]]) -> Rule:
    layouts: dict[int, Callable[[Layout], Layout]] = {}
    for size, values in table.items():
        try:
            needed = Layout.from_dict({"zero_stage": 0, **_given(values)}).world_size
        except LayoutError as error:
            raise ConfigError(f"dynatrain.layouts.{size}: {error}") from error
        if needed > size:
            raise ConfigError(f'dynatrain.layouts.{size}: its layout needs {needed} members; put it under "{needed}"')
        layouts[size] = _completed(values)

    def rule(members: int, present: Layout) -> Iterator[Layout]:
        for size in sorted(layouts, reverse=True):
            if size <= members:
                yield layouts[size](present)

    return rule


def _completed(values: Mapping[str, Any]) -> Callable[[Layout], Layout]:
    return lambda present: Layout.from_dict({"zero_stage": present.zero_stage, **_given(values)})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
            yield answer if isinstance(answer, Layout) else _completed(dict(answer))(present)
        except (TypeError, ValueError, LayoutError) as error:
            raise SwitchRefused(
                f"{name}({members}, {present}) returned {answer!r}: {error}",
                "return a Layout, a table of its sizes, or None",
            ) from error

    return rule
