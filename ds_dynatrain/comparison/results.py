"""The measurements of a run, as values that are written to JSON and read back, and the figures derived from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ds_dynatrain.comparison.job import WAYS, YARD, Way
from ds_dynatrain.errors import ConfigError, TransferError
from ds_dynatrain.records import from_record, to_record

FORMAT = 1
PHASES = (
    *("drain", "plan", "move", "proof", "save", "convert"),
    *("start", "import", "initialize", "load", "first step", "rest"),
)
"""Phases in the order in which they are shown. rest: time outside all others, mostly waiting for other ranks."""
BAR = 100.0
"""The value that the ratio of a live way is to reach."""


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
    """The measures of a run, and the conditions under which it ran.

    machine: a description of the machine. command: the command that started the run. before: the step after which the
    change came.
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
            mine = [each for each in self.measures if (each.way, each.size, each.change) == (way, size, change)]
            done = [each for each in mine if each.is_done]
            if done:
                centre = median(each.total for each in done)
                found[way] = min(done, key=lambda each: abs(each.total - centre))
            elif mine:
                found[way] = mine[0]
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
            found = from_record(Comparison, read)
            if unknown := {each.way for each in found.measures} - {*WAYS}:
                raise ValueError(f"{unknown.pop()!r} is no way")
            return found
        except (AttributeError, KeyError, TypeError, ValueError, TransferError) as error:
            raise ConfigError(
                f"the text has no figures of `ds-dynatrain compare`: {error}; give a file that it has written"
            ) from error


def ratios(found: Mapping[str, Measure]) -> list[tuple[Way, float, float]]:
    """Return (live way, ratio with the certificate, ratio without it) for a case.

    A ratio is (total of the yard - one steady step) ÷ the time that a live switch stands still. Without the certificate
    the wait of a late switch is left out, as it contains the certificate. Empty unless the yard and a live way
    succeeded.
    """
    yard, said = found.get(YARD), []
    for name, each in found.items():
        way = WAYS[name]
        if way.is_live and each.is_done and yard is not None and yard.is_done:
            pause = each.pause or 0.0
            apart = pause if way.is_late else pause - (each.certificate or 0.0)
            said.append((way, yard.still / max(each.still, 1e-9), yard.still / max(apart, 1e-9)))
    return said
