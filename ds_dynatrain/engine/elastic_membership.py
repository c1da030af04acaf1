"""Membership of this process in a job whose members come and go, together with the engines of the process."""

from __future__ import annotations

import gc
import json
import math
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as td
from torch import nn

from ds_dynatrain.adapters.groups.device import busy_percent, device_error, total_bytes, used_bytes
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, abort, is_lost_peer
from ds_dynatrain.adapters.zero.incoming import refuse_cut
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.member import Ending, end_process
from ds_dynatrain.elastic.messages import Figures, Protected
from ds_dynatrain.engine.discarded import guarded
from ds_dynatrain.engine.driver import Driver
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.engine.parts import EngineParts, open_engines, parts_of
from ds_dynatrain.engine.restoring import NOTICE_SECONDS, POLL_SECONDS
from ds_dynatrain.errors import ConfigError, DynatrainError, ElasticError, PeerRefused, SwitchRefused, WorldChanged
from ds_dynatrain.extension import BACKUP_KEY, backups_of
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.destinations import Registry
from ds_dynatrain.membership.liveness import Wait, Watch, ended_in_error, post_end
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.tally import Clock, switch_message
from ds_dynatrain.plan import needs_copies
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.reshard.context import Context, Job
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.preparation import Outcome, Preparation
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.support import usage

T = TypeVar("T")
WAIT_SECONDS = 0.02
"""Polling interval of a member that waits for work or for other members."""
FIGURES_SECONDS = 1.0
"""The shortest time between two readings of figures for people. Reading a loss waits for the device."""
MEET_SECONDS = 1.0
"""Time for which a member waits for the others between two steps, before it continues training, if all members were
asked to leave."""
MOST_TRIES = 3
"""Maximum number of attempts at one step with the same members. If all of them fail although no member has died, the
script or the network is at fault."""
GLOO_SOURCE = re.compile(r"\[\S+\.(?:cc|h):\d+\] ")
"""Pattern of the file and line in gloo's source code that begin its error messages."""
SPARE = 1000
"""Number of discarded batches that a script may take in one round (see `Rounds`), in addition to twice the maximum of
any earlier round."""


