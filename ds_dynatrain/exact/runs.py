"""What two report files of an exact job say of each other, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.exact.bits.difference import LOSS, Comparison, compare
from ds_dynatrain.exact.bits.records import ExactRun, read_exact

MOST_LINES = 10
"""Of what differs in a step; the JSON has all."""


@dataclass(frozen=True)
class Compared:
    """Two runs, and what came of it."""

    runs: tuple[ExactRun, ExactRun]
    found: Comparison

    @property
    def is_identical(self) -> bool:
        """Whether no step differs."""
        return self.found.is_identical

    def to_json(self) -> dict[str, Any]:
        """As docs/exact.md has it."""
        found = self.found
        return {
            "identical": found.is_identical,
            "runs": [{"path": run.path, "steps": len(run.steps), "last": max(run.steps)} for run in self.runs],
            "identical_steps": len(found.steps),
            "digested_steps": len(found.states),
            "unknown": found.unknown,
            "last_digested_step": max(found.states, default=None),
            "step": found.step,
            "differences": [asdict(each) for each in found.differences],
        }

    def lines(self) -> Iterator[str]:
        """For a reader, the verdict first."""
        found = self.found
        if found.is_identical:
            what = f"losses and norms of all, weights and moments after {self._digested}"
            what += f"; {found.unknown} losses or norms are in one of them alone" if found.unknown else ""
            yield f"{_steps(found.steps)} bit-identical: {what}"
        else:
            first, *others = found.differences
            yield f"step {found.step} is the first that differs: {first}"
            for each in others[: MOST_LINES - 1]:
                yield f"  {each}"
            if len(others) >= MOST_LINES:
                yield f"  and {len(others) - MOST_LINES + 1} more"
            yield self._before()
        yield from self._alone()

    @property
    def _digested(self) -> str:
        states = self.found.states
        if len(states) == len(self.found.steps):
            return "each"
        return f"{len(states)} of them, the last of which is step {states[-1]}"

    def _before(self) -> str:
        """What was still equal: where to look for the reason."""
        found = self.found
        if not found.states:
            return "No step before it has digests of weights and moments in both."
        last = f"weights and moments were equal after step {found.states[-1]}"
        if found.differences[0].kind == LOSS and found.states[-1] + 1 == found.step:
            return f"Before, {last}: the leaf was computed otherwise, from other samples, draws, kernels or weights."
        return f"Before, {last}, losses and norms of all steps until then."

    def _alone(self) -> Iterator[str]:
        """Steps that nothing is said of."""
        for run, other in (self.runs, self.runs[::-1]):
            alone = sorted(run.steps.keys() - other.steps.keys())
            if alone:
                yield f"Only in {run.path}: {len(alone)} steps, {alone[0]} to {alone[-1]}."


def compared(one: Path, other: Path) -> Compared:
    """Read and compare them; ConfigError for a file without an exact job, a damaged one, and for two jobs."""
    try:
        runs = read_exact(one), read_exact(other)
        return Compared(runs, compare(*runs))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _steps(steps: Sequence[int]) -> str:
    """In words, with the verb that they need."""
    if len(steps) == 1:
        return f"step {steps[0]} is"
    whole = len(steps) == steps[-1] - steps[0] + 1
    return f"steps {steps[0]} to {steps[-1]} are" if whole else f"{len(steps)} steps of {steps[0]} to {steps[-1]} are"
