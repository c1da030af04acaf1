"""Sync points: where the members' scripts are between two steps, and how a late one ends where the others do.

All members run one script. One that came late, or was idle for some epochs, has gone through fewer of them: it still
asks for an epoch when the others have left their loops. No time-out can tell that from a long evaluation; facts can.
The members that have gone through the most epochs, the *leaders*, post at which *sync point* they arrive: an epoch or
an evaluation begins, something is saved, their script has ended. At each sync point of its own a late member waits
until it knows which one its leader came to next:

- the same one: it takes part, with the leader's arguments;
- another one: its own is skipped (an epoch without batches, a save that saves nothing), and its script runs on until
  it is where the others are;
- none, because the leader's script has ended: the late member ends too, as an idle member does.

All members must agree on which ones are late: at the first sync point of a world each waits until all have said how
many epochs they have begun. No sync point is posted while no member is late. Without a board each member goes on by its
own script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import torch.distributed as td

from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.membership import Membership

T = TypeVar("T")
POLL_SECONDS = 0.002
LONGEST_POLL_SECONDS = 0.05
GROWTH = 1.1
SAID_AFTER_SECONDS = 10.0
LONGEST_SECONDS = 1800.0
"""Longest wait for another member, as long as collectives of training wait: a member that is later has stopped."""


class SyncPoints:
    """The points between two steps at which the scripts of a process meet those of others.

    If a process has several engines, the first one speaks for all of them.
    """

    def __init__(self, first: Callable[[], EngineCore | None], membership: Callable[[], Membership]) -> None:
        self._first, self._membership = first, membership
        self._epochs = 0
        self._mark: tuple[object, str] | None = None
        self._begun: dict[int, int] | None = None
        self._place = ("", -1)
        self._count = 0

    # ---- how far the members are -------------------------------------------------------------------------------------

    def note(self) -> None:
        """Say how many epochs this script has begun. Called at every boundary; posts once in each new world."""
        engine = self._first()
        if engine is None or engine.idle:
            return
        if engine.generation == 1:  # no member comes late to the first world, nor when a switch goes back to it
            self._mark = self._begun = None
            return
        mark = engine.control, engine.segment
        if mark == self._mark:
            return
        self._mark, self._begun = mark, None
        try:
            engine.control.post(f"epochs/{engine.segment}/{engine.control.member}", self._epochs)
        except td.DistError:
            pass  # the others take it for one of them

    @property
    def late(self) -> tuple[int, ...]:
        """Members that have begun fewer epochs than others, as they said when this world began."""
        begun = self._epochs_begun()
        return tuple(member for member, count in begun.items() if count < max(begun.values()))

    def _epochs_begun(self) -> dict[int, int]:
        """Return the number of epochs of each member that has told it in this world."""
        engine = self._first()
        if engine is None or self._mark is None:
            return {}
        if self._begun is not None:
            return self._begun
        said = {one: engine.control.read(f"epochs/{engine.segment}/{one}") for one in engine.members}
        begun = {one: int(count) for one, count in said.items() if count is not None}
        if len(begun) == len(said):
            self._begun = begun
        return begun

    # ---- sync points -------------------------------------------------------------------------------------------------

    def begin_epoch(self, loader: str, is_under_way: bool, sampler_epoch: int) -> int | None:
        """Begin a pass over a loader; return None if it has no batches here, since the others are elsewhere.

        Returns the epoch to set the user's sampler to: `sampler_epoch`, or on a member that came late, the others'.
        is_under_way: the others are in this very pass, which is no sync point then. This happens with another engine's
        loader, which a member that came in the middle asks first in the middle of a step.
        """
        agreed = [sampler_epoch] if is_under_way else self.arrive(f"an epoch of {loader!r}", sampler_epoch)
        self._epochs += 1
        return None if agreed is None else int(agreed[0])

    def arrive(self, sync_point: str, *arguments: Any) -> list[Any] | None:
        """Arrive at a sync point; return the arguments (plain JSON) to take part with, None if the others are
        elsewhere.

        Raises SystemExit(0) if their scripts have ended, SystemExit(1) if by an error, MemberMissing for a silent
        leader.
        """
        engine = self._first()
        if engine is None or engine.idle or engine.is_discarded or len(engine.members) == 1:
            return list(arguments)
        try:
            return self._arrive(engine, sync_point, list(arguments))
        except td.DistError:
            self._count += 1
            return list(arguments)

    def _arrive(self, engine: EngineCore, sync_point: str, arguments: list[Any]) -> list[Any] | None:
        self.note()
        if self._mark is None:
            return arguments
        wait = partial(_await, engine, self._membership(), sync_point)
        begun = wait(self._epochs_of_all, lambda: {*engine.members} - self._epochs_begun().keys())
        mine = engine.control.member
        if begun is None or len({*begun.values()}) == 1:
            return arguments
        key, most = self._key(engine), max(begun.values())
        if begun[mine] == most:
            engine.control.post(f"{key}/{mine}", [sync_point, arguments])
            self._count += 1
            return arguments
        leader = [one for one in engine.members if begun[one] == most][-1]  # rank 0 may call alone
        found = wait(lambda: engine.control.read(f"{key}/{leader}"), lambda: {leader})
        if found is not None and found[0] != sync_point:
            logger.info("member %d came late: not %s here, the others are at %s", mine, sync_point, found[0])
            return None
        self._count += 1
        return arguments if found is None else list(found[1])

    def _epochs_of_all(self) -> dict[int, int] | None:
        """Return the number of epochs of each member, once all have told it; None before."""
        self._epochs_begun()
        return self._begun

    def _key(self, engine: EngineCore) -> str:
        """Return the key of the next sync point. They are counted between two steps, so no member stays astray for
        longer.
        """
        place = engine.segment, engine.global_steps
        if place != self._place:
            self._place, self._count = place, 0
        return f"sync_point/{place[0]}/{place[1]}/{self._count}"


def _await(
    engine: EngineCore,
    membership: Membership,
    sync_point: str,
    look: Callable[[], T | None],
    missing: Callable[[], Collection[int]],
) -> T | None:
    """Return what `look` finds in the end, or None if the world is aborted; the next boundary handles that.

    missing: the members that it waits for. Raises SystemExit(0) if their scripts have ended, MemberMissing after
    `LONGEST_SECONDS`.
    """
    begin, pause, is_said, has_ended = time.monotonic(), POLL_SECONDS, False, False
    watch, mine = membership.watch(engine.control), engine.control.member
    while (found := look()) is None:
        if has_ended:  # had ended before this look: a script may post and then end
            logger.info("member %d came late, and the scripts of the others have ended: it ends, too", mine)
            raise SystemExit(0)
        has_ended = watch.look(missing())
        if membership.is_aborted:
            return None
        waited = time.monotonic() - begin
        if waited > LONGEST_SECONDS:
            raise MemberMissing(f"member {mine} at {sync_point}: no word of where others are", missing(), waited)
        if not is_said and waited > SAID_AFTER_SECONDS:
            is_said = True
            logger.warning(
                "member %d has waited %g s at %s for members %s to say where they are; let all scripts make the same "
                "calls",
                *(mine, SAID_AFTER_SECONDS, sync_point, sorted(missing())),
            )
        time.sleep(pause)
        pause = min(pause * GROWTH, LONGEST_POLL_SECONDS)
    return found
