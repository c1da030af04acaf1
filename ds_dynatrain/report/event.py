"""The event with which every switch ends, whatever its outcome, as a line of text and as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_dynatrain.errors import TransferError
from ds_dynatrain.records import from_record, to_record

Outcome = Literal["committed", "rolled_back", "cancelled"]
"""How a switch ends; "cancelled": the job ended before a boundary came for it."""

_KIND = "switch"


@dataclass(frozen=True)
class Side:
    """One side of a switch: a layout and the members that train under it, in the order of their ranks."""

    layout: Mapping[str, Any]
    """Sizes of the axes by name, and `zero_stage`; `boundaries` and `shares` where the layout has them."""
    members: tuple[int, ...]

    def describe(self) -> str:
        """Return the layout in words, axes of size 1 left out: `data=4 zero_stage=3`."""
        always = ("data", "zero_stage")
        return " ".join(f"{name}={size}" for name, size in self.layout.items() if name in always or size != 1)


@dataclass(frozen=True)
class CertificateSummary:
    """Summary of the certificate: the values that were proved equal before the commit."""

    tensors: int
    """Number of logical tensors."""
    kinds: tuple[str, ...]
    """Names of the state kinds."""
    digest: str
    """One digest over all tensors and kinds, in hexadecimal digits."""


@dataclass(frozen=True)
class SwitchEvent:
    """One switch, over all of its members: byte counts are sums, phases and pause the reporting member's, and all else
    the largest of any member."""

    outcome: Outcome
    generation: int
    """Generation of the world that the switch asked for."""
    step: int
    """Optimizer steps that were complete when the switch took effect."""
    source: Side
    target: Side
    bytes_kept: int = 0
    """Bytes that stayed in their buffer."""
    bytes_local: int = 0
    """Bytes copied from one buffer of a member into another of the same member."""
    bytes_sent: int = 0
    """Bytes that crossed between members, collectives included."""
    bytes_minimum: int = 0
    """The fewest bytes that can cross for this change with the best allowed assignment of slots."""
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds by phase, in the order in which the phases ran."""
    pause_ms: float = 0.0
    """How long training stood still, the certificate included."""
    certificate_ms: float = 0.0
    """The certificate's share of the pause."""
    late_bytes: int = 0
    """The part of `bytes_sent` that travelled after the pause, during the first global batch."""
    late_ms: float = 0.0
    """How long the late bytes took, their digests included; training went on meanwhile."""
    late_wait_ms: float = 0.0
    """How long the first optimizer step then stood still: for late bytes, the second vote and the record."""
    peak_memory_bytes: int = 0
    """The most that a member held between drain and release."""
    memory_bound_bytes: int = 0
    """The most memory that the configuration allowed a member to hold."""
    communicators_built: int = 0
    """Connections between members that were made anew for the accelerator; none on a CPU."""
    communicators_kept: int = 0
    """Connections that were kept because their members stayed the same."""
    connect_ms: float = 0.0
    """How long making connections took, at this boundary or at an earlier one."""
    connect_pause_ms: float = 0.0
    """The part of `connect_ms` in the pause, in the phase `rebuild` (of a lean switch, in `verify`): all of it, or
    nothing."""
    recompile_ms: float | None = None
    """How long the first step after the switch took to compile again, including the dropping of old code; outside the
    pause. None before that step, and where nothing is compiled."""
    cause: str = ""
    """The extension that asked for the switch; empty if the script or a change of members did."""
    predicted_gain: float | None = None
    """Share of a step that the switch was meant to save, if that is its purpose."""
    measured_gain: float | None = None
    """Measured share of a step that was saved; None until the next window has measured it."""
    certificate: CertificateSummary | None = None
    reason: str = ""
    """Reason of a rollback or cancellation."""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the event as one line of JSON without a line break; `from_json` reads it back, equal."""
        return json.dumps({"event": _KIND, **to_record(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> SwitchEvent:
        """Return the event of a line that `to_json` wrote; raises `ValueError` for a line that is no switch."""
        read = json.loads(line)
        if not isinstance(read, dict) or read.pop("event", None) != _KIND:
            raise ValueError(f"not a line about a switch: {line[:80]!r}")
        try:
            return from_record(cls, read)
        except TransferError as error:
            raise ValueError(
                f"a line about a switch that lacks or has unknown fields ({error}): {line[:80]!r}"
            ) from error

    def line(self) -> str:
        """Return the event as one line that a person can read."""
        head = f"switch {self.generation} at step {self.step}: {self.source.describe()} -> {self.target.describe()}"
        phases = ", ".join(f"{name} {duration:.0f}" for name, duration in self.phases_ms.items())
        took = f"{self.pause_ms:.0f} ms" + (f" ({phases})" if phases else "")
        notes = "; warning: ".join(["", *self.warnings])
        if self.outcome == "cancelled":
            return f"{head} cancelled: {self.reason}{notes}"
        if self.outcome == "rolled_back":
            return f"{head} rolled back after {took}: {self.reason}{notes}"
        said = [f"{head} in {took}"]
        said.append(f"sent {self.bytes_sent / 1e6:.1f} MB (minimum {self.bytes_minimum / 1e6:.1f})")
        if self.certificate is None:
            said.append("no certificate")
        else:
            said.append(f"certificate ok ({self.certificate.tensors} tensors, {self.certificate_ms:.0f} ms)")
        if self.late_ms:
            said.append(f"late: {self.late_bytes / 1e6:.1f} MB in {self.late_ms:.0f} ms")
            said.append(f"waited {self.late_wait_ms:.0f} ms")
        if self.communicators_built or self.communicators_kept:
            ahead = "" if self.connect_pause_ms else ", before the pause"
            counts = f"{self.communicators_built} built, {self.communicators_kept} kept"
            said.append(f"communicators: {counts} ({self.connect_ms:.0f} ms{ahead})")
        if self.predicted_gain is not None:
            said.append(f"for {self.cause}: predicted gain {100 * self.predicted_gain:.1f} % of a step")
        if self.predicted_gain is not None and self.measured_gain is not None:
            said.append(f"measured {100 * self.measured_gain:.1f} %")
        return ", ".join(said) + notes
