"""What `engine.switch` and `engine.plan` hand to a user, and whether a boundary can see to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.space import Layout


@dataclass
class PendingSwitch:
    """A switch that was agreed to and has not happened yet, or has: then `event` tells how it went.

    at: the step that was asked for, or None: the first boundary at which all members are prepared. cause: what has
    asked for it, if not the script: "balance".
    """

    layout: Layout
    generation: int
    at: int | None
    event: SwitchEvent | None = None
    late: bool = False
    cause: str = ""

    @property
    def done(self) -> bool:
        """Whether it is over, one way or the other."""
        return self.event is not None


class Steps:
    """Optimizer steps between boundaries: some loops make several, so as many as there were before are as usual."""

    def __init__(self) -> None:
        self._count, self._most = 0, 1
        self._warned: PendingSwitch | None = None

    def at_boundary(self) -> None:
        """There is one."""
        self._most, self._count = max(self._most, self._count), 0

    def past_boundary(self, pending: PendingSwitch | None) -> int:
        """A step was made: how many since a boundary, if they are more than ever and that is worth a word; or 0.

        pending: what waits for a boundary; of each a word is said once.
        """
        self._count += 1
        if pending is None or pending.done or pending is self._warned or self._count <= self._most:
            return 0
        self._warned = pending
        return self._count


@dataclass(frozen=True)
class SwitchEstimate:
    """A dry run: what a switch to `layout` would cost, or why it is refused (then all figures are 0).

    bytes_sent: over all members. peak_memory_bytes: state of both layouts and staging, on the member with the most.
    seconds: moves alone, at `bytes_per_second` on each link. members: who would hold which rank. copies_memory_bytes:
    host memory for copies there, on the member with the most; 0 without `dynatrain.buddies`. step_ms: what a step takes
    there by the profile of `dynatrain.balance`, term by term, and their `total`; empty without one.
    """

    layout: Layout
    members: tuple[int, ...] = ()
    bytes_sent: int = 0
    peak_memory_bytes: int = 0
    seconds: float = 0.0
    bytes_per_second: float = 0.0
    copies_memory_bytes: int = 0
    step_ms: Mapping[str, float] = field(default_factory=dict)
    refusal: str = ""
    way_out: str = ""
