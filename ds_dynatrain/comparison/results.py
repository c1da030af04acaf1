"""The measurements of a run, as values that are written to JSON and read back, and the figures derived from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ds_dynatrain.comparison.job import WAYS, YARD, Way
from ds_dynatrain.errors import ConfigError, TransferError
from ds_dynatrain.records import from_record, to_record

FORMAT = 1
PHASES = (
    "drain",
    "plan",
    "move",
    "proof",
    "save",
    "convert",
    "start",
    "import",
    "initialize",
    "load",
    "first step",
    "rest",
)
"""Phases in the order in which they are shown. rest: time outside all others, mostly waiting for other ranks."""
BAR = 100.0
"""The value that `ratio` is to reach."""


@dataclass(frozen=True)
class Measure:
    """One measurement of one way of one change. Times in seconds, as rank 0 sees them; sizes in bytes.

    total: from the end of the last old step to the end of the first new one. steady: a later step of the new layout.
    pause, certificate: of a live switch, the longest among members that continue. wait: how long the first step waited
    for late state. ahead: by how much the steps took longer during which a switch was prepared. moved: between members.
    peak: of one process, the largest. steps_lost, samples_lost, samples_repeated: counted in the first new step.
    is_equal: whether all masters and moments are bit for bit as before. losses: by step. reason: why the way failed;
    then the rest is empty.
    """

    way: str
    size: str
    change: str
    parameters: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    total: float = 0.0
    steady: float = 0.0
    pause: float | None = None
    certificate: float | None = None
    wait: float = 0.0
    ahead: float | None = None
    moved: int = 0
    written: int = 0
    peak: int = 0
    steps_lost: int = 0
    samples_lost: int = 0
    samples_repeated: int = 0
    is_equal: bool = False
    losses: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the way succeeded."""
        return not self.reason

    @property
    def still(self) -> float:
        """Seconds for which training stood still: pause and wait of a live switch, else the total without one step."""
        return self.total - self.steady if self.pause is None else self.pause + self.wait


@dataclass(frozen=True)
class Comparison:
    """The measures of a run, and its circumstances.

    machine: where it ran, in words. command: how it was started. before: the step after which the change came.
    """

    machine: str
    command: str
    before: int
    measures: tuple[Measure, ...]

    def cases(self) -> list[tuple[str, str]]:
        """Return the pairs (size, change) in the order of measuring."""
        return list(dict.fromkeys((each.size, each.change) for each in self.measures))

    def of(self, size: str, change: str) -> dict[str, Measure]:
        """Return the measures of a case by way, in the order of `WAYS`; the middle one of repeated measures."""
        found: dict[str, Measure] = {}
        for way in WAYS:
            mine = [m for m in self.measures if (m.way, m.size, m.change) == (way.name, size, change)]
            if mine:
                found[way.name] = _middle(mine)
        return found

    def to_json(self) -> str:
        """Return the whole comparison as the text of a file."""
        return json.dumps({"format": FORMAT, **to_record(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Comparison:
        """Read the text of `to_json`; ConfigError for any other text."""
        try:
            read: dict[str, Any] = json.loads(text)
            if read.pop("format") != FORMAT:
                raise ValueError("another format")
            return from_record(Comparison, read)
        except (AttributeError, KeyError, TypeError, ValueError, TransferError) as error:
            raise ConfigError(
                f"the text has no figures of `ds-dynatrain compare`: {error}; give a file that it has written"
            ) from error


def ratio(live: Measure, yard: Measure, is_whole: bool) -> float:
    """Return (total of the yard - one steady step) ÷ the time that a live switch stands still.

    is_whole: whether that time includes the certificate. Without it the wait of a late switch is left out, as it
    contains the certificate.
    """
    pause = live.pause or 0.0
    apart = pause if way_of(live.way).late else pause - (live.certificate or 0.0)
    return yard.still / max(live.still if is_whole else apart, 1e-9)


def ratios(found: Mapping[str, Measure]) -> list[tuple[Way, float, float]]:
    """Return (live way, ratio with the certificate, ratio without it) for a case.

    Empty unless the yard and a live way succeeded.
    """
    yard = found.get(YARD)
    if yard is None or not yard.is_done:
        return []
    live = [(way, found[way.name]) for way in WAYS if way.is_live and way.name in found]
    return [(way, ratio(each, yard, True), ratio(each, yard, False)) for way, each in live if each.is_done]


def way_of(name: str) -> Way:
    """Return the way of this name; ConfigError if there is none."""
    for way in WAYS:
        if way.name == name:
            return way
    raise ConfigError(f"{name!r} is no way; give one of {', '.join(way.name for way in WAYS)}")


def _middle(found: Sequence[Measure]) -> Measure:
    done = [each for each in found if each.is_done]
    if not done:
        return found[0]
    centre = median(each.total for each in done)
    return min(done, key=lambda each: abs(each.total - centre))
