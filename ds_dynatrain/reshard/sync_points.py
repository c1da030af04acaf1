"""Sync points: points between two steps at which members' scripts meet, so that scripts that started late end together
with the others.

All members run one script. A member that joined late, or was idle for some epochs, has run through fewer of them, so it
would start another epoch after the others have left their loops. No timeout can tell this case from a long evaluation,
so members exchange facts. The members that have begun the most epochs, the *leaders*, post each *sync point* that they
reach: an epoch or an evaluation begins, something is saved, or the script has ended. At each of its own sync points, a
late member waits until it knows which one its leader reached next:

- the same one: it takes part, with the leader's arguments;
- another one: it skips its own (an epoch without batches, a save that saves nothing), and its script runs on until it
  reaches the others;
- none, because the leader's script has ended: the late member ends too, as an idle member does.

All members must agree on which of them are late, so at the first sync point of a world each waits until all have posted
how many epochs they have begun. No sync point is posted while no member is late. Without a board (the store with the
members' records), each member follows its own script.
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
"""Longest wait for another member, equal to the timeout of training's collectives. A member that takes longer counts as
stopped."""


class SyncPoints:
    """Points between two steps at which this process meets the others, so that a script that started late stays
    together with them.

    If a process has several engines, the first one represents all of them.

    first: returns the first open engine; None if there is none.
    membership: returns the membership of the process.
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
        """Post how many epochs this script has begun. Called between steps; posts only once in each new world."""
        engine = self._first()
        if engine is None or engine.idle:
            return
        if engine.generation == 1:  # nobody is late in the first world, also after a roll-back to it
            self._mark = self._begun = None
            return
        mark = engine.control, engine.segment
        if mark == self._mark:
            return
        self._mark, self._begun = mark, None
        try:
            engine.control.post(f"epochs/{engine.segment}/{engine.control.member}", self._epochs)
        except td.DistError:
            pass  # the others then treat this member as one of them

    @property
    def late(self) -> tuple[int, ...]:
        """The members whose scripts had begun fewer epochs than others when this world began."""
        begun = self._epochs_begun()
        return tuple(member for member, count in begun.items() if count < max(begun.values()))

    def _epochs_begun(self) -> dict[int, int]:
        """Return, for each member that has posted it in this world, the number of epochs that its script has begun."""
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
        """Begin a pass over a loader. Return the epoch for the user's sampler, or None if the pass must have no batches
        because the other members are elsewhere in the script.

        The epoch is `sampler_epoch` or, on a member whose script started late, that of the other members.

        is_under_way: whether the other members are already in the middle of this pass, so that they do not meet at its
            beginning. This happens with a second engine's loader if a member that joins during a step first fetches
            from the loader during that step.
        """
        agreed = [sampler_epoch] if is_under_way else self.arrive(f"an epoch of {loader!r}", sampler_epoch)
        self._epochs += 1
        return None if agreed is None else int(agreed[0])

    def arrive(self, sync_point: str, *arguments: Any) -> list[Any] | None:
        """Arrive at a sync point (a point between two steps at which scripts meet). Return the arguments for taking
        part, or None if the other members are at another sync point.

        sync_point: a description of the point, such as an epoch of a loader.
        arguments: this member's own arguments, as plain JSON.

        Raises SystemExit(0) if the others' scripts have ended, SystemExit(1) if they ended with an error, and
        MemberMissing if the member that is furthest ahead posts nothing in time.
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
        leader = [one for one in engine.members if begun[one] == most][-1]  # rank 0 may make calls alone
        found = wait(lambda: engine.control.read(f"{key}/{leader}"), lambda: {leader})
        if found is not None and found[0] != sync_point:
            logger.info("member %d came late: not %s here, the others are at %s", mine, sync_point, found[0])
            return None
        self._count += 1
        return arguments if found is None else list(found[1])

    def _epochs_of_all(self) -> dict[int, int] | None:
        """Return the number of epochs that each member's script has begun; None until all members have posted
        theirs."""
        self._epochs_begun()
        return self._begun

    def _key(self, engine: EngineCore) -> str:
        """Return the key under which the next sync point is posted.

        The numbers in the keys start again after each optimizer step, so a wrong count lasts for one step at most.
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
    """Call `look` repeatedly, and return its first result that is not None.

    Returns None if the world can no longer be used; the next boundary handles that. Raises SystemExit(0) if the scripts
    of the missing members have ended, and MemberMissing after `LONGEST_SECONDS`.

    missing: returns the members for which this call waits.
    """
    begin, pause, is_said, has_ended = time.monotonic(), POLL_SECONDS, False, False
    watch, mine = membership.watch(engine.control), engine.control.member
    while (found := look()) is None:
        if has_ended:  # it had ended before this look, as a script may post and then end
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
