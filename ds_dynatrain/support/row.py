"""A row of the support table: a key of DeepSpeed's configuration or a usage, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from ds_dynatrain.space.layout import Layout

OFF: tuple[object, ...] = (None, False, {})
"""Values of most keys that say a feature is not used."""
NOT_TRIED = "not supported with a dynatrain block yet"
REMOVE = "remove the key, or the block"


class Verdict(str, Enum):
    """Outcome of a feature in a job that switches."""

    WORKS = "works"
    NOTE = "works, with a note"
    AT_SWITCH = "refused at switch"
    AT_START = "refused at start"


@dataclass(frozen=True)
class Target:
    """A layout that a job is to start in or to switch to, and what a check may ask about the job.

    config: the user's, whole. present: the layout before the switch, None at the start. optimizer: class of the basic
    optimizer where it is known.
    """

    config: Mapping[str, Any]
    layout: Layout
    present: Layout | None = None
    optimizer: type | None = None


@dataclass(frozen=True)
class Refusal:
    """Why not, and what to do instead."""

    why: str
    instead: str


StartCheck = Callable[[Mapping[str, Any]], Refusal | None]
"""From the user's whole configuration to a refusal, for what depends on more than one key."""
LayoutCheck = Callable[[Target], Refusal | None]
"""The same, for what depends on the layout."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    key: dotted (`zero_optimization.stage`), or the name of a usage. why: the note or the reason. instead: what to
    do. values: those that the row is about, if there are several rows of one key; none: all others. off: values that
    ask for nothing. switch: of a section, the key in it that turns it on, and the value that leaves it off. below: the
    row stands for every key below its own as well. proof: the test that shows a row that works, in real ranks.
    at_start, at_layout: further conditions, called if the key is there and not off.
    """

    key: str
    verdict: Verdict
    why: str = ""
    instead: str = ""
    values: tuple[object, ...] = ()
    off: tuple[object, ...] = OFF
    switch: tuple[str, object] | None = None
    below: bool = False
    proof: str = ""
    at_start: StartCheck | None = None
    at_layout: LayoutCheck | None = None

    def is_off(self, value: object) -> bool:
        """Whether this value of the key asks for nothing."""
        if any(_same(value, other) for other in self.off):
            return True
        if isinstance(value, Mapping) and self.switch is not None:
            key, left_off = self.switch
            return _same(value.get(key, left_off), left_off) or value.get(key) is None
        return False

    def is_about(self, value: object) -> bool:
        """Whether `value` is one of those that the row is about; text is compared without regard to case."""
        return any(_same(value, other) or _text(value) == _text(other) != "" for other in self.values)

    def error(self, subject: str = "") -> UnsupportedError:
        """The refusal at the start; subject: what of the user's it is about, if not the key."""
        return UnsupportedError(f"{subject or self.key}: {self.why}; {self.instead}")

    def refused(self, subject: str = "") -> SwitchRefused:
        """The refusal of a switch."""
        return SwitchRefused(f"{subject or self.key}: {self.why}", self.instead)


def works(section: str, keys: str, why: str = "", proof: str = "", **more: Any) -> tuple[Row, ...]:
    """Rows of keys (parted by spaces) of a section ("" for the top) that work; with a note if there is one."""
    verdict = Verdict.NOTE if why else Verdict.WORKS
    return tuple(Row(_path(section, key), verdict, why, proof=proof, **more) for key in keys.split())


def refused(section: str, keys: str, why: str = NOT_TRIED, instead: str = REMOVE, **more: Any) -> tuple[Row, ...]:
    """Rows of keys of a section that are refused when the engine is built."""
    return tuple(Row(_path(section, key), Verdict.AT_START, why, instead, **more) for key in keys.split())


def _path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _same(value: object, other: object) -> bool:
    """Equal, where 1 is not True and 0 is not False."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _text(value: object) -> str:
    return value.lower() if isinstance(value, str) else ""
