"""Losses of a world of this process: failed collectives, and loops that never reach a boundary of the first engine.

A boundary is the point between two optimizer steps.
"""

from __future__ import annotations

import re
import time
from collections import Counter

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, is_lost_peer
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.engine.restoring import NOTICE_SECONDS, POLL_SECONDS
from ds_dynatrain.errors import ElasticError, WorldChanged
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.process import PROCESS

MOST_TRIES = 3
"""Most attempts at one step by the same members if none of them has died. After that many, the script or the network is
at fault."""
GLOO_SOURCE = re.compile(r"\[\S+\.(?:cc|h):\d+\] ")
"""Location in gloo's source code, with which gloo's error messages begin."""
SPARE = 1000
"""Number of discarded batches that a loop may take in one round, in addition to twice the maximum of any earlier
round."""


class FallibleMembership(Elastic):
    """Membership that notices failed collectives in the worlds in which this process's engines train."""

    _failed: tuple[tuple[tuple[int, ...], tuple[str, ...]], int] = (((), ()), 0)

    @property
    def failure(self) -> RuntimeError | None:
        """Error of a failed collective of the current worlds, whether the script or an engine called it; None if none
        has failed."""
        return next((status.failure for status in self.statuses if status.failure is not None), None)

    @property
    def statuses(self) -> list[GroupStatus]:
        """Statuses of the process groups of all current worlds."""
        worlds = [engine.world for engine in PROCESS.engines if engine.world is not None]
        return [world.status for world in worlds if world.status is not None]

    def check_losses(self) -> None:
        """Raise WorldChanged if an earlier collective has failed or was aborted. An abort raises no error by itself."""
        failure = self.failure
        if failure is not None:
            raise WorldChanged("a collective of this world has failed before") from failure
        for status in self.statuses:
            if status.gate.communicators:
                status.gate.check()

    def close_worlds(self, is_closed: bool) -> None:
        """Refuse collectives until the next boundary, or allow them again.

        Collectives are refused while it is unknown where the other members are in their scripts.
        """
        for status in self.statuses:
            status.is_closed = is_closed

    def explains(self, error: RuntimeError) -> bool:
        """Return whether the loss of the world caused an error. If so, returns once the loss is known to all members.

        Any other error comes from the user's script. Raises ElasticError if this step has failed for the third time
        among the same members.
        """
        if not PROCESS.engines or PROCESS.engines[0].idle:
            return False
        if not self.is_aborted:
            if not (isinstance(error, WorldChanged) or is_lost_peer(error)):
                return False
            # wait until a failure is published, and report one if the coordinator does not notice any by itself
            end, has_told = time.monotonic() + NOTICE_SECONDS, False
            while not self.is_aborted:
                if time.monotonic() > end and not has_told:
                    has_told = True
                    self.breach()
                if self.member.is_finished:
                    raise SystemExit(0)
                time.sleep(POLL_SECONDS)
        self._count(() if self.world is None else self.world.members, error)
        reason = GLOO_SOURCE.sub("", str(error).partition("\n")[0]).partition(". ")[0]
        logger.warning("the world is aborted (%s); it is formed anew at the loader's next batch", reason)
        return True

    def _count(self, members: tuple[str, ...], error: RuntimeError) -> None:
        """Count a failed attempt at this step. Raises ElasticError after `MOST_TRIES` attempts by the same members."""
        now = tuple(engine.global_steps for engine in PROCESS.engines), members
        tries = 1 + (self._failed[1] if self._failed[0] == now else 0)
        self._failed = now, tries
        if tries >= MOST_TRIES:
            raise ElasticError(
                f"the step after {now[0][0]} was tried {tries} times by the same {len(members)} members, and each "
                f"time a collective of it failed although none of them had died; the last said: {error}; look for a "
                "collective that not all ranks call alike, or for a network that fails"
            ) from error


class Rounds:
    """Count of the batches that a loop takes from other engines between two global batches of the first engine.

    After a death all of these batches are discarded until the first engine begins its next batch. A loop over a fixed
    number of batches gets that far. A loop over a number of another engine's steps never does, because a discarded
    batch takes no step; in this case an error tells the user. Engines are identified by their numbers.
    """

    def __init__(self) -> None:
        self._now: Counter[int] = Counter()
        self._most: Counter[int] = Counter()

    def begin(self) -> None:
        """Record that the first engine is at a boundary, which begins a new round."""
        self._most |= self._now
        self._now.clear()

    def stay(self, engine: int, is_discarded: bool) -> None:
        """Record that an engine other than the first is at a boundary.

        is_discarded: whether nothing is trained before the first engine's next batch.

        Raises WorldChanged if nothing is trained and the loop has taken far more batches than in any earlier round.
        """
        self._now[engine] += 1
        if is_discarded and self._now[engine] > 2 * self._most[engine] + SPARE:
            raise WorldChanged(
                f"the world was aborted and formed anew; since then the script has asked engine {engine} for "
                f"{self._now[engine]} batches, which are discarded, and never came to the next batch of the engine "
                f"that was made first (before, it did after {self._most[engine]} at most): a loop over another engine "
                "has to end after a number of batches, not of steps"
            )
