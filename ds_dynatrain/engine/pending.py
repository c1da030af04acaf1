"""What `engine.switch` and `engine.plan` hand to a user, and whether a boundary can see to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.space import Layout


@dataclass
class PendingSwitch:
    """A switch that was agreed to and has not happened yet, or has: then `event` tells how it went.

    at: the step that was asked for, or None: the first boundary at which all members are prepared. cause: the
    extension that has asked for it; nothing if the script has.
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
        self.count = 0
        """Steps since the last boundary at which something could take effect."""
        self._most, self._missed, self._obstacle = 1, 0, ""
        self._warned: set[str] = set()

    def at_boundary(self, obstacle: str = "") -> None:
        """Note a boundary. obstacle: why nothing could take effect at it, in words; "" if everything could."""
        if obstacle:
            self._missed, self._obstacle = self._missed + 1, obstacle
            return
        self._most, self.count, self._missed = max(self._most, self.count), 0, 0
        self._warned.clear()

    def past_boundary(self, waiting: Iterable[str]) -> list[str]:
        """Note an optimizer step. Return what to warn of: what waits, once each, after more steps than ever before.

        waiting: what waits for a boundary, in words.
        """
        self.count += 1
        if self.count <= self._most:
            return []
        found = [each for each in waiting if each not in self._warned]
        self._warned.update(found)
        return found

    @property
    def reason(self) -> str:
        """Why there was no boundary, in words, and what to do."""
        if self._missed:
            return f"the loop came to {self._missed}, at each of which nothing could take effect: {self._obstacle}"
        return (
            "it takes effect in next(loader) of a loader from initialize or engine.loader, or in engine.boundary() at "
            "the top of a loop of your own, and never in a loop that calls neither"
        )


@dataclass(frozen=True)
class SwitchEstimate:
    """A dry run: what a switch to `layout` would cost, or why it is refused (then all figures are 0).

    bytes_sent: over all members. peak_memory_bytes: state of both layouts and staging, on the member with the most.
    seconds: moves alone, at `bytes_per_second` on each link. members: who would hold which rank. copies_memory_bytes:
    host memory for copies there, on the member with the most; 0 where nobody keeps copies. step_ms: what a step takes
    there by the profile that was measured or configured, term by term, and their `total`; empty without one.
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
