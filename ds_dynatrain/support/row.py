"""Rows of the support table. Each row gives a verdict on a key of DeepSpeed's configuration or on a usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from ds_dynatrain.space.layout import Layout

OFF: tuple[object, ...] = (None, False, {})
"""Values with which most keys say that a feature is not used."""
NOT_TRIED = "not supported with a dynatrain block yet"
REMOVE = "remove the key, or the block"


Config = Mapping[str, Any]
"""DeepSpeed's configuration, as the user wrote it."""


class Verdict(str, Enum):
    """Whether a feature works in a job that switches."""

    WORKS = "works"
    NOTE = "works, with a note"
    AT_SWITCH = "refused at switch"
    AT_START = "refused at start"


@dataclass(frozen=True)
class Target:
    """A layout to start in or to switch to, together with the properties that checks need.

    config: the user's whole configuration.
    layout: the layout to check.
    present: the layout before the switch; None at the start.
    optimizer: the class of the basic optimizer, if known.
    """

    config: Config
    layout: Layout
    present: Layout | None = None
    optimizer: type | None = None


@dataclass(frozen=True)
class Refusal:
    """The reason for a refusal, and what to do instead."""

    why: str
    instead: str


StartCheck = Callable[[Config], Refusal | None]
"""Condition on the user's whole configuration, for refusals that depend on more than one key."""
LayoutCheck = Callable[[Target], Refusal | None]
"""Condition on a target, for refusals that depend on the layout."""


@dataclass(frozen=True)
class Row:
    """One line of the support table.

    key: a dotted key (`zero_optimization.stage`), or the name of a usage.
    verdict: whether the feature works.
    why: the note, or the reason for the refusal.
    instead: what to do instead.
    values: the values that the row is about, if a key has several rows; () for all other values.
    off: values that turn the feature off.
    switch: for a section, the key in it that turns it on, and the value of that key that leaves it off.
    below: whether the row also covers all keys below its own.
    at_start: a further condition at the start, called if the key is given and not off.
    at_layout: a further condition on the layout, called if the key is given and not off.
    """

    key: str
    verdict: Verdict
    why: str = ""
    instead: str = ""
    values: tuple[object, ...] = ()
    off: tuple[object, ...] = OFF
    switch: tuple[str, object] | None = None
    below: bool = False
    at_start: StartCheck | None = None
    at_layout: LayoutCheck | None = None

    def is_off(self, value: object) -> bool:
        """Return whether this value of the key turns the feature off."""
        if any(_same(value, other) for other in self.off):
            return True
        if isinstance(value, Mapping) and self.switch is not None:
            key, left_off = self.switch
            return _same(value.get(key, left_off), left_off) or value.get(key) is None
        return False

    def is_about(self, value: object) -> bool:
        """Return whether the row is about `value`. Text is compared without regard to case."""
        return any(_same(value, other) or _text(value) == _text(other) != "" for other in self.values)

    def error(self, subject: str = "") -> UnsupportedError:
        """Return the exception for a refusal at the start.

        subject: the user's object that is refused, if it is not the key.
        """
        return UnsupportedError(f"{subject or self.key}: {self.why}; {self.instead}")

    def refused(self, subject: str = "") -> SwitchRefused:
        """Return the exception for a refusal of a switch. The arguments are the same as in `error`."""
        return SwitchRefused(f"{subject or self.key}: {self.why}", self.instead)


def works(section: str, keys: str, why: str = "", **more: Any) -> tuple[Row, ...]:
    """Return rows for keys that work, each with the same note.

    section: the section of the keys; "" for the top level.
    keys: the keys, separated by spaces.
    why: the note.
    """
    verdict = Verdict.NOTE if why else Verdict.WORKS
    return tuple(Row(f"{section}.{key}".lstrip("."), verdict, why, **more) for key in keys.split())


def refused(section: str, keys: str, why: str = NOT_TRIED, instead: str = REMOVE, **more: Any) -> tuple[Row, ...]:
    """Return rows for keys that are refused when the engine is built. The arguments are the same as in `works`."""
    return tuple(Row(f"{section}.{key}".lstrip("."), Verdict.AT_START, why, instead, **more) for key in keys.split())


def _same(value: object, other: object) -> bool:
    """Return whether two values are equal, where True differs from 1 and False from 0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _text(value: object) -> str:
    return value.lower() if isinstance(value, str) else ""
