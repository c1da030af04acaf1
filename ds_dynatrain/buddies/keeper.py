"""One engine's copies in its present world: with whom they are, and the round that is on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial

from ds_dynatrain.adapters.device import start_thread
from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.adapters.world import World
from ds_dynatrain.buddies.placement import wards_of
from ds_dynatrain.buddies.shipping import Round, Ward
from ds_dynatrain.buddies.taking import Taken, take
from ds_dynatrain.engine.copies.kept import Kept
from ds_dynatrain.engine.copies.whole import Mark
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import DynatrainError, WorldChanged
from ds_dynatrain.plan import has_single_holders
from ds_dynatrain.report import logger
from ds_dynatrain.transfer import GroupTransport

GROUP = "buddies"
"""The kind of the group of all ranks over which copies go, from a thread beside training."""


class Keeper:
    """What takes and sends the copies of one engine, for the whole job.

    kept: the copies that this process has. world: in which they are taken. buddies: of each rank in it; none where
    nothing is copied. take_seconds, ship_seconds, sent_bytes: of the last copy.
    """

    def __init__(self, engine: EngineCore, kept: Kept) -> None:
        self.engine, self.kept = engine, kept
        self.world: World | None = None
        self.buddies: tuple[tuple[int, ...], ...] = ()
        self.take_seconds, self.ship_seconds, self.sent_bytes = 0.0, 0.0, 0
        self._thread: threading.Thread | None = None
        self._last_error = ""

    @property
    def has_single_holders(self) -> bool:
        """Whether this member's death could take elements away."""
        return has_single_holders(self.engine.vps, self.engine.layout)

    def enter(self, buddies: Mapping[int, tuple[int, ...]]) -> None:
        """Begin with the present world of the engine. buddies: member -> those who keep its copies."""
        self.settle()
        self.world, members = self.engine.world, self.engine.members
        self.buddies = tuple(tuple(map(members.index, buddies[one])) for one in members) if buddies else ()

    def settle(self) -> None:
        """Wait until no round is under way in the world's group, for the usual time-out."""
        if self._thread is not None:
            self._thread.join(self.engine.settings.timeout_seconds)
            self._thread = None

    def begin(self, mark: Mark, world: World) -> Round:
        """Take a copy, and send it beside training. mark: the present moment.

        What only others have alone is copied whole here: all engines go back together.
        """
        self.settle()
        engine, begin = self.engine, time.perf_counter()
        rank, members, wards = engine.rank, engine.members, wards_of(self.buddies, engine.rank)
        own, rooms = self.kept.begin(mark, len(wards))
        taken: Taken | None = None
        try:
            with PROCESS.turn(engine):
                taken = take(engine, own, mark, everything=not self.has_single_holders)
            self.kept.frozen, self.kept.frozen_of = taken.frozen, (engine.layout, rank)
            self._last_error = ""
        except (DynatrainError, RuntimeError, MemoryError, OSError) as error:  # torch has no memory: RuntimeError
            if str(error) != self._last_error:
                logger.error(
                    "buddies: member %d has no copy of step %d (%s); a death costs what follows the last whole copies",
                    *(members[rank], mark.step, error),
                )
            self._last_error = str(error)
        kept_here = [Ward(members[ward], ward, room) for ward, room in zip(wards, rooms, strict=True)]
        stop = None if world.status is None else partial(_stop_if_lost, world.status)
        way, buddies = GroupTransport(world.group(GROUP), members, stop), [members[each] for each in self.buddies[rank]]
        found = Round(mark, taken, buddies, kept_here, way, self.kept)
        self._thread = start_thread(found.run, "dynatrain-buddies")
        self.take_seconds = time.perf_counter() - begin
        return found

    def see(self, found: Round, is_whole: bool) -> None:
        """Note a round that is over on all members. is_whole: the copies of all engines are where they belong."""
        self.sent_bytes, self.ship_seconds = found.sent_bytes, found.seconds
        if is_whole:
            self.kept.is_whole(found.mark)


def _stop_if_lost(status: GroupStatus) -> None:
    if status.is_lost:
        raise WorldChanged("a member of this world is gone, or a collective of it has failed")
