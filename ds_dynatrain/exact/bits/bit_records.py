"""Bitwise records of an exact job and of its steps: lines of the report file, and a whole run read from them.

A line about the job precedes its first step. Such a line also occurs wherever steps are not consecutive: after a
checkpoint was loaded, or if another process continues the file. If a step number occurs again, the job went back to
that step, so the earlier lines about that step and about later steps no longer count. Each line about a step has a
digest of everything else in the line, so that damage is noticed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_dynatrain.errors import TransferError
from ds_dynatrain.records import from_record, to_record

JOB, STEP = "exact_job", "exact_step"
OF_SWITCHES = ("switch", "recompile", "gain")
"""Names of the other events in a report file, whose lines are skipped."""
DIGEST_BYTES = 8
"""Bytes of the digest of one tensor in one state kind, in little-endian order."""


@dataclass(frozen=True)
class ExactJob:
    """The facts that must be equal in two runs for these to be bitwise identical.

    seed: the seed of the job's random streams.
    batch_size: the number of samples in a global batch.
    leaf_size: the number of samples in a leaf (a micro-batch of fixed size).
    kinds: the names of the state kinds.
    tensors: the names and shapes of the tensors, in the order of their names.
    """

    seed: int
    batch_size: int
    leaf_size: int
    kinds: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    def to_json(self) -> str:
        """Return the record as one line, without a line break."""
        return _line({"event": JOB, **to_record(self)})

    def difference(self, other: ExactJob) -> str:
        """Return a description of the first fact in which another job differs; "" if there is none."""
        for name in ("batch_size", "leaf_size", "seed", "kinds"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                said = ((", ".join(each) if name == "kinds" else each) for each in (mine, theirs))
                return f"{name.replace('_', ' ')}: {' and '.join(map(str, said))}"
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"tensors: {mine[0]!r} of shape {list(mine[1])} and {theirs[0]!r} of shape {list(theirs[1])}"
        if len(self.tensors) != len(other.tensors):
            return f"tensors: {len(self.tensors)} and {len(other.tensors)}"
        return ""


@dataclass(frozen=True)
class ExactStep:
    """The results of one optimizer step.

    step: the number of completed steps, including this one.
    norm: the norm of the gradients before clipping; None if it was not computed.
    losses: the loss of each leaf (micro-batch of fixed size); None if the engine was not given one.
    state: a map from state kind to the digests of all tensors, one after another; {} if they were not computed.
    """

    step: int
    norm: float | None
    losses: tuple[float | None, ...]
    state: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of all fields, in hexadecimal digits."""
        return hashlib.blake2b(_line(self._record()).encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """Return the record as one line, without a line break."""
        return _line({**self._record(), "digest": self.digest})

    def _record(self) -> dict[str, Any]:
        state = {kind: base64.b64encode(held).decode() for kind, held in sorted(self.state.items())}
        losses = [*map(_plain, self.losses)]
        return {"event": STEP, "step": self.step, "norm": _plain(self.norm), "losses": losses, "state": state}

    @staticmethod
    def read(record: Mapping[str, Any], job: ExactJob) -> ExactStep:
        """Return the step that a line of the report file describes.

        record: the parsed line.
        job: the job to which the line belongs.

        Raises KeyError, TypeError or ValueError if the line has another form or a wrong digest.
        """
        state = {str(kind): base64.b64decode(held, validate=True) for kind, held in record["state"].items()}
        norm, *losses = (None if each is None else float(each) for each in (record["norm"], *record["losses"]))
        made = ExactStep(int(record["step"]), norm, tuple(losses), state)
        whole = DIGEST_BYTES * len(job.tensors)
        if made.digest != record["digest"]:
            raise ValueError(f"its digest is {record['digest']!r}, and what it says makes {made.digest!r}")
        if state and (sorted(state) != sorted(job.kinds) or any(len(held) != whole for held in state.values())):
            raise ValueError(f"digests of {', '.join(state)} that are not of {len(job.tensors)} tensors")
        return made


@dataclass(frozen=True)
class ExactRun:
    """A run of an exact job, read from a report file.

    path: the report file.
    job: the facts about the job.
    steps: the steps that count, keyed by number and in order.
    """

    path: str
    job: ExactJob
    steps: Mapping[int, ExactStep]


def read_exact(path: str | Path) -> ExactRun:
    """Read the run of an exact job from a report file, skipping lines about other events.

    Raises ValueError, naming the file and the line, if the file is damaged, cut off, about two jobs, or without an
    exact job. Raises OSError if the file cannot be opened.
    """
    job: ExactJob | None = None
    last: int | None = None
    steps = dict[int, ExactStep]()
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = _parsed(line)
                if record["event"] == JOB:
                    facts = {name: value for name, value in record.items() if name != "event"}
                    before, job, last = job, from_record(ExactJob, facts), None
                    if before is not None and (other := before.difference(job)):
                        raise ValueError(f"another job begins here ({other}): give each its own report.jsonl")
                elif record["event"] == STEP:
                    if job is None:
                        raise ValueError("a step before any line says of which job it is: the beginning is lost")
                    step = ExactStep.read(record, job)
                    if last is not None and step.step != last + 1:
                        raise ValueError(f"step {step.step} comes after step {last}: lines between them are lost")
                    last = step.step
                    while steps and next(reversed(steps)) >= last:
                        steps.popitem()
                    steps[last] = step
                elif record["event"] not in OF_SWITCHES:
                    raise ValueError(f"a line about {record['event']!r}, which no report file has")
            except (AttributeError, KeyError, TypeError, ValueError, TransferError) as error:
                words = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}, line {number}: {words}") from error
    if job is None or not steps:
        raise ValueError(
            f"{path}: no step of an exact job is in it; it is to be the report.jsonl of a job with dynatrain.exact"
        )
    return ExactRun(str(path), job, steps)


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode())
    except ValueError:
        if line.endswith(b"\n"):
            raise ValueError(f"damaged, it is no JSON: {line[:60]!r}") from None
        raise ValueError(
            "cut off: its process ended while it wrote, or the disk was full; delete the line to compare what is "
            "before it"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError(f"no line of a report file: {line[:60]!r}")
    return record


def _plain(value: float | None) -> float | str | None:
    """Return a number in a form that JSON can hold exactly: as a number, or as a word for infinities and nan."""
    return value if value is None or math.isfinite(value) else str(value)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))
