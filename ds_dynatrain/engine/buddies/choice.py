"""Whether buddies replay steps in a world: what is asked for and can be, what a trial costs, what comparing finds.

All members choose alike: by the settings, by their world, and by numbers that are reduced over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch
import torch.distributed as td

from ds_dynatrain.adapters.replaying import why_not
from ds_dynatrain.engine.buddies.kept import Kept
from ds_dynatrain.engine.buddies.replay import Replay
from ds_dynatrain.engine.buddies.replica import Replica
from ds_dynatrain.engine.buddies.taking import mark_of
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.groups import BUDDIES
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.plan import wards_of
from ds_dynatrain.report import logger
from ds_dynatrain.support import usage
from ds_dynatrain.transfer import GroupTransport

MOST_OF_A_STEP = 0.02
"""In mode "auto": what a step may wait for copies, as a share of it."""
TRIAL_STEPS = 8
"""So many replayed steps tell what one costs."""
REPLAYED = ("data", "pipe")
"""Axes of layouts in which steps are replayed: the norm of gradients is one number on all ranks."""
BESIDE_ANOTHER = "of several engines in a process each would be at its own last step, which no boundary has in common"
MOST_DIFFERENCES = 3
"""So often a replica may differ from its ward; from then on copies are taken."""


class Choice:
    """Of one engine, for the whole job.

    is_on: steps are replayed in this world, once the copies of a moment are whole. replay: since then. every: a copy is
    taken after so many steps where they are not.
    """

    def __init__(self, engine: EngineCore, kept: Kept) -> None:
        self._engine, self._settings, self._kept = engine, engine.settings.buddies, kept
        self.is_on = False
        self.replay: Replay | None = None
        self.every = self._settings.every_steps
        self._differences = 0
        self._may_try = False
        """In mode "auto": whether steps could be replayed in this world, and have not been."""
        self._trial: list[float] | None = None
        """What the steps of a trial have waited; None where there is none."""
        self._copy_seconds, self._seldom = 0.0, 1

    def check(self) -> None:
        """UnsupportedError if steps are to be replayed and cannot be, in the first world."""
        if self._settings.mode == "replay" and (why := why_not_replayed(self._engine)):
            raise usage("buddies that replay steps").error(why)

    def enter(self, has_buddies: bool) -> None:
        """Another world. Who has just come knows of no longer interval of the others', and of no trial."""
        mode, is_open = self._settings.mode, has_buddies and self._differences < MOST_DIFFERENCES
        self.replay, self.every = None, self._settings.every_steps
        self.is_on, self._may_try, self._trial = mode == "replay" and is_open, mode == "auto" and is_open, None
        if (self.is_on or self._may_try) and (why := why_not_replayed(self._engine)):
            self.is_on = self._may_try = False
            if mode == "replay" and self._engine.rank == 0:
                logger.warning(
                    'buddies: dynatrain.buddies.mode is "replay", and in this world copies are taken instead (%s); '
                    '"copy" is '
                    "the same without this warning",
                    why,
                )

    # ---- steps -------------------------------------------------------------------------------------------------------

    def watched_step(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        replay = self.replay
        if replay is None or replay.mark.registered != len(self._engine.registered):
            return nullcontext()
        return replay.watched_step()

    def begin(self, buddies: Sequence[Sequence[int]]) -> None:
        """From the copies of this moment, which all have whole. buddies: of each rank, one."""
        engine, world, mark = self._engine, self._engine.world, mark_of(self._engine)
        if world is None or world.status is None:
            return
        members, rank = engine.members, engine.rank
        wards = [(ward, self._kept.find(mark, ward)) for ward in wards_of(buddies, rank)]
        replicas = [Replica(engine, copy, members[ward]) for ward, copy in wards if copy is not None]
        ways = GroupTransport(world.group(BUDDIES), members), world.default, world.status
        self.replay = Replay(engine, mark, members[buddies[rank][0]], replicas, *ways)
        self._kept.hand_over(self.replay.copies)
        if rank == 0:
            logger.info("buddies: they make each other's steps after step %d: a death loses none", mark.step)

    def goes_on(self) -> bool:
        """At a boundary, whether what is replayed is right; if not, it has ended."""
        replay = self.replay
        if replay is None:
            return False
        if not replay.is_sound:
            self.end()
        elif not replay.mark.step % self._settings.verify_every_steps and not replay.verify():
            self._differ()
        else:
            replay.note()
            self._judge(replay.seconds)
        return self.replay is not None or not self.is_on

    def end(self) -> None:
        """No step is replayed from here on; what there is counts as it is now, until other copies are whole."""
        if self.replay is not None:
            self.replay.put_aside()
            self.replay = None

    def _differ(self) -> None:
        self._kept.forget()
        self.replay, self._differences = None, self._differences + 1
        if self._differences < MOST_DIFFERENCES:
            return
        self.is_on = False
        if self._engine.rank == 0:
            logger.error(
                "buddies: by step %d replicas have differed %d times from what they are of; from here on copies are "
                'taken, and no steps are replayed, as with "copy" for dynatrain.buddies.mode',
                self._engine.global_steps,
                self._differences,
            )

    # ---- mode "auto" -------------------------------------------------------------------------------------------------

    def weigh(self, share: float, copy_seconds: float) -> None:
        """share: of a step that it waits for a copy, where that is most; where it is too much, it is tried whether
        replayed steps wait less. copy_seconds: what it is on this member.
        """
        if self._settings.mode != "auto" or self.is_on:
            return
        self._seldom = max(self._settings.every_steps, math.ceil(share / MOST_OF_A_STEP))
        if self._may_try and self._seldom > self._settings.every_steps:
            self.is_on, self._may_try, self._trial, self._copy_seconds = True, False, [], copy_seconds
        else:
            self.every = self._seldom

    def _judge(self, seconds: float) -> None:
        """A step of a trial; at its end, from the numbers of the member that waited most."""
        if self._trial is None or self._engine.world is None:
            return
        self._trial.append(seconds)
        if len(self._trial) < TRIAL_STEPS:
            return
        most = torch.tensor([median(self._trial), self._copy_seconds], dtype=torch.float64)
        td.all_reduce(most, td.ReduceOp.MAX, group=self._engine.world.default)
        self._trial, (replayed, copied) = None, (1e3 * float(value) for value in most)
        what = "steps are replayed"
        if replayed >= copied:
            self.end()
            self.is_on, self.every = False, self._seldom
            what = f"a copy is taken after every {self.every} steps"
        if self._engine.rank == 0:
            logger.info(
                "buddies: a step waits %.1f ms where it is replayed, and %.1f ms for a copy: %s", replayed, copied, what
            )


def why_not_replayed(engine: EngineCore) -> str:
    """Why buddies cannot make each other's steps in the present world; nothing if they can."""
    layout = engine.layout
    wide = [f"{axis}={size}" for axis, size in layout.axes().items() if axis not in REPLAYED and size > 1]
    if (copies := engine.settings.buddies.copies) > 1:
        return f"one buddy alone makes the steps of a member, and {copies} are asked for"
    if PROCESS.is_shared:
        return BESIDE_ANOTHER
    if layout.zero_stage == 0:
        return "at ZeRO stage 0 nobody has a part of the state that others could step"
    if wide:
        return f"in a layout with {', '.join(wide)} steps are not replayed yet"
    return why_not(engine.host.optimizer, engine.host.basic_optimizer)
