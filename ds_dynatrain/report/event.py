"""The event that records every switch, whatever its outcome, as a line of text and as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_dynatrain.errors import TransferError
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space.layout import Layout

Outcome = Literal["committed", "rolled_back", "cancelled"]
"""Possible outcomes of a switch. "cancelled": the job ended before the switch could begin at a boundary."""

_KIND = "switch"


@dataclass(frozen=True)
class Side:
    """One side of a switch: a layout, and the members that train in it, in the order of their ranks."""

    layout: Mapping[str, Any]
    """Sizes of the axes by name, and `zero_stage`; also those of `boundaries`, `shares`, `experts` and `order` that the
    layout has."""
    members: tuple[int, ...]

    def describe(self) -> str:
        """Return a description of the layout without axes of size 1, such as `data=4 zero_stage=3`."""
        return str(Layout.from_dict(self.layout))


@dataclass(frozen=True)
class CertificateSummary:
    """Summary of the certificate, which proves before the commit that the values on both sides are equal."""

    tensors: int
    """Number of logical tensors."""
    kinds: tuple[str, ...]
    """Names of the state kinds."""
    digest: str
    """One digest over all tensors and kinds, in hexadecimal."""


@dataclass(frozen=True)
class SwitchEvent:
    """The record of one switch, for all of its members together.

    Byte counts are sums over the members. Phases, pause and predictions are those of the reporting member. Every other
    measurement is the largest one of any member.
    """

    outcome: Outcome
    generation: int
    """Generation number of the world that the switch was to form."""
    step: int
    """Number of optimizer steps that were complete when the switch took effect."""
    source: Side
    target: Side
    bytes_kept: int = 0
    """Bytes that stayed in their buffer."""
    bytes_local: int = 0
    """Bytes copied between two buffers of the same member."""
    bytes_sent: int = 0
    """Bytes sent between members, including collectives."""
    bytes_minimum: int = 0
    """Bytes that members need for their new ranks and do not hold, which is what the plan sends."""
    bytes_bound: int | None = None
    """Proven lower bound on the bytes of tensor state that any assignment of members to ranks sends, if the member at
    rank 0 keeps that rank. None if it was not computed, for example before the first optimizer step."""
    rank_zero_bytes: int | None = None
    """How many bytes of `bytes_bound` are sent only because the member at rank 0 keeps that rank."""
    bytes_busiest: int = 0
    """The planned bytes in the busiest direction of the busiest member, for which all others wait."""
    move_ms: float = 0.0
    """How long the moves took on the slowest member, including late ones with their digests."""
    predicted_move_ms: float = 0.0
    """How long the moves of `bytes_busiest` were expected to take, at the link speed that was measured in the switches
    before, or 1 GB/s before the first."""
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """Duration of each phase in milliseconds, in the order in which the phases ran."""
    pause_ms: float = 0.0
    """How long training was paused, including the time for the certificate."""
    certificate_ms: float = 0.0
    """The part of the pause that the certificate took."""
    late_bytes: int = 0
    """The part of `bytes_sent` that was sent after the pause, during the first global batch."""
    late_ms: float = 0.0
    """How long the late bytes took, including their digests. Training continued during this time."""
    late_wait_ms: float = 0.0
    """How long the first optimizer step after the pause waited for late bytes, the second vote and the record."""
    peak_memory_bytes: int = 0
    """The most memory that a member held between drain and release."""
    memory_bound_bytes: int = 0
    """The most memory that the configuration allowed a member to hold."""
    communicators_built: int = 0
    """Number of connections between members that were newly made for the accelerator; 0 on a CPU."""
    communicators_kept: int = 0
    """Number of connections that were kept because their members stayed the same."""
    connect_ms: float = 0.0
    """How long it took to make connections, at this boundary or at an earlier one."""
    connect_pause_ms: float = 0.0
    """The part of `connect_ms` that lay in the pause, in the phase `rebuild` (in `verify` if the switch is lean): all
    of it, or nothing."""
    recompile_ms: float | None = None
    """How long recompilation took in the first step after the switch, including dropping the old code. This time is not
    part of the pause. None before that step, and if nothing is compiled."""
    cause: str = ""
    """The extension that requested the switch; empty if the script or a change of members did."""
    predicted_gain: float | None = None
    """Fraction of a step's time that the switch was expected to save, if this was its purpose."""
    measured_gain: float | None = None
    """Measured fraction of a step's time that was saved; None until the next window has measured it."""
    slowdown_removed: float | None = None
    """Predicted share of the time lost to slow members that `balance` has removed so far; known once the gain is
    measured. None if no member has been slow."""
    certificate: CertificateSummary | None = None
    reason: str = ""
    """Reason for a rollback or cancellation."""
    warnings: tuple[str, ...] = ()

    @property
    def bytes_least(self) -> int:
        """The number to compare `bytes_sent` with: the proven lower bound if it is known, else what the plan sends."""
        return self.bytes_minimum if self.bytes_bound is None else self.bytes_bound

    def to_json(self) -> str:
        """Return the event as one line of JSON, without a line break. `from_json` turns it back into an equal event."""
        return json.dumps({"event": _KIND, **to_record(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> SwitchEvent:
        """Return the event in a line that `to_json` wrote. Raises `ValueError` if the line is not a switch."""
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
        """Return the event as one human-readable line."""
        head = f"switch {self.generation} at step {self.step}: {self.source.describe()} -> {self.target.describe()}"
        phases = ", ".join(f"{name} {duration:.0f}" for name, duration in self.phases_ms.items())
        took = f"{self.pause_ms:.0f} ms" + (f" ({phases})" if phases else "")
        notes = "; warning: ".join(["", *self.warnings])
        if self.outcome == "cancelled":
            return f"{head} cancelled: {self.reason}{notes}"
        if self.outcome == "rolled_back":
            return f"{head} rolled back after {took}: {self.reason}{notes}"
        said = [f"{head} in {took}", f"sent {self.bytes_sent / 1e6:.1f} MB (minimum {self.bytes_least / 1e6:.1f})"]
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
            if self.measured_gain is not None:
                said.append(f"measured {100 * self.measured_gain:.1f} %")
        if self.slowdown_removed is not None:
            said.append(f"{100 * self.slowdown_removed:.0f} % of the slow-down removed")
        return ", ".join(said) + notes
