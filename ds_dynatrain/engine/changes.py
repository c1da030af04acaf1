"""Changes of this member's place (layout, members, rank and generation), and how they are reported to the script.

Code that changes a world does not report the change. Instead, at the end of every boundary and while a member waits for
work, its place is compared with the one that was last reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class Place:
    """Place of a member in the job.

    layout: the layout of the current world, also on an idle member.
    members: the member at each rank of the current world, also on an idle member.
    rank: this member's rank; -1 on an idle member.
    generation: the number of this member's world; 0 on an idle member.
    """

    layout: Layout
    members: tuple[int, ...]
    rank: int
    generation: int

    @property
    def idle(self) -> bool:
        """Whether this member waits for work."""
        return self.rank < 0


@dataclass(frozen=True)
class Change:
    """A change of a member's place in the job, since the last change that was reported to that member.

    before: the place that was last reported.

    after: the current place.

    step: the number of optimizer steps done.

    reason: "switch", or the name of the extension that requested the switch; "rolled back: ..." if a late switch was
    undone; the coordinator's reason if members have come or gone.
    """

    before: Place
    after: Place
    step: int
    reason: str


OnChange = Callable[[Change], object]


@dataclass(eq=False)
class PlacedEngine(EngineCore):
    """An engine that reports changes of its place to the user's functions."""

    change_listeners: list[OnChange] = field(default_factory=list)
    _told: Place | None = None
    _formed: int = 0

    def begin_places(self) -> None:
        """Record the first place. Called once the engine is made and the script can ask for its place."""
        self._told, self._formed = self._present(), PROCESS.membership.formed[0]

    def tell_of_change(self) -> None:
        """Report a change to the listeners, if there is one.

        Does nothing while a new world is being formed, because the place is not final yet.
        """
        if self._told is None or PROCESS.membership.is_aborted:
            return
        before, self._told = self._told, self._present()
        formed, (self._formed, words) = self._formed, PROCESS.membership.formed
        if before == self._told:
            return
        event, reason = self.last_switch, words
        if self._formed == formed:  # no members have come or gone since the last place
            reason = (event.cause if event is not None else "") or "switch"
        if event is not None and (event.outcome, event.generation) == ("rolled_back", before.generation):
            reason = f"rolled back: {event.reason}" if self._formed <= formed else reason
        change = Change(before, self._told, self.global_steps, reason)
        for listener in self.change_listeners:
            listener(change)

    def _present(self) -> Place:
        return Place(self.layout, self.members, self.rank, 0 if self.idle else self.generation)
