"""Membership of this process, with its engines, in a job whose members come and go."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as td
from torch import nn

from ds_dynatrain.adapters.groups.device import complaint
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus, abort
from ds_dynatrain.adapters.zero.incoming import refuse_cut
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.member import Ending, end_process
from ds_dynatrain.engine.boundaries import Boundaries
from ds_dynatrain.engine.discarded import guarded
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.engine.parts import parts_of
from ds_dynatrain.errors import DynatrainError, PeerRefused, SwitchRefused
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.destinations import Registry
from ds_dynatrain.membership.liveness import Watch, ended_in_error, post_end
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.tally import told
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.reshard.context import Context, Job
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.preparation import Outcome, Preparation
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.support import usage

T = TypeVar("T")


class ElasticMembership(Elastic):
    """Membership of this process in a job whose members come and go, with its engines."""

    def __init__(self, place: WorkerPlace, settings: DynatrainConfig) -> None:
        super().__init__(place, settings)
        self._first = weakref.WeakSet[GroupStatus]()
        """Statuses of the worlds in which engines are being made."""
        self._abort: threading.Thread | None = None
        self._boundaries = Boundaries(self)
        self._jobs: list[Job] = []
        self._must_stay: dict[str, int] = {}
        """The generation in which the coordinator refused to send a node home; in a later one it may be asked again."""
        """Nodes that the coordinator did not allow to leave."""
        self._is_in_call = False
        """Whether one of DeepSpeed's calls is under way. A pipeline reads its samples within such a call."""

    @property
    def node(self) -> str:
        """Name of the node, as given by its agent."""
        return self.member.place.node

    @property
    def formed(self) -> tuple[int, str]:
        """The generation in which this process trains, and the coordinator's reason for it; (0, "") before the
        first."""
        world = self._boundaries.driver.trains_in
        return (0, "") if world is None else (world.generation, world.reason)

    # ---- an engine is made, and ends ---------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """Raise UnsupportedError for a model that is partitioned over other processes, and for lean switches."""
        refuse_cut(model, beside=bool(self._jobs))
        if settings.safety == "lean":
            raise usage("lean switches where members come and go").error()

    def new_status(self) -> GroupStatus:
        """Return a status for process groups that turns a lost peer into WorldChanged."""
        made = GroupStatus()
        self._first.add(made)
        return made

    def could_not_build(self) -> None:
        """Stop this member because its engine could not be built, so that the others count this member as lost."""
        self.member.stop(has_ended=False)

    def add(self, engine: EngineCore) -> None:
        """Record the engine's job. When the last recorded job ends, this member leaves."""
        self._jobs.append(engine.job)

    def begin(self, world: Generation, members: tuple[int, ...]) -> None:
        """Enter the generation in which the job starts. From this call on every member has a number."""
        if self.world is None:
            registry = Registry().extended(world.members)
            self.enter(world, registry, registry.ids_of(members))
        self._first.clear()

    def say_end(self, engine: EngineCore) -> None:
        """Post that the script has ended, unless this process leaves and the job continues."""
        if not self.member.is_leaving:
            post_end(engine.control)

    def remove(self, engine: EngineCore) -> None:
        """Forget an engine that has ended, and stop this member after its last one.

        An engine of an earlier job of this process does not count.
        """
        left = [job for job in self._jobs if job is not engine.job]
        if len(left) == len(self._jobs):
            return
        self._jobs = left
        self._boundaries.remove()
        if not left:
            self.member.stop(has_ended=not ended_in_error())

    def end_script(self, engine: EngineCore) -> None:
        """Skip the last garbage collection, which takes 0.8 s, because a node that was asked to leave has little
        time."""
        gc.freeze()

    def watch(self, board: Control) -> Watch:
        """Return a watch that only looks for ended scripts, because the coordinator handles deaths."""
        return Watch(board, by_hearts=False)

    def activate_between(self, engine: EngineCore) -> None:
        """Make `torch.distributed` refer to the first engine's world while no engine has the turn."""
        engine.activate()

    # ---- a loss, in any thread ---------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Abort an accelerator's communicators, and forbid new collectives."""
        engines = PROCESS.engines
        worlds = [engine.world for engine in engines if engine.world is not None]
        late = [world for engine in engines for world in engine.late_worlds]
        every = {id(world): world.status for world in (*worlds, *late)}
        self._tear([status for status in every.values() if status is not None])
        for world in worlds:
            if world.status is not None:
                world.status.is_lost = True

    def abandon(self) -> None:
        """End all operations in worlds in which engines are still being made."""
        self._tear(list(self._first))

    def waits(self, blocked_seconds: float) -> tuple[str, float]:
        """Return what the main thread waits for in any of this process's worlds, and for how many seconds.

        If it waits in several worlds, the longest wait counts. The result is ("", 0.0) if it waits in none.

        blocked_seconds: see `Gate.waits`.
        """
        waits = [status.gate.waits(blocked_seconds) for status in self._boundaries.losses.statuses]
        return max(waits, key=lambda wait: wait[1], default=("", 0.0))

    def _tear(self, statuses: Sequence[GroupStatus]) -> None:
        thread = abort([status.gate for status in statuses], self._give_up)
        self._abort = thread or self._abort

    def _give_up(self, reason: str) -> None:
        end_process(Ending.DEVICE, f"its accelerator takes nothing any more: {reason}")

    # ---- training ----------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Do everything that is due at a boundary; see `Boundaries.at_boundary`."""
        return self._boundaries.at_boundary(parts_of(engine), place)

    def waiting_change(self, engine: EngineCore) -> str:
        """Return a description of the newest generation if this is the first engine and has not entered it; else ""."""
        newest = self.member.newest
        if engine is not self._boundaries.first or newest is None or newest.generation <= self.generation:
            return ""
        return f"generation {newest.generation}: {newest.reason}"

    def open_window(self, engine: EngineCore) -> None:
        """Record the point where the global batch begins, in case the batch is discarded."""
        parts_of(engine).window.open(stays_discarded=self.stays_discarded(engine))

    def stays_discarded(self, engine: EngineCore) -> bool:
        """Return whether the batches of an engine other than the first are still discarded.

        They are discarded until the first engine has finished the batch in which the world was aborted.
        """
        first = self._boundaries.first
        return engine is not first and first.is_discarded

    def before_micro_batch(self, engine: EngineCore) -> None:
        """Form a new world if a collective has failed that the script itself called.

        Within a call that `surviving` runs, this raises WorldChanged instead, and `surviving` forms the new world.
        """
        if self._is_in_call:
            self._boundaries.losses.check()
        else:
            self._boundaries.see_failure()

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the result of `call`. If the world is lost during the call, form a new one and return the result of
        `again`."""
        boundaries, losses, was = self._boundaries, self._boundaries.losses, self._is_in_call
        try:
            self._is_in_call = True
            losses.check()
            return call()
        except RuntimeError as error:
            if not losses.explains(error):
                if found := complaint():  # every later call would fail, too, including those that end the script
                    self._give_up(found)
                raise
        finally:
            self._is_in_call = was
        boundaries.form_anew()
        losses.close_worlds(True)
        return again()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return the output of a forward pass, with losses whose own `backward` survives the death of a member."""
        return guarded(parts_of(engine).window.remember(output), engine, self)

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineCore) -> None:
        """Reconnect to an engine's board of the current generation if the coordinator was restarted.

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
        """Return the members that may get a rank: all, or only the working ones if the process has several engines."""
        return engine.members if PROCESS.is_shared else engine.candidates.members

    def vacant(self, engine: EngineCore) -> dict[str, tuple[int, ...]]:
        """Return the nodes whose members are all idle, with their members, without nodes that have to stay.

        The nodes that joined last come first. So many are left out that MIN nodes would stay.
        """
        by_node: dict[str, tuple[int, ...]] = {}
        for member, node in sorted(engine.candidates.nodes.items()):
            by_node[node] = *by_node.get(node, ()), member
        most = len(by_node) - self.member.min_nodes
        idle = [node for node, members in by_node.items() if not {*members} & {*engine.members}]
        able = [node for node in reversed(idle) if self._must_stay.get(node) != self.generation]
        return {node: by_node[node] for node in able[: max(0, most)]}

    def release(self, nodes: Sequence[str]) -> None:
        """Ask the coordinator, in a thread, to send these nodes home; see `Member.send_home`."""
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
        """Have a failure interrupt a preparation, so that the preparation does not wait for dead members."""
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
        """Number of the generation that this member is about to enter, or of its current one if it is not about to
        enter any."""
        machine = self._boundaries.driver.machine
        world = self.world if machine.world is None else machine.world
        return 0 if world is None else world.generation

    def _say_committed(self, preparation: Preparation) -> None:
        """Report to the coordinator at once that this member holds the state of the new generation.

        This cannot wait, because other members may die before the change is complete.
        """
        machine, member = self._boundaries.driver.machine, self.member
        if machine.tries_now(preparation.proposal) and machine.world is not None and member.id in machine.world.members:
            member.enter(machine.world)

    def entered(self, engine: EngineCore) -> None:
        """Treat any loss in either world as a failure until the late switch has ended."""
        self.enter_window(self._generation_ahead)
        self._boundaries.driver.entered(parts_of(engine))

    def ended(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """Update the membership at the end of a late switch; see `Driver.ended`."""
        self._boundaries.driver.ended([engine], proposal, outcome)

    def tell(self, engine: EngineCore, event: SwitchEvent) -> None:
        """Send the event to the coordinator, which keeps it for people who watch the job."""
        self.member.switched(told(engine.job.number, event))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """Return the result of the job's own `load_checkpoint` on a newcomer, which receives its state later; else
        None."""
        return tuple(self.loads.get(engine) or (None, {})) if self.is_newcomer else None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """Keep the parts of a `load_checkpoint` result that JSON can hold."""
        self.loads[engine] = [plain_part(part) for part in result]


def plain_part(value: Any) -> Any:
    """Return the part of a value that JSON can hold.

    Entries of a dictionary that JSON cannot hold are left out; any other such value becomes None.
    """
    if isinstance(value, Mapping):
        parts = {str(key): plain_part(part) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None}
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None
