"""Who keeps whose copies in a world at present: those that work, or idle members, too, once all are linked to theirs.

Those that work are each other's buddies until each has its links to idle ones, where these are to be buddies, and again
as soon as a round with idle ones has failed. So nobody ever waits for an idle member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_dynatrain.engine.buddies.copy import Mark
from ds_dynatrain.engine.buddies.links import Links
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.plan import buddies_of
from ds_dynatrain.report import logger
from ds_dynatrain.transfer import Transport


class Pairing:
    """Of all engines of a process, for the whole job; equal on all that work. engine: the first one; engines: all.

    by_member: member -> those who keep its copies, of whichever engine. idle: who could keep copies besides those that
    work, as far as that was seen. has_idle: whether they do.
    """

    def __init__(self, engine: EngineCore, engines: Callable[[], Sequence[EngineCore]] = tuple) -> None:
        self._engine, self._settings, self._engines = engine, engine.settings.buddies, engines
        self.by_member: dict[int, tuple[int, ...]] = {}
        self.idle: tuple[int, ...] = ()
        self.has_idle = False
        self._is_needed = False
        self._links: tuple[Links, ...] = ()
        """Of each engine: their rounds travel at the same time."""

    # ---- worlds, and who is idle in them -----------------------------------------------------------------------------

    def enter(self, is_needed: bool) -> None:
        """Another world, or other members that do not work in it. is_needed: whether there is anything to copy."""
        self.close()
        self._is_needed, self.has_idle, self.idle = is_needed, False, ()
        self.idle = self._idle_now()
        self._deal(())
        mine = self._dealt(self.idle).get(self._engine.control.member, ())
        keepers = [one for one in mine if one in self.idle]
        self._links = tuple(Links(engine, keepers) for engine in self._engines() or (self._engine,))

    def sees_change(self) -> bool:
        """Whether idle members have come or gone. What waits for one of those that were there ends then."""
        has_changed = self._is_needed and self.idle != self._idle_now()
        if has_changed:
            self.close()
        return has_changed

    def close(self) -> None:
        """Let go of all idle members: nothing waits for them from here on."""
        for links in self._links:
            links.close()

    def _idle_now(self) -> tuple[int, ...]:
        if not self._is_needed:
            return ()
        return tuple(sorted({*self._engine.candidates.members} - {*self._engine.members}))

    # ---- links -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Link to the idle members that this one is to be linked to; cheap to call often."""
        for links in self._links:
            links.look()

    @property
    def is_ready(self) -> bool:
        """Whether this member is linked to those idle ones."""
        return bool(self.idle and self._links) and all(links.are_ready for links in self._links)

    def begin(self, engine: EngineCore, mark: Mark, whole: Mark | None, group: Transport | None) -> Transport:
        """A round of an engine begins: the way to all that take part in it. group: to those that work, if there are
        others."""
        if self.has_idle:
            return next(links for links in self._links if links.engine is engine).begin(mark, whole, group)
        if group is None:
            raise RuntimeError("a member that works alone, without idle ones, has nobody to send copies to")
        return group

    def take_idle(self, has_idle: bool) -> None:
        """Let idle members be buddies, or not; on all that work alike, with no round under way."""
        self.has_idle = has_idle
        self._deal(self.idle if has_idle else ())
        if self._engine.rank == 0:
            logger.info("buddies: idle members %s copies", "keep" if has_idle else "keep no")

    def give_idle_up(self) -> None:
        """A round with them has failed: until members come or go, they keep nothing more."""
        if self._engine.rank == 0:
            logger.warning("buddies: a round with idle members has failed: they keep no copies until others come or go")
        self.close()

    # ---- the arithmetic ----------------------------------------------------------------------------------------------

    def _deal(self, idle: tuple[int, ...]) -> None:
        """Decide who keeps whose copies. idle: those who may, besides those that work."""
        self.by_member, asked = self._dealt(idle) if self._is_needed else {}, self._settings.copies
        there = min(map(len, self.by_member.values()), default=asked)
        if self._engine.rank == 0 and there < asked:
            logger.warning(
                "buddies: %d others keep each copy in this world, and dynatrain.buddies.copies asks for %d; start more "
                "members, or ask for fewer",
                *(there, asked),
            )

    def _dealt(self, idle: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        members, nodes = self._engine.members, self._engine.candidates.nodes
        working, others = ([nodes[member] for member in each] for each in (members, idle))
        found, everybody = buddies_of(working, self._settings.copies, others), (*members, *idle)
        return {everybody[rank]: tuple(everybody[each] for each in buddies) for rank, buddies in enumerate(found)}
