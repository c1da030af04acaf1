"""Telling the script where it is now: after any change of its world, at one place, whatever the change came from.

Nobody who changes a world calls this. At the end of every boundary, and while a member waits for work, the place that
it has now is held against the one that was told last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class Place:
    """Where a member is. layout, members: of the world that trains. rank: -1 on an idle member. generation: of its
    world, 0 on an idle member."""

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
    """What a member was told last, and what is so now. step: optimizer steps done.

    reason: "switch", or the extension that has asked for it; "rolled back: ..." where a late switch was undone; what
    the coordinator says where members have come or gone.
    """

    before: Place
    after: Place
    step: int
    reason: str


OnChange = Callable[[Change], object]


class Changes:
    """Those of one engine. listeners: the user's."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self.listeners: list[OnChange] = []
        self._told: Place | None = None
        self._formed = 0

    def begin(self) -> None:
        """The engine is made, and the script can ask it where it is."""
        self._told, self._formed = self._present(), PROCESS.membership.formed[0]

    def look(self) -> None:
        """Tell of a change, if there is one. Nothing while the world is being formed anew: what is so then is not yet
        what will be."""
        if self._told is None or PROCESS.membership.is_aborted:
            return
        before, self._told = self._told, self._present()
        formed, self._formed = self._formed, PROCESS.membership.formed[0]
        if before == self._told:
            return
        change = Change(before, self._told, self._engine.global_steps, self._reason(before, formed))
        for listener in self.listeners:
            listener(change)

    def _present(self) -> Place:
        engine = self._engine
        return Place(engine.layout, engine.members, engine.rank, 0 if engine.idle else engine.generation)

    def _reason(self, before: Place, formed: int) -> str:
        """formed: the generation of members when it was told last."""
        event, (now, words) = self._engine.last_switch, PROCESS.membership.formed
        if event is not None and (event.outcome, event.generation) == ("rolled_back", before.generation):
            if now <= formed:  # else members have come or gone since
                return f"rolled back: {event.reason}"
        if now != formed:
            return words
        return (event.cause if event is not None else "") or "switch"
