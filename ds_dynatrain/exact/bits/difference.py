"""The comparison of two runs of an exact job: the first step that differs, and all differences in that step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.exact.bits.bit_records import ExactRun, ExactStep, read_exact

LOSS, NORM = "loss", "norm"
MOST_LINES = 10
"""Maximum number of differences in a step that are printed. The JSON output contains all of them."""
_FIRST_KINDS = ("weight", "master")
"""The state kinds that are reported first. Moments follow, because they say the least about the cause."""


@dataclass(frozen=True)
class Difference:
    """One value that differs.

    kind: "loss", "norm", "leaves" (their number), or a state kind.
    name: the leaf, such as "leaf 3" (a leaf is a micro-batch of fixed size), or the tensor; "" for "norm" and "leaves".
    one: the value in the first run; for tensors, their digest.
    other: the value in the second run; for tensors, their digest.
    """

    kind: str
    name: str
    one: str
    other: str

    def __str__(self) -> str:
        what = self.kind if not self.name else f"{self.kind} of {self.name}"
        return f"{what}: {self.one} and {self.other}"


@dataclass(frozen=True)
class BitComparison:
    """The result of comparing two runs.

    steps: the steps that both runs have, up to but not including the first that differs.
    states: those of `steps` for which both runs have digests of weights and moments.
    unknown: the number of losses and norms in these steps that only one run has, for example because a rank died before
        it sent its own.
    step: the first step that differs; None if there is none.
    differences: all differences in that step, in the order in which a step computes the values: losses by leaf
        (micro-batch of fixed size), the norm, weights, masters, moments.
    """

    steps: tuple[int, ...]
    states: tuple[int, ...]
    unknown: int = 0
    step: int | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def is_identical(self) -> bool:
        """Whether no step differs."""
        return self.step is None


def compare(one: ExactRun, other: ExactRun) -> BitComparison:
    """Compare two runs step by step.

    Raises ValueError if the runs cannot be compared: they belong to different jobs, have no step in common, or have no
    common step with digests of weights and moments in both.
    """
    what = f"{one.path} and {other.path}"
    if unlike := one.job.difference(other.job):
        raise ValueError(f"{what} are of two jobs, whose bits have nothing in common: {unlike}")
    common = sorted(one.steps.keys() & other.steps.keys())
    if not common:
        ranges = (f"steps {min(run.steps)} to {max(run.steps)}" for run in (one, other))
        raise ValueError(f"{what} have no step in common: {' and '.join(ranges)}")
    same, states, unknown = list[int](), list[int](), 0
    for number in common:
        mine, theirs = one.steps[number], other.steps[number]
        found = tuple(_differences(one, mine, theirs))
        if found:
            return BitComparison(tuple(same), tuple(states), unknown, number, found)
        same.append(number)
        states += [number] if mine.state and theirs.state else []
        pairs = zip((*mine.losses, mine.norm), (*theirs.losses, theirs.norm), strict=True)
        unknown += sum((one_value is None) != (other_value is None) for one_value, other_value in pairs)
    if not states:
        raise ValueError(
            f"{what}: losses and norms of {len(same)} steps are equal, and there is no step of which both have digests "
            "of weights and moments: give both jobs the same dynatrain.exact.digest_every_steps"
        )
    return BitComparison(tuple(same), tuple(states), unknown)


def _differences(run: ExactRun, one: ExactStep, other: ExactStep) -> Iterator[Difference]:
    if len(one.losses) != len(other.losses):
        yield Difference("leaves", "", str(len(one.losses)), str(len(other.losses)))
    for leaf, pair in enumerate(zip(one.losses, other.losses, strict=False)):
        if _differ(*pair):
            yield Difference(LOSS, f"leaf {leaf}", *map(repr, pair))
    if _differ(one.norm, other.norm):
        yield Difference(NORM, "", repr(one.norm), repr(other.norm))
    if not one.state or not other.state:
        return
    for kind in sorted(run.job.kinds, key=lambda name: (name not in _FIRST_KINDS, name == "master", name)):
        if one.state[kind] == other.state[kind]:
            continue
        digests = (np.frombuffer(step.state[kind], "<u8").tolist() for step in (one, other))
        for (name, _), mine, theirs in zip(run.job.tensors, *digests, strict=True):
            if mine != theirs:
                yield Difference(kind, repr(name), f"{mine:016x}", f"{theirs:016x}")


def _differ(one: float | None, other: float | None) -> bool:
    """Return whether both values are known and differ. -0.0 differs from 0.0, and nan equals nan."""
    return one is not None and other is not None and repr(one) != repr(other)


def compared(one: Path, other: Path) -> tuple[tuple[ExactRun, ExactRun], BitComparison]:
    """Read and compare two report files.

    Raises ConfigError if a file is damaged or has no exact job, or if the two cannot be compared.
    """
    try:
        runs = read_exact(one), read_exact(other)
        return runs, compare(*runs)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def report(runs: Sequence[ExactRun], found: BitComparison) -> dict[str, Any]:
    """Return the JSON object that is described in docs/exact.md."""
    return {
        "identical": found.is_identical,
        "runs": [{"path": run.path, "steps": len(run.steps), "last": max(run.steps)} for run in runs],
        "identical_steps": len(found.steps),
        "digested_steps": len(found.states),
        "unknown": found.unknown,
        "last_digested_step": max(found.states, default=None),
        "step": found.step,
        "differences": [asdict(each) for each in found.differences],
    }


def lines(runs: tuple[ExactRun, ExactRun], found: BitComparison) -> Iterator[str]:
    """Yield the lines that the command prints, beginning with whether the runs are identical."""
    if found.is_identical:
        states, are_all = found.states, len(found.states) == len(found.steps)
        digested = "each" if are_all else f"{len(states)} of them, the last of which is step {states[-1]}"
        what = f"losses and norms of all, weights and moments after {digested}"
        what += f"; {found.unknown} losses or norms are in one of them alone" if found.unknown else ""
        yield f"{_steps(found.steps)} bit-identical: {what}"
    else:
        first, *others = found.differences
        yield f"step {found.step} is the first that differs: {first}"
        for each in others[: MOST_LINES - 1]:
            yield f"  {each}"
        if len(others) >= MOST_LINES:
            yield f"  and {len(others) - MOST_LINES + 1} more"
        yield _before(found)
    for run, other in (runs, runs[::-1]):
        alone = sorted(run.steps.keys() - other.steps.keys())
        if alone:
            yield f"Only in {run.path}: {len(alone)} steps, {alone[0]} to {alone[-1]}."


def _before(found: BitComparison) -> str:
    """Return a sentence about what was still identical before the first difference, as a hint to its cause."""
    if not found.states:
        return "No step before it has digests of weights and moments in both."
    last = f"weights and moments were equal after step {found.states[-1]}"
    if found.differences[0].kind == LOSS and found.states[-1] + 1 == found.step:
        return f"Before, {last}: the leaf was computed otherwise, from other samples, draws, kernels or weights."
    return f"Before, {last}, losses and norms of all steps until then."


def _steps(steps: Sequence[int]) -> str:
    """Return a phrase such as "steps 1 to 4 are" for these step numbers."""
    if len(steps) == 1:
        return f"step {steps[0]} is"
    whole = len(steps) == steps[-1] - steps[0] + 1
    return f"steps {steps[0]} to {steps[-1]} are" if whole else f"{len(steps)} steps of {steps[0]} to {steps[-1]} are"
