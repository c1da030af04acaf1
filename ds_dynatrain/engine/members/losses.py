"""Whether an error in a call means that the world is lost, so that a new one has to be formed."""

from __future__ import annotations

import re
import time

from ds_dynatrain.adapters.watched import GroupStatus, is_lost_peer
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.restoring import NOTICE_SECONDS, POLL_SECONDS
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import ElasticError, WorldChanged
from ds_dynatrain.report import logger

MOST_TRIES = 3
"""Attempts at one step in one world in which nobody dies; after these the script or the network is at fault."""
GLOO_SOURCE = re.compile(r"\[\S+\.(?:cc|h):\d+\] ")
"""The line of gloo's source that its errors begin with."""


class Losses:
    """Of the worlds of this process's engines."""

    def __init__(self, elastic: Elastic) -> None:
        self._elastic = elastic
        self._failed: tuple[tuple[tuple[int, ...], tuple[str, ...]], int] = (((), ()), 0)

    @property
    def failure(self) -> RuntimeError | None:
        """How a collective of the present worlds has failed, if one has: of the library's, or of the script's own."""
        return next((status.failure for status in self.statuses if status.failure is not None), None)

    @property
    def statuses(self) -> list[GroupStatus]:
        """Of the present worlds."""
        worlds = [engine.world for engine in PROCESS.engines if engine.world is not None]
        return [world.status for world in worlds if world.status is not None]

    def check(self) -> None:
        """WorldChanged if a collective has failed already, of whosoever's, or been aborted, which is not seen of it."""
        failure = self.failure
        if failure is not None:
            raise WorldChanged("a collective of this world has failed before") from failure
        for status in self.statuses:
            if status.gate.communicators:
                status.gate.check()

    def close_worlds(self, is_closed: bool) -> None:
        """Until the boundary there are no collectives: where the others are in their scripts, nobody knows."""
        for status in self.statuses:
            status.is_closed = is_closed

    def explains(self, error: RuntimeError) -> bool:
        """Whether an error came of the world's loss; then all know of that by now. Other errors are the user's.

        ElasticError if this step has failed for the third time among the same members.
        """
        elastic = self._elastic
        if not PROCESS.engines or PROCESS.engines[0].idle:
            return False
        if not elastic.is_aborted:
            if not (isinstance(error, WorldChanged) or is_lost_peer(error)):
                return False
            self._await_failure()
        self._count(() if elastic.world is None else elastic.world.members, error)
        reason = GLOO_SOURCE.sub("", str(error).partition("\n")[0]).partition(". ")[0]
        logger.warning("the world is aborted (%s); it is formed anew at the loader's next batch", reason)
        return True

    def _await_failure(self) -> None:
        """Until a failure is published; if the coordinator knows of none, it is told of one."""
        end, has_told = time.monotonic() + NOTICE_SECONDS, False
        while not self._elastic.is_aborted:
            if time.monotonic() > end and not has_told:
                has_told = True
                self._elastic.breach()
            if self._elastic.member.is_finished:
                raise SystemExit(0)
            time.sleep(POLL_SECONDS)

    def _count(self, members: tuple[str, ...], error: RuntimeError) -> None:
        """A step that always fails would be tried for ever."""
        now = tuple(engine.global_steps for engine in PROCESS.engines), members
        tries = 1 + (self._failed[1] if self._failed[0] == now else 0)
        self._failed = now, tries
        if tries >= MOST_TRIES:
            raise ElasticError(
                f"the step after {now[0][0]} was tried {tries} times by the same {len(members)} members, and each "
                f"time a collective of it failed although none of them had died; the last said: {error}; look for a "
                "collective that not all ranks call alike, or for a network that fails"
            ) from error
