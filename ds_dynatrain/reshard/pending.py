"""Results that `engine.switch` and `engine.plan` return to a user, and warnings if a requested switch never takes
place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.space import Layout


@dataclass
class PendingSwitch:
    """A switch that all members have agreed to. Once it has ended, `event` describes its outcome.

    at: the number of optimizer steps after which it takes effect; None for the first point between two steps at which
        all members are prepared.

    late: whether optimizer state moves after the pause, during the next global batch.

    cause: the extension that requested it; "" if the script did.
    """

    layout: Layout
    generation: int
    at: int | None
    event: SwitchEvent | None = None
    late: bool = False
    cause: str = ""

    @property
    def done(self) -> bool:
        """Whether the switch has ended, committed or rolled back."""
        return self.event is not None


class Steps:
    """Counter of optimizer steps since a requested switch could last take effect, to warn if the script gives it no
    opportunity.

    Some scripts take several steps between such opportunities (boundaries), so a warning is given only after more steps
    than ever before.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of optimizer steps since a change could last take effect."""
        self._most, self._missed, self._obstacle = 1, 0, ""
        self._warned: set[str] = set()

    def at_boundary(self, obstacle: str = "") -> None:
        """Record a boundary: a point between two optimizer steps at which a switch can take effect.

        obstacle: a description of what kept switches from taking effect there; "" if nothing did.
        """
        if obstacle:
            self._missed, self._obstacle = self._missed + 1, obstacle
            return
        self._most, self.count, self._missed = max(self._most, self.count), 0, 0
        self._warned.clear()

    def past_boundary(self, waiting: Iterable[str]) -> list[str]:
        """Record an optimizer step. If there have never been so many steps between boundaries, return the changes that
        wait for one, to warn about them.

        Each of them is returned only once.

        waiting: descriptions of the changes that wait for a boundary.
        """
        self.count += 1
        if self.count <= self._most:
            return []
        found = [each for each in waiting if each not in self._warned]
        self._warned.update(found)
        return found

    @property
    def reason(self) -> str:
        """Description of why no switch could take effect, and of what the user can do about it."""
        if self._missed:
            return f"the loop came to {self._missed}, at each of which nothing could take effect: {self._obstacle}"
        return (
            "it takes effect in next(loader) of a loader from initialize or engine.loader, or in engine.boundary() at "
            "the top of a loop of your own, and never in a loop that calls neither"
        )


@dataclass(frozen=True)
class SwitchEstimate:
    """Dry run of a switch: what a switch to `layout` would cost, or why it is refused (then all figures are 0).

    members: the member at each rank of the layout.

    bytes_sent: the bytes that all members send.

    bytes_bound: a lower bound on these bytes over all assignments of members to ranks in which the member at rank 0
        keeps this rank.

    rank_zero_bytes: how many of these bytes are sent because the member at rank 0 keeps this rank.

    peak_memory_bytes: the state of both layouts and the staging memory, on the member that needs most.

    seconds: the time of the moves alone, at `bytes_per_second` on each link.

    copies_memory_bytes: the host memory for copies in that layout, on the member that needs most; 0 in a job without
        copies.

    step_ms: the predicted step time in that layout in milliseconds, by part and in `total`; empty without a measured or
        configured profile.

    refusal: why the switch is refused; "" if it is not refused.

    way_out: what would be possible instead; "" if the switch is not refused.
    """

    layout: Layout
    members: tuple[int, ...] = ()
    bytes_sent: int = 0
    bytes_bound: int = 0
    rank_zero_bytes: int = 0
    peak_memory_bytes: int = 0
    seconds: float = 0.0
    bytes_per_second: float = 0.0
    copies_memory_bytes: int = 0
    step_ms: Mapping[str, float] = field(default_factory=dict)
    refusal: str = ""
    way_out: str = ""
