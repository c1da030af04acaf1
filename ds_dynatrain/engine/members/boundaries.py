"""What happens at a boundary, and after a loss, on one process of a job whose members come and go.

Of several engines in a process the first one speaks for all: at its boundaries, when no other is in a global batch,
members come and go, for all engines in one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch.distributed as td

from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.elastic.messages import Protected
from ds_dynatrain.engine.context import Context
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.liveness import EndedWatch
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.executor import Executor
from ds_dynatrain.engine.members.joint_switch import Rounds
from ds_dynatrain.engine.members.losses import Losses
from ds_dynatrain.engine.members.restoring import POLL_SECONDS
from ds_dynatrain.engine.members.tally import Clock
from ds_dynatrain.engine.members.waiting import Wait
from ds_dynatrain.engine.parts import EngineParts, open_engines
from ds_dynatrain.errors import ConfigError, ElasticError, SwitchRefused, WorldChanged
from ds_dynatrain.plan import needs_copies
from ds_dynatrain.report import logger

WAIT_SECONDS = 0.02
"""Between two looks of a member that waits for work, or for others."""


MEET_SECONDS = 1.0
"""So long a member whose job ends waits at a boundary for the others, who may be at it, too, before it trains on."""


class Boundaries:
    """Of the engines of one process, in the order in which they were made."""

    def __init__(self, elastic: Elastic) -> None:
        self.elastic = elastic
        self.executor = Executor(elastic, self._leave)
        self.losses = Losses(elastic)
        self._clock = Clock()
        self._rounds = Rounds()
        self._place = ""

    @property
    def engines(self) -> list[EngineParts]:
        """All of them."""
        return open_engines()

    @property
    def first(self) -> EngineParts:
        """The engine that speaks for all."""
        return self.engines[0]

    def remove(self) -> None:
        """An engine has ended, on all members at the same place of their scripts."""
        if len(self.engines) > 1:
            self.executor.forget()

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineParts, place: str) -> str:
        """See `Membership.at_boundary`. SystemExit(0) on a member that leaves, or has waited when the job ended."""
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
            if other.is_discarded:  # what it has dealt since the world was aborted is dealt again
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
            self._form_anew_if_aborted()  # somebody died just when this member got its share
            if self._is_paused:
                self._work()
        self._tell()
        return obstacle

    def _tell(self) -> None:
        """For whoever watches: what this member goes on with."""
        first, last = self.first, self.first.last_switch
        self._clock.depart(first.global_steps, int(first.deepspeed.global_samples))
        pause_ms = 0.0 if last is None else last.pause_ms
        kept: Protected = max((each.protects() for each in first.extensions), default="")
        if not kept and not first.idle and any(map(_loses_by_a_death, self.engines)):
            kept = "no"
        self.elastic.member.progress(first.global_steps, str(first.layout), pause_ms, kept, self._clock.tally)

    def _at_boundary_of_another(self, engine: EngineParts, place: str) -> None:
        """A boundary of another engine than the first: switches that the user asked of it take place here.

        ConfigError if the script comes here before it has come to one of the first: newcomers would wait here.
        WorldChanged if it comes here for ever.
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
        if self.first.is_discarded or engine.idle or engine.has_open_window or self.executor.machine.proposals:
            return  # what is prepared for a change of members begins where the first engine stands
        if self.executor.on_board(engine.switcher.is_due):
            engine.before_leaving_world()
            engine.attempts.transact(place)

    def _busy_others(self) -> str:
        """Return, in words, which other engine is in a global batch: the same on all members, who run one script."""
        busy = [one for one in self.engines[1:] if one.has_open_window]
        if not busy:
            return ""
        return (
            f"engine {busy[0].job.number} is in a global batch whenever the first engine begins one: members can come "
            "and go only where none is"
        )

    def _work(self) -> None:
        """On a working member; below MIN it makes no step, until others come or it is too long.

        It holds the state, and saves it at once: the last nodes may go without a word, too.
        """
        begin, seconds, standing = time.monotonic(), self.elastic.wait_seconds, ""
        while not self.first.idle:
            self._save(self.first.fallback.at_boundary)
            waits = self._all_leave and time.monotonic() - begin < MEET_SECONDS
            self._advance(has_waited=not waits)
            self._form_anew_if_aborted()
            if self.first.awaits_late:  # its record comes with the next step
                return
            for extension in () if self.first.idle else self.first.extensions:
                extension.at_boundary()
            meets_at = self.executor.machine.meets_at
            if waits and (meets_at is None or meets_at <= self.first.global_steps):
                time.sleep(WAIT_SECONDS)
                continue
            if self.first.idle or not self._is_paused:
                return
            self.executor.say_once(
                f"fewer nodes than MIN: training waits for others, with its state, for {seconds:g} s; start more nodes"
            )
            if standing != self.first.segment:  # once in each world, on all of its members
                standing = self.first.segment
                self._save(self.first.fallback.save_now)
            if time.monotonic() - begin > seconds:
                self._save(self.first.fallback.save_now)
                logger.error(
                    "fewer nodes than MIN for %g s: this process ends with code %d; start more nodes, or give torchrun "
                    "--nnodes=MIN:MAX a smaller MIN",
                    *(seconds, Ending.TOO_FEW),
                )
                raise SystemExit(int(Ending.TOO_FEW))
            time.sleep(WAIT_SECONDS)

    def _wait_for_work(self) -> None:
        """On an idle member: until it works; SystemExit(0) when the job has ended, or this member was told to go."""
        for engine in self.engines:
            engine.close_loaders()  # their processes must not outlive the world that they fetched for
        watch = EndedWatch(self.first.control)
        with self._long_wait() as wait:
            while self.first.idle:
                if self.executor.machine.world is None:  # it has no work, and waits for nobody
                    wait.rest()
                wait.look()
                watch.control = self.first.control
                self.first.switcher.tell_changes()
                if self.elastic.member.is_finished or self._have_ended(watch):
                    raise SystemExit(0)
                self._advance()
                if self.first.idle:
                    self.first.switcher.pass_time(WAIT_SECONDS)

    def _long_wait(self) -> Wait:
        return Wait(self.executor.waits_for, self.elastic.member.waits_for)

    def _have_ended(self, watch: EndedWatch) -> bool:
        """Whether the scripts of all that work are through; they say so where this member stands, too."""
        try:
            return watch.look(self.first.members)
        except td.DistError:
            return False

    def _advance(self, has_waited: bool = True) -> None:
        """What is due: of a change of members, or of a switch that the user asked for."""
        executor, machine = self.executor, self.executor.machine
        if self.elastic.ending:
            raise ElasticError(self.elastic.ending)
        executor.advance(self._place, has_waited)
        if not self.first.idle:
            ahead = 0 if self._is_paused or self.elastic.is_aborted else 1
            if self.first.preparation is not None and self.first.preparation.proposal.late and not ahead:
                return  # nobody makes the step in which the late kinds would follow
            if not machine.proposals and executor.on_board(lambda: self.first.switcher.is_due(ahead)):
                self.first.before_leaving_world()
                self.first.attempts.transact(self._place)
        elif machine.world is None:
            for engine in self.engines:
                with engine.turn():
                    executor.on_board(engine.switcher.look_for_proposal)
                    executor.on_board(partial(engine.switcher.meet_idle, self._place))

    @property
    def _all_leave(self) -> bool:
        """Whether all members were told to go, and those that train have not saved yet."""
        newest = self.elastic.member.newest
        return newest is not None and newest.change == "planned" and not newest.members

    @property
    def _is_paused(self) -> bool:
        return self.elastic.world is not None and self.elastic.world.paused

    # ---- after a loss ------------------------------------------------------------------------------------------------

    def see_failure(self) -> None:
        """Form a new world, if a collective of the present one has failed where nobody could do so: in the script."""
        failure = self.losses.failure
        if failure is not None and self.losses.explains(failure):
            self.form_anew()

    def _form_anew_if_aborted(self) -> None:
        if self.elastic.is_aborted and not self.first.idle:
            self.form_anew()

    def form_anew(self) -> None:
        """Stay here until there is a world again; open global batches are discarded, and are dealt again.

        ElasticError if state was lost that nobody has any more, or collectives do not end again and again.
        """
        for engine in self.engines:
            with engine.turn():  # what all hold then is that of one world, the old one or the new one
                engine.attempts.give_up_late("the world was aborted")
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
            if not engine.idle:  # discarded batches may still come, and where it stood before may count no more
                with engine.turn():
                    engine.window.note()
        self._clock.start_over(self.first.global_steps)

    # ---- saving, and leaving -----------------------------------------------------------------------------------------

    def _save(self, how: Callable[[], None]) -> None:
        """The fallback checkpoint; without a coordinator it is put off."""
        try:
            with self._clock.saving():
                how()
        except WorldChanged as aborted:
            logger.warning(
                "no fallback checkpoint of step %d (%s); the one before counts", self.first.global_steps, aborted
            )
        except td.DistError as lost:
            self.first.settle_fallback()
            try:
                for engine in self.engines:
                    self.reopen(engine)
            except SwitchRefused:
                logger.warning(
                    "no fallback checkpoint of step %d (%s); the one before counts", self.first.global_steps, lost
                )

    def _leave(self, must_save: bool) -> None:
        """This process ends. must_save: all members were told to go, and stand at one step."""
        name = self.elastic.member.id
        if not must_save:
            self.elastic.member.left()
            logger.info("%s: its state is with others; it leaves", name)
            raise SystemExit(0)
        if self.first.settings.fallback is not None:
            self._save(self.first.fallback.save_now)
        elif self.first.rank == 0:
            logger.error(
                "all members were told to leave, and nobody is there to take the state over: nothing of step %d was "
                "saved; to have it saved, configure dynatrain.fallback.path",
                self.first.global_steps,
            )
        self.elastic.member.left()
        logger.info("%s: nobody goes on; it leaves", name)
        raise SystemExit(0)

    def reopen(self, engine: EngineCore) -> None:
        """Have a living board of an engine for the present generation, after a coordinator was started again.

        SwitchRefused if there is none.
        """
        world = self.elastic.world
        try:
            for board in (engine.control, engine.context.background):
                board.read("alive")
        except td.DistError as lost:
            if world is None:
                raise SwitchRefused(
                    f"the job's key-value store does not answer: {lost}", "training goes on; ask again later"
                ) from lost
            try:
                boards = self.elastic.open_boards(world, engine.control.member, engine=engine.job.number)
            except (td.DistError, OSError) as error:
                raise SwitchRefused(f"no coordinator answers: {error}", "training goes on; ask again later") from error
            engine.context = Context(engine.launch, engine.candidates, *boards)


def _loses_by_a_death(engine: EngineParts) -> bool:
    """Return whether the death of a node may take state away that no other node has."""
    nodes = [engine.candidates.nodes.get(member, str(member)) for member in engine.members]  # one may be leaving
    return needs_copies(engine.vps, engine.layout, nodes)
