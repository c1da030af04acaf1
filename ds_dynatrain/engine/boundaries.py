"""Boundaries of one process in a job whose members come and go, and recovery after a lost world.

A boundary is the point between two optimizer steps. The first engine of a process represents all of its engines:
members come and go at that engine's boundaries, while no other engine is inside a global batch, and all engines change
in one transaction.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import suppress

import torch.distributed as td

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, is_lost_peer
from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.elastic.messages import Protected
from ds_dynatrain.engine.driver import Driver
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.engine.parts import EngineParts, open_engines
from ds_dynatrain.engine.restoring import NOTICE_SECONDS, POLL_SECONDS
from ds_dynatrain.errors import ConfigError, ElasticError, WorldChanged
from ds_dynatrain.extension import BACKUP_KEY, backups_of
from ds_dynatrain.membership.liveness import Wait, Watch
from ds_dynatrain.membership.tally import Clock
from ds_dynatrain.plan import needs_copies
from ds_dynatrain.report import logger
from ds_dynatrain.reshard.process import PROCESS

WAIT_SECONDS = 0.02
"""Polling interval of a member that waits for work or for other members."""

MEET_SECONDS = 1.0
"""Time that a member waits at a boundary for the others if all were asked to leave, before it trains on."""
MOST_TRIES = 3
"""Most attempts at one step by the same members if none of them has died. After that many, the script or the network is
at fault."""
GLOO_SOURCE = re.compile(r"\[\S+\.(?:cc|h):\d+\] ")
"""Location in gloo's source code, with which gloo's error messages begin."""
SPARE = 1000
"""Number of discarded batches that a loop may take in one round, in addition to twice the maximum of any earlier
round."""


class Boundaries:
    """Boundaries of one process's engines, at which they switch, wait for work, or form a new world."""

    def __init__(self, elastic: Elastic) -> None:
        self.elastic = elastic
        self.driver = Driver(elastic, self._leave)
        self.losses = Losses(elastic)
        self._clock = Clock()
        self._rounds = Rounds()
        self._place = ""

    @property
    def engines(self) -> list[EngineParts]:
        """Open engines of the process, in the order in which they were made."""
        return open_engines()

    @property
    def first(self) -> EngineParts:
        """The engine that was made first. It represents all engines of the process."""
        return self.engines[0]

    def remove(self) -> None:
        """Abandon a change that is under way. Called when an engine ends, at the same point of all members' scripts."""
        if len(self.engines) > 1:
            self.driver.forget()

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineParts, place: str) -> str:
        """Do everything that is due at a boundary; see `Membership.at_boundary`.

        Raises SystemExit(0) on a member that leaves, or that was waiting for work when the job ended.
        """
        if engine is not self.first:
            self._at_boundary_of_another(engine, place)
            return engine.window_in_words
        self._place = place
        self._clock.arrive(self.first.global_steps)
        self._rounds.begin()
        self.losses.close_worlds(False)
        self.see_failure()
        self._form_anew_if_aborted()
        for other in self.engines[1:]:
            if other.is_discarded:  # its batches since the abort are trained again
                with other.turn():
                    other.discard_window()
                other.is_discarded = False
        obstacle = "" if self.first.idle else self.first.window_in_words or self._busy_others()
        if not self.first.idle and not obstacle:
            self._work()
        while self.first.idle:
            self._wait_for_work()
            self._clock.skip()
            self.first.settle_state()
            self._form_anew_if_aborted()  # a member may have died while this one received its part of the state
            if self._is_paused:
                self._work()
        self._tell()
        return obstacle

    def _tell(self) -> None:
        """Report this member's step, layout and figures to the coordinator, at the end of a boundary."""
        first, last = self.first, self.first.last_switch
        self._clock.depart(first.global_steps, int(first.deepspeed.global_samples))
        pause_ms = 0.0 if last is None else last.pause_ms
        kept: Protected = max((each.protects() for each in first.extensions), default="")
        if not kept and not first.idle and any(map(_loses_by_a_death, self.engines)):
            kept = "no"
        saved = sum(each.saved_member_seconds() for each in first.extensions)
        tally = self._clock.tally.model_copy(update={"saved_member_seconds": saved})
        self.elastic.member.progress(first.global_steps, str(first.layout), pause_ms, kept, tally)

    def _at_boundary_of_another(self, engine: EngineParts, place: str) -> None:
        """Take part in a requested switch, at a boundary of an engine other than the first.

        Raises ConfigError if the first engine has not reached a boundary yet, because newcomers would wait at this one.
        Raises WorldChanged if the script reaches this boundary again and again without reaching one of the first
        engine.
        """
        if not self.first.has_stood:
            raise ConfigError(
                f"members come and go between two global batches of the engine that was made first, and the script "
                f"asks engine {engine.job.number} for a batch ({place!r}) before that one: make this engine first, or "
                "ask that one first"
            )
        self.see_failure()
        self._form_anew_if_aborted()
        self._rounds.stay(engine.job.number, self.first.is_discarded)
        if not (self.first.is_discarded or engine.idle or engine.has_open_window):
            self.driver.advance(engine, place)

    def _busy_others(self) -> str:
        """Return a description of the other engine that is inside a global batch; "" if none is.

        The result is the same on all members, because they run the same script.
        """
        busy = [one for one in self.engines[1:] if one.has_open_window]
        if not busy:
            return ""
        return (
            f"engine {busy[0].job.number} is in a global batch whenever the first engine begins one: members can come "
            "and go only where none is"
        )

    def _work(self) -> None:
        """Do everything that is due on a working member.

        If the job has fewer than MIN nodes, this saves the state at once, because the last nodes may disappear without
        notice too, and waits for more nodes. If that takes too long, it ends the process.
        """
        begin, seconds, standing = time.monotonic(), self.elastic.wait_seconds, ""
        while not self.first.idle:
            self._save(is_due=True)
            waits = self._all_leave and time.monotonic() - begin < MEET_SECONDS
            self._advance(has_waited=not waits)
            self._form_anew_if_aborted()
            if self.first.awaits_late:  # the switch is decided before the next optimizer step
                return
            for extension in () if self.first.idle else self.first.extensions:
                extension.at_boundary()
            meets_at = self.driver.machine.meets_at
            if waits and (meets_at is None or meets_at <= self.first.global_steps):
                time.sleep(WAIT_SECONDS)
                continue
            if self.first.idle or not self._is_paused:
                return
            self.driver.say_once(
                f"fewer nodes than MIN: training waits for others, with its state, for {seconds:g} s; start more nodes"
            )
            if standing != self.first.segment:  # all members of a world save once in it
                standing = self.first.segment
                self._save()
            if time.monotonic() - begin > seconds:
                self._save()
                logger.error(
                    "fewer nodes than MIN for %g s: this process ends with code %d; start more nodes, or give torchrun "
                    "--nnodes=MIN:MAX a smaller MIN",
                    *(seconds, Ending.TOO_FEW),
                )
                raise SystemExit(int(Ending.TOO_FEW))
            time.sleep(WAIT_SECONDS)

    def _wait_for_work(self) -> None:
        """Wait until this idle member is given work. Raises SystemExit(0) if the job has ended or the member must
        leave.
        """
        for engine in self.engines:
            engine.close_loaders()  # their processes must not outlive the world that they fetched for
        watch = Watch(self.first.control, by_hearts=False)
        with self._long_wait() as wait:
            while self.first.idle:
                if self.driver.machine.world is None:  # as long as there is no change, this process waits for no member
                    wait.rest()
                wait.look()
                watch.control = self.first.control
                self.first.changes.look()
                with suppress(td.DistError):
                    if self.elastic.member.is_finished or watch.look(self.first.members):
                        raise SystemExit(0)
                self._advance()
                if self.first.idle:
                    self.first.switcher.pass_time(WAIT_SECONDS)

    def _long_wait(self) -> Wait:
        return Wait(self.driver.waits_for, self.elastic.member.waits_for)

    def _advance(self, has_waited: bool = True) -> None:
        """Advance a change of members, or a requested switch, as far as possible now."""
        if self.elastic.ending:
            raise ElasticError(self.elastic.ending)
        self.driver.advance(self.first, self._place, has_waited)

    @property
    def _all_leave(self) -> bool:
        """Whether all members were asked to leave, and the working ones have not saved the state yet."""
        newest = self.elastic.member.newest
        return newest is not None and newest.change == "planned" and not newest.members

    @property
    def _is_paused(self) -> bool:
        return self.elastic.world is not None and self.elastic.world.paused

    # ---- after a loss ------------------------------------------------------------------------------------------------

    def see_failure(self) -> None:
        """Form a new world if a collective has failed that the script itself called, outside all calls of an engine."""
        failure = self.losses.failure
        if failure is not None and self.losses.explains(failure):
            self.form_anew()

    def _form_anew_if_aborted(self) -> None:
        if self.elastic.is_aborted and not self.first.idle:
            self.form_anew()

    def form_anew(self) -> None:
        """Wait until a new world is formed. Open global batches are discarded, and trained again later.

        Raises ElasticError if state was permanently lost, or if collectives hang again and again.
        """
        for engine in self.engines:
            with engine.turn():  # afterwards all engines hold the state of one world, the old one or the new one
                engine.switcher.give_up_late("the world was aborted")
        for engine in self.engines:
            if not engine.idle:
                with engine.turn():
                    engine.discard_window()
        with self._long_wait() as wait:
            while self.elastic.is_aborted:
                wait.look()
                self._advance()
                if self.elastic.is_aborted and self.first.idle:
                    self._wait_for_work()
                    break
                time.sleep(POLL_SECONDS)
        for engine in self.engines:
            if not engine.idle:  # if this batch is discarded, training continues from here
                with engine.turn():
                    engine.window.note()
        self._clock.start_over(self.first.global_steps)

    # ---- saving, and leaving -----------------------------------------------------------------------------------------

    def _save(self, is_due: bool = False) -> None:
        """Have the extensions save the state.

        is_due: whether each extension saves only if its save is due; otherwise all of them save now.
        """
        with self._clock.saving():
            for extension in self.first.extensions:
                (extension.save_if_due if is_due else extension.save_now)()

    def _leave(self, must_save: bool) -> None:
        """End this process.

        must_save: whether all members were asked to leave, so that the state has to be saved. In this case all members
        are at the same step.
        """
        name = self.elastic.member.id
        if not must_save:
            self.elastic.member.has_left = True
            logger.info("%s: its state is with others; it leaves", name)
            raise SystemExit(0)
        self._save()
        if self.first.rank == 0 and backups_of(self.first.extensions) is None:
            logger.error(
                "all members were told to leave, and nobody is there to take the state over: nothing of step %d was "
                "saved; to have it saved, configure %s",
                *(self.first.global_steps, BACKUP_KEY),
            )
        self.elastic.member.has_left = True
        logger.info("%s: nobody goes on; it leaves", name)
        raise SystemExit(0)


def _loses_by_a_death(engine: EngineParts) -> bool:
    """Return whether the death of one node may lose state that no other node holds."""
    nodes = [engine.candidates.nodes.get(member, str(member)) for member in engine.members]  # none if it leaves
    return needs_copies(engine.vps, engine.layout, nodes)


class Losses:
    """Failed collectives in the worlds in which this process's engines train."""

    def __init__(self, elastic: Elastic) -> None:
        self._elastic = elastic
        self._failed: tuple[tuple[tuple[int, ...], tuple[str, ...]], int] = (((), ()), 0)

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

    def check(self) -> None:
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
        """Wait until a failure is published. Reports one to the coordinator if the coordinator does not notice any by
        itself."""
        end, has_told = time.monotonic() + NOTICE_SECONDS, False
        while not self._elastic.is_aborted:
            if time.monotonic() > end and not has_told:
                has_told = True
                self._elastic.breach()
            if self._elastic.member.is_finished:
                raise SystemExit(0)
            time.sleep(POLL_SECONDS)

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
