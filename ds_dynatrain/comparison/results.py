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
"""Phases in the order in which they are shown. "rest" is time outside all others, mostly waiting for other ranks."""
BAR = 100.0
"""The goal: the ratio (see `ratios`) that a live switch should reach."""


@dataclass(frozen=True)
class Measure:
    """One measurement of a layout change that was carried out in one way (by one method).

    Times are in seconds, as rank 0 sees them, and sizes are in bytes, unless stated otherwise.

    total: time from the end of the last old step to the end of the first new step.
    steady: median duration of the later steps in the new layout.
    pause: a live switch's pause, the largest value among the members that continue; None if there was no switch.
    certificate: the time of the pause spent on the certificate, with the same rules as `pause`.
    wait: how long the first step waited for state that arrives after the pause; the largest value, as for `pause`.
    ahead: total time by which the request slowed down the steps between it and the change; None without a switch.
    moved: total number of bytes sent between all members in the switch.
    written: size of the checkpoint files.
    peak: largest memory of any process.
    steps_lost: number of steps that have to be trained again.
    samples_lost: number of samples missing from the first new step.
    samples_repeated: number of samples in the first new step that were trained before.
    is_equal: whether all masters and moments are bit for bit the same as before.
    losses: mean loss of each step, keyed by step number.
    reason: why the change failed; "" if it did not.
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
        """Whether the change succeeded."""
        return not self.reason

    @property
    def still(self) -> float:
        """Seconds for which training stopped.

        For a switch this is the pause plus the wait. Otherwise it is the total less one steady step.
        """
        return self.total - self.steady if self.pause is None else self.pause + self.wait


@dataclass(frozen=True)
class Comparison:
    """The measures of a run, and the conditions under which it ran.

    machine: a description of the machine.
    command: the command that started the run.
    before: number of steps before the change.
    measures: the measurements, in order.
    """

    machine: str
    command: str
    before: int
    measures: tuple[Measure, ...]

    def cases(self) -> list[tuple[str, str]]:
        """Return the pairs (model size, change) in the order in which they were measured."""
        return list(dict.fromkeys((each.size, each.change) for each in self.measures))

    def of(self, size: str, change: str) -> dict[str, Measure]:
        """Return the measures of one model size and one change, keyed by the name of the way, in the order of `WAYS`.

        If a way was measured several times, the successful measure whose total is closest to the median is returned.
        """
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
        """Return the whole comparison as JSON text, which `from_json` reads."""
        return json.dumps({"format": FORMAT, **to_record(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Comparison:
        """Read text that `to_json` wrote. Raises ConfigError for any other text."""
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
    """Compare each live switch with the reference, DeepSpeed's universal checkpoint and a restart (`YARD`).

    found: the measures of one case, keyed by the name of the way.

    Returns (way, ratio with the certificate, ratio without it) for each live way that succeeded; [] if the reference
    failed. A ratio is the time for which training stops in the reference, divided by that of the live switch. If state
    moves after the pause, the ratio without the certificate counts only the pause, because the certificate is then part
    of the first step's wait.
    """
    yard, said = found.get(YARD), []
    for name, each in found.items():
        way = WAYS[name]
        if way.is_live and each.is_done and yard is not None and yard.is_done:
            pause = each.pause or 0.0
            apart = pause if way.is_late else pause - (each.certificate or 0.0)
            said.append((way, yard.still / max(each.still, 1e-9), yard.still / max(apart, 1e-9)))
    return said