class ElasticMembership(Elastic):
    """Membership of this process in a job whose members come and go, together with the engines of the process."""

    def __init__(self, place: WorkerPlace, settings: DynatrainConfig) -> None:
        super().__init__(place, settings)
        self._first = weakref.WeakSet[GroupStatus]()
        """Objects that record failures of process groups, for the worlds in which engines are being made."""
        self._abort: threading.Thread | None = None
        self._driver = Driver(self, self._leave)
        self._clock, self._rounds, self._place = Clock(), Rounds(), ""
        self._figures, self._read_at = Figures(), 0.0
        """The newest figures for people, and when they were read."""
        self._jobs: list[Job] = []
        self._must_stay: dict[str, int] = {}
        """For each node that the coordinator refused to release, the generation of the refusal. In a later generation
        the node may be released."""
        self._is_in_call = False
        """Whether one of DeepSpeed's calls is in progress. A pipeline reads its samples within such a call."""
        self._failed: tuple[tuple[tuple[int, ...], tuple[str, ...]], int] = (((), ()), 0)
        """The last failed attempt (the step of each engine, and the members), and how often it has failed."""

    @property
    def node(self) -> str:
        """Name of the node, as given by its agent."""
        return self.member.place.node

    @property
    def formed(self) -> tuple[int, str]:
        """Number of the generation in which this process trains, and the coordinator's reason for forming it; (0, "")
        before the first generation."""
        world = self._driver.trains_in
        return (0, "") if world is None else (world.generation, world.reason)

    # ---- begin and end of an engine ----------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """Raise UnsupportedError for a model that is partitioned over other processes, and for switches through a
        checkpoint ("safety": "lean")."""
        refuse_cut(model, beside=bool(self._jobs))
        if settings.safety == "lean":
            raise usage("lean switches where members come and go").error()

    def new_status(self) -> GroupStatus:
        """Return an object that records failures of the process groups of an engine that is being made. A lost peer
        then raises WorldChanged."""
        made = GroupStatus()
        self._first.add(made)
        return made

    def could_not_build(self) -> None:
        """Disconnect this member from the coordinator because its engine could not be built, so that the others count
        it as lost."""
        self.member.stop(has_ended=False)

    def add(self, engine: EngineCore) -> None:
        """Record an engine's job. When the last recorded job ends, this member leaves."""
        self._jobs.append(engine.job)

    def begin(self, world: Generation, members: tuple[int, ...]) -> None:
        """Enter the generation in which the job starts. From now on every member has a number."""
        if self.world is None:
            registry = Registry().extended(world.members)
            self.enter(world, registry, registry.ids_of(members))
        self._first.clear()

    def say_end(self, engine: EngineCore) -> None:
        """Post that the script has ended, unless this process leaves a job that continues."""
        if not self.member.is_leaving:
            post_end(engine.control)

    def remove(self, engine: EngineCore) -> None:
        """Forget an engine that has ended. After the last one, disconnect this member from the coordinator.

        Does nothing for an engine of an earlier job of this process.
        """
        left = [job for job in self._jobs if job is not engine.job]
        if len(left) == len(self._jobs):
            return
        self._jobs = left
        if len(self.engines) > 1:
            self._driver.forget()
        if not left:
            self.member.stop(has_ended=not ended_in_error())

    def end_script(self, engine: EngineCore) -> None:
        """Exempt all objects from garbage collection at the end of the process. The collection takes 0.8 s, and a node
        that was asked to leave has little time."""
        gc.freeze()

    def watch(self, board: Control) -> Watch:
        """Return an object that only checks whether scripts have ended, because the coordinator handles deaths."""
        return Watch(board, by_heartbeats=False)

    def activate_between(self, engine: EngineCore) -> None:
        """Make `torch.distributed` refer to the first engine's world between calls, so that the script can use it.

        engine: the first engine of the process.
        """
        engine.activate()

    # ---- a loss, in any thread ---------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Abort the accelerators' communicators, and forbid new collectives in all worlds of this process."""
        engines = PROCESS.engines
        worlds = [engine.world for engine in engines if engine.world is not None]
        late = [world for engine in engines for world in engine.late_worlds]
        every = {id(world): world.status for world in (*worlds, *late)}
        self._tear([status for status in every.values() if status is not None])
        for world in worlds:
            if world.status is not None:
                world.status.is_lost = True

    def abandon(self) -> None:
        """End all operations in the worlds of engines that are still being made."""
        self._tear(list(self._first))

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return a description of what the main thread waits for in any of this process's worlds, and for how many
        seconds it has waited.

        If it waits in several worlds, the longest wait counts. The result is ("", 0.0) if it waits in none.

        blocked_seconds: the time for which the main thread has run no Python code.
        """
        waits = [status.gate.waits(blocked_seconds) for status in self.statuses]
        return max(waits, key=lambda wait: wait[1], default=("", 0.0))

    def _tear(self, statuses: Sequence[GroupStatus]) -> None:
        thread = abort([status.gate for status in statuses], self._give_up)
        self._abort = thread or self._abort

    def _give_up(self, reason: str) -> None:
        end_process(Ending.DEVICE, f"its accelerator takes nothing any more: {reason}")

    # ---- failed collectives ------------------------------------------------------------------------------------------

    @property
    def failure(self) -> RuntimeError | None:
        """Error of a collective that has failed in the current worlds, whether the script or an engine called it; None
        if none has failed."""
        return next((status.failure for status in self.statuses if status.failure is not None), None)

    @property
    def statuses(self) -> list[GroupStatus]:
        """Objects that record failures of the process groups, one for each current world."""
        worlds = [engine.world for engine in PROCESS.engines if engine.world is not None]
        return [world.status for world in worlds if world.status is not None]

    def check_losses(self) -> None:
        """Raise WorldChanged if an earlier collective has failed or was aborted. This check is needed because aborting
        a collective raises no error by itself."""
        failure = self.failure
        if failure is not None:
            raise WorldChanged("a collective of this world has failed before") from failure
        for status in self.statuses:
            if status.gate.communicators:
                status.gate.check()

    def close_worlds(self, is_closed: bool) -> None:
        """Refuse collectives until the next boundary (the point between two steps), or allow them again.

        Collectives are refused while it is unknown where the other members are in their scripts.

        is_closed: whether to refuse them.
        """
        for status in self.statuses:
            status.is_closed = is_closed

    def explains(self, error: RuntimeError) -> bool:
        """Return whether the loss of the world has caused an error. If it has, first wait until all members know of the
        loss.

        Any other error comes from the user's script. Raises ElasticError if this step has failed for the third time
        with the same members.
        """
        if not self.engines or self.first.idle:
            return False
        if not self.is_aborted:
            if not (isinstance(error, WorldChanged) or is_lost_peer(error)):
                return False
            # wait until a failure is published; if the coordinator notices none by itself, report one
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
        """Count a failed attempt at this step. Raises ElasticError after `MOST_TRIES` attempts with the same members.

        members: the ids of the generation's members.
        error: the error that ended the attempt.
        """
        now = tuple(engine.global_steps for engine in PROCESS.engines), members
        tries = 1 + (self._failed[1] if self._failed[0] == now else 0)
        self._failed = now, tries
        if tries >= MOST_TRIES:
            raise ElasticError(
                f"the step after {now[0][0]} was tried {tries} times by the same {len(members)} members, and each "
                f"time a collective of it failed although none of them had died; the last said: {error}; look for a "
                "collective that not all ranks call alike, or for a network that fails"
            ) from error

    # ---- boundaries --------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[EngineParts]:
        """Open engines of the process, in the order in which they were made."""
        return open_engines()

    @property
    def first(self) -> EngineParts:
        """The engine that was made first. It represents all engines of the process: members join and leave between two
        steps of this engine, provided that no other engine is in the middle of a global batch, and all engines change
        in one transaction."""
        return self.engines[0]

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Carry out everything that is due between two steps; see `Membership.at_boundary`.

        Raises SystemExit(0) on a member that leaves, and on an idle one if the job has ended.
        """
        if engine is not self.first:
            self._at_boundary_of_another(parts_of(engine), place)
            return engine.window_in_words
        self._place = place
        self._clock.arrive(engine.global_steps)
        self._rounds.begin()
        self.close_worlds(False)
        self.see_failure()
        self._form_anew_if_aborted()
        for other in self.engines[1:]:
            if other.is_discarded:  # it will train its batches since the abort again
                with other.turn():
                    other.discard_window()
                other.is_discarded = False
        obstacle = "" if engine.idle else engine.window_in_words or self._busy_others()
        if not engine.idle and not obstacle:
            self._work()
        while engine.idle:
            self._wait_for_work()
            self._clock.skip()
            engine.settle_state()
            self._form_anew_if_aborted()  # a member may have died while this one received its part of the state
            if self._is_paused:
                self._work()
        self._tell()
        return obstacle

    def _tell(self) -> None:
        """Report this member's step, layout and figures to the coordinator, before training continues."""
        first, last = self.first, self.first.last_switch
        self._clock.depart(first.global_steps, int(first.deepspeed.global_samples))
        pause_ms = 0.0 if last is None else last.pause_ms
        kept: Protected = max((each.protects() for each in first.extensions), default="")
        if not kept and not first.idle and any(map(_loses_by_a_death, self.engines)):
            kept = "no"
        saved = sum(each.saved_member_seconds() for each in first.extensions)
        tally = self._clock.tally.model_copy(update={"saved_member_seconds": saved})
        if time.monotonic() - self._read_at > FIGURES_SECONDS:
            self._read_at = time.monotonic()
            with suppress(RuntimeError):  # a device that has failed says so in the next step
                self._figures = figures(first)
        self.member.progress(first.global_steps, str(first.layout), pause_ms, kept, tally, self._figures)

    def _at_boundary_of_another(self, engine: EngineParts, place: str) -> None:
        """Take part in a requested switch of an engine other than the first, between two steps of that engine.

        Raises ConfigError if the first engine has not reached a boundary (a point between two steps) yet, because
        newcomers would wait at the first engine's boundary. Raises WorldChanged if the script reaches this boundary
        again and again, and never one of the first engine.
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
            self._driver.advance(engine, place)

    def _busy_others(self) -> str:
        """Return a description of an engine, other than the first, that is in the middle of a global batch; "" if there
        is none.

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
        """Carry out everything that is due between two steps on a working member.

        If the job has fewer nodes than its minimum, this saves the state at once, because the remaining nodes may also
        disappear without notice, and waits for more nodes. If that takes too long, the process ends.
        """
        begin, seconds, standing = time.monotonic(), self.wait_seconds, ""
        while not self.first.idle:
            self._save(is_due=True)
            newest = self.member.newest
            all_leave = newest is not None and newest.change == "planned" and not newest.members
            waits = all_leave and time.monotonic() - begin < MEET_SECONDS
            self._advance(has_waited=not waits)
            self._form_anew_if_aborted()
            if self.first.awaits_late:  # the late switch is decided before the next optimizer step
                return
            for extension in () if self.first.idle else self.first.extensions:
                extension.at_boundary()
            meets_at = self._driver.machine.meets_at
            if waits and (meets_at is None or meets_at <= self.first.global_steps):
                time.sleep(WAIT_SECONDS)
                continue
            if self.first.idle or not self._is_paused:
                return
            self._driver.say_once(
                f"fewer nodes than MIN: training waits for others, with its state, for {seconds:g} s; start more nodes"
            )
            if standing != self.first.segment:  # once in each segment, on all members
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
        """Wait until this idle member is given work. Raises SystemExit(0) if the job has ended or the member has to
        leave."""
        for engine in self.engines:
            engine.close_loaders()  # their processes must not outlive the world that they fetched for
        watch = Watch(self.first.control, by_heartbeats=False)
        with self._long_wait() as wait:
            while self.first.idle:
                if self._driver.machine.world is None:  # no change: this member waits for no other
                    wait.rest()
                wait.look()
                watch.control = self.first.control
                self.first.tell_of_change()
                with suppress(td.DistError):
                    if self.member.is_finished or watch.look(self.first.members):
                        raise SystemExit(0)
                self._advance()
                if self.first.idle:
                    self.first.pass_time(WAIT_SECONDS)

    def _long_wait(self) -> Wait:
        return Wait(self._driver.waits_for, self.member.waits_for)

    def _advance(self, has_waited: bool = True) -> None:
        """Carry out all actions of a change of members, or of a requested switch, that are possible now."""
        if self.ending:
            raise ElasticError(self.ending)
        self._driver.advance(self.first, self._place, has_waited)

    @property
    def _is_paused(self) -> bool:
        return self.world is not None and self.world.paused

    # ---- after a loss ------------------------------------------------------------------------------------------------

    def see_failure(self) -> None:
        """Form a new world if a collective has failed that the script itself has called, outside of all calls of an
        engine."""
        failure = self.failure
        if failure is not None and self.explains(failure):
            self.form_anew()

    def _form_anew_if_aborted(self) -> None:
        if self.is_aborted and not self.first.idle:
            self.form_anew()

    def form_anew(self) -> None:
        """Wait until a new world is formed. Unfinished global batches are discarded, and trained again later.

        Raises ElasticError if state was permanently lost, or if collectives hang repeatedly.
        """
        for engine in self.engines:
            with engine.turn():  # all engines go back to the old world's state, or all have the new one's
                engine.give_up_late("the world was aborted")
        for engine in self.engines:
            if not engine.idle:
                with engine.turn():
                    engine.discard_window()
        with self._long_wait() as wait:
            while self.is_aborted:
                wait.look()
                self._advance()
                if self.is_aborted and self.first.idle:
                    self._wait_for_work()
                    break
                time.sleep(POLL_SECONDS)
        for engine in self.engines:
            if not engine.idle:  # the batch to be trained again begins here
                with engine.turn():
                    engine.note_window()
        self._clock.start_over(self.first.global_steps)

    # ---- saving, and leaving -----------------------------------------------------------------------------------------

    def _save(self, is_due: bool = False) -> None:
        """Let the extensions save the state.

        is_due: whether each extension saves only if its save is due; otherwise all of them save now.
        """
        with self._clock.saving():
            for extension in self.first.extensions:
                (extension.save_if_due if is_due else extension.save_now)()

    def _leave(self, must_save: bool) -> None:
        """End this process, because it was asked to leave.

        must_save: whether all members were asked to leave, so that the state has to be saved. In this case all members
            are at the same step.
        """
        name = self.member.id
        if not must_save:
            self.member.has_left = True
            logger.info("%s: other members have its state; it leaves", name)
            raise SystemExit(0)
        self._save()
        if self.first.rank == 0 and backups_of(self.first.extensions) is None:
            logger.error(
                "all members were told to leave, and no member can take over the state: nothing of step %d was "
                "saved; to have it saved, configure %s",
                *(self.first.global_steps, BACKUP_KEY),
            )
        self.member.has_left = True
        logger.info("%s: all members leave", name)
        raise SystemExit(0)

    def waiting_change(self, engine: EngineCore) -> str:
        """Return a description of the newest generation if the first engine still has to enter it; "" if not, and for
        other engines."""
        newest = self.member.newest
        if engine is not self.first or newest is None or newest.generation <= self.generation:
            return ""
        return f"generation {newest.generation}: {newest.reason}"

    def open_window(self, engine: EngineCore) -> None:
        """Record the positions of loaders and random generators at the beginning of a global batch, in case the batch
        is discarded."""
        parts_of(engine).open_window(stays_discarded=self.stays_discarded(engine))

    def stays_discarded(self, engine: EngineCore) -> bool:
        """Return whether global batches of this engine are still discarded. True only for an engine other than the
        first.

        Its batches are discarded until the first engine has finished the batch in which the world was aborted.
        """
        return engine is not self.first and self.first.is_discarded

    def before_micro_batch(self, engine: EngineCore) -> None:
        """Form a new world if a collective has failed that the script itself has called.

        Within a call that `surviving` runs, this raises WorldChanged instead, and `surviving` forms the new world.
        """
        if self._is_in_call:
            self.check_losses()
        else:
            self.see_failure()

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the result of `call`, one of DeepSpeed's calls. If the world is lost during the call, form a new world
        and return the result of `again`."""
        was = self._is_in_call
        try:
            self._is_in_call = True
            self.check_losses()
            return call()
        except RuntimeError as error:
            if not self.explains(error):
                if found := device_error():  # every later call would fail, too, including those that end the script
                    self._give_up(found)
                raise
        finally:
            self._is_in_call = was
        self.form_anew()
        self.close_worlds(True)
        return again()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return the output of a forward pass, with every loss replaced by one whose `backward` does not fail if a
        member dies."""
        return guarded(parts_of(engine).remember(output), engine, self)

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineCore) -> None:
        """If the coordinator was restarted, reconnect to an engine's key-value store of the current generation.

        Raises SwitchRefused if no coordinator answers.
        """
        world = self.world
        try:
            for board in (engine.control, engine.context.background):
                board.read("alive")
        except td.DistError as lost:
            if world is None:
                raise SwitchRefused(
                    f"the job's key-value store does not answer: {lost}", "training goes on; ask again later"
                ) from lost
            try:
                boards = self.open_boards(world, engine.control.member, engine=engine.job.number)
            except (td.DistError, OSError) as error:
                raise SwitchRefused(f"no coordinator answers: {error}", "training goes on; ask again later") from error
            engine.context = Context(engine.launch, engine.candidates, *boards)

    def able(self, engine: EngineCore) -> tuple[int, ...]:
        """Return the members that may get a rank: all of them or, if the process has several engines, only the working
        ones."""
        return engine.members if PROCESS.is_shared else engine.candidates.members

    def vacant(self, engine: EngineCore) -> dict[str, tuple[int, ...]]:
        """Return the nodes that the job could release, with their members, which are all idle.

        Nodes that joined last come first. Nodes that the coordinator wants to keep are left out. If all returned nodes
        are released, the job still has its minimum of nodes.
        """
        by_node: dict[str, tuple[int, ...]] = {}
        for member, node in sorted(engine.candidates.nodes.items()):
            by_node[node] = *by_node.get(node, ()), member
        most = len(by_node) - self.member.min_nodes
        idle = [node for node, members in by_node.items() if not {*members} & {*engine.members}]
        able = [node for node in reversed(idle) if self._must_stay.get(node) != self.generation]
        return {node: by_node[node] for node in able[: max(0, most)]}

    def release(self, nodes: Sequence[str]) -> None:
        """Ask the coordinator, in a thread, to make these nodes leave; see `Member.send_home`."""
        threading.Thread(target=self._release, args=(nodes,), name="dynatrain-release", daemon=True).start()

    def _release(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            try:
                self.member.send_home(node)
            except PeerRefused as refusal:
                self._must_stay[node] = self.generation
                logger.info("node %s stays: %s", node, refusal)
            except (OSError, DynatrainError) as error:
                logger.warning("node %s stays for now, because the coordinator does not answer: %s", node, error)

    def guard(self, preparation: Preparation) -> None:
        """Make a failure interrupt a switch's preparation, so that the preparation does not wait for dead members."""
        generation = self._generation_ahead
        if self._abort is not None:  # no group is built during an abort
            self._abort.join()
            self._abort = None
        preparation.building = lambda: self.building(generation, preparation.number)
        preparation.stop = lambda: self.stop_if_over(generation)
        preparation.status = GroupStatus()
        preparation.committed = lambda: self._say_committed(preparation)

    @property
    def _generation_ahead(self) -> int:
        """Number of the generation that this member is about to enter or, if there is none, of its current
        generation."""
        machine = self._driver.machine
        world = self.world if machine.world is None else machine.world
        return 0 if world is None else world.generation

    def _say_committed(self, preparation: Preparation) -> None:
        """Report to the coordinator at once that this member holds the state of the new generation.

        The report must not be delayed, because other members may die before the change is complete.
        """
        machine, member = self._driver.machine, self.member
        if (
            machine.is_of_change(preparation.proposal)
            and machine.world is not None
            and member.id in machine.world.members
        ):
            member.enter(machine.world)

    def entered(self, engine: EngineCore) -> None:
        """Record that a late switch has begun (optimizer state is in transit). Until it ends, any loss in either world
        is a failure."""
        self.enter_window(self._generation_ahead)
        self._driver.entered(parts_of(engine))

    def ended(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """Update the membership at the end of a late switch (optimizer state moved after the pause); see
        `Driver.ended`."""
        self._driver.ended([engine], proposal, outcome)

    def tell(self, engine: EngineCore, event: SwitchEvent) -> None:
        """Send the event of a switch to the coordinator, which keeps it for people who watch the job."""
        self.member.switched(switch_message(engine.job.number, event))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """Return, on a newcomer, the result that the job's own `load_checkpoint` call had; None on any other member.
        (The newcomer receives the state later.)"""
        return tuple(self.loads.get(engine) or (None, {})) if self.is_newcomer else None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """Keep the result of a `load_checkpoint` call for newcomers, as far as JSON can represent it."""
        self.loads[engine] = [plain_part(part) for part in result]


class Rounds:
    """Count of the batches that a script takes from other engines between two global batches of the first engine (a
    round).

    After a death all of these batches are discarded until the first engine begins its next batch. A script that takes a
    fixed number of batches gets to that point. A script that takes a fixed number of steps of another engine never
    does, because a discarded batch takes no step. The user then gets an error. Engines are identified by their numbers.
    """

    def __init__(self) -> None:
        self._now: Counter[int] = Counter()
        self._most: Counter[int] = Counter()

    def begin(self) -> None:
        """Begin a new round. Called when the first engine is between two global batches."""
        self._most |= self._now
        self._now.clear()

    def stay(self, engine: int, is_discarded: bool) -> None:
        """Count a batch of an engine other than the first. Called when that engine is between two global batches.

        engine: the engine's number.
        is_discarded: whether batches are discarded until the first engine's next batch.

        Raises WorldChanged if batches are discarded and the script has taken far more of them than in any earlier
        round.
        """
        self._now[engine] += 1
        if is_discarded and self._now[engine] > 2 * self._most[engine] + SPARE:
            raise WorldChanged(
                f"the world was aborted and formed anew; since then the script has asked engine {engine} for "
                f"{self._now[engine]} batches, which are discarded, and never came to the next batch of the engine "
                f"that was made first (before, it did after {self._most[engine]} at most): a loop over another engine "
                "has to end after a number of batches, not of steps"
            )


def plain_part(value: Any) -> Any:
    """Return the part of a value that JSON can represent.

    Dictionary entries that JSON cannot represent are left out. Any other such value becomes None.
    """
    if isinstance(value, Mapping):
        parts = {str(key): plain_part(part) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None}
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


def figures(engine: EngineParts) -> Figures:
    """Return figures of an engine's training, such as its loss, for people who watch the job."""
    loss, rates = engine.last_loss, engine.deepspeed.get_lr()
    value = None if loss is None else float(loss.float().mean())
    return Figures(
        loss="not finite" if value is not None and not math.isfinite(value) else value,
        learning_rate=float(rates[0]) if rates and math.isfinite(rates[0]) else None,
        memory_bytes=used_bytes(),
        memory_limit=total_bytes(),
        gpu_percent=busy_percent(),
    )


def _loses_by_a_death(engine: EngineParts) -> bool:
    """Return whether the death of one node may lose state that no other node holds."""
    nodes = [engine.candidates.nodes.get(member, str(member)) for member in engine.members]
    return needs_copies(engine.vps, engine.layout, nodes)
