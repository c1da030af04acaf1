"""Entry of a process into a job: together with the other processes of a launch, with others that start an elastic job,
or into a running job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as td
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.adapters.groups.device import warm
from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.process_groups import serve_host
from ds_dynatrain.adapters.groups.worlds import LaunchWorld, launch_store
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.connection import ask_status
from ds_dynatrain.elastic.environment import WorkerPlace, job_token
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.store import connected
from ds_dynatrain.elastic.worker_process import at_exit
from ds_dynatrain.engine.elastic import CONNECT_SECONDS, Elastic
from ds_dynatrain.engine.elastic_membership import ElasticMembership
from ds_dynatrain.engine.fixed_launch import FixedLaunch
from ds_dynatrain.errors import ConfigError, ElasticError, JobFinished
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.destinations import Registry
from ds_dynatrain.membership.liveness import Wait, ended_in_error
from ds_dynatrain.records import from_record
from ds_dynatrain.report import logger, telling_if_long
from ds_dynatrain.reshard.context import Boards
from ds_dynatrain.reshard.membership import Membership

START_SECONDS = 1800.0
"""Longest wait for processes that build their models at different speeds. It equals DeepSpeed's own timeout."""
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.5
"""Interval at which a process that waits for a job to start checks whether one is already running."""
T = TypeVar("T")


@dataclass
class Entry:
    """A process's entry into a job, before its engine exists.

    launch: the process group of all processes that start together. It contains only this process if the process joins a
        running job.
    mine: this process's number as a member.
    size: the number of processes in the group.
    record: the running job's description (see `PostJob`); None if this process starts a job.
    number: the number of the engine among those that the process has made, counted from 1.
    """

    launch: LaunchWorld
    control: Control
    background: Control
    mine: int
    size: int
    membership: Membership
    number: int = 1
    world: Generation | None = None
    alone: LaunchWorld | None = None
    record: dict[str, Any] | None = None

    @property
    def joins(self) -> bool:
        """Whether the process joins a job that is already running."""
        return self.record is not None

    def exchange(self, key: str, mine: Any) -> dict[int, Any]:
        """Post a value, wait until all starting processes have posted theirs, and return a map from member to value.

        A process that joins a running job gets only its own value.
        """
        if self.joins:
            return {self.mine: mine}
        self.control.post(f"{key}/{self.mine}", mine)
        deadline = time.monotonic() + START_SECONDS
        what = "initialize on every process of the launch"
        with telling_if_long(what):
            return self.control.gather(key, range(self.size), what, deadline, self.stop)

    @property
    def generation(self) -> int:
        """Number of the generation that is being entered; 0 in a launch of fixed size."""
        return 0 if self.world is None else self.world.generation

    def stop(self) -> None:
        """Raise WorldChanged if a failure has been published since the generation that is being entered."""
        self.membership.stop_if_over(self.generation)


def with_launch(seconds: float, known: Membership | None) -> Entry:
    """Enter a job together with all processes of a launch of fixed size. Every process must make its engines in the
    same order.

    known: the membership of this process's earlier engines; None for the first engine.
    """
    launch, store = LaunchWorld.current(), connected(launch_store, seconds)
    serve_host(launch.group, store, seconds)
    number = Control(store, "dynatrain", launch.member, seconds).count(f"engines/{launch.member}")
    control = Control(store, f"dynatrain/{number}", launch.member, seconds)
    return Entry(launch, control, control.clone(), launch.member, launch.size, known or FixedLaunch(), number)


def with_members(place: WorkerPlace, settings: DynatrainConfig, known: ElasticMembership | None = None) -> Entry:
    """Enter an elastic job once the coordinator admits this process, either to start the job or as a newcomer.

    known: the membership of this process, if the coordinator already knows it.

    Raises SystemExit(0) if the job ends first, and TimeoutError or PeerRefused under the same conditions as
    `Member.start`.
    """
    elastic, alone = known or ElasticMembership(place, settings), LaunchWorld.current()
    with _to_the_end_of_the_job(elastic):
        if known is None:
            elastic.member.start()
            warm()
        elastic.member.ready()
        with telling_if_long(start_of_job(elastic)):
            return _entered(elastic, alone, settings.timeout_seconds)


def enter_again(membership: Membership, settings: DynatrainConfig, number: int) -> Entry:
    """Enter an elastic job with a further engine of a process that already has some.

    number: the number of the new engine, counted from 1.

    Raises ConfigError in a process that joins a job with fewer engines.
    Raises ElasticError if a member is lost during the call.
    Raises SystemExit(0) if the job ends.
    """
    elastic = membership
    if not isinstance(elastic, ElasticMembership):
        raise ConfigError(
            f"engine {number}: the others of this process were made in a launch of fixed size; make all engines after "
            "the process has joined the job (ds_dynatrain.init_distributed)"
        )
    if elastic.is_newcomer and number > elastic.engine_count:
        raise ConfigError(
            f"this process cannot join the job: it makes engine {number}, and the job's processes have "
            f"{elastic.engine_count}; start it with the script of the others, which makes {elastic.engine_count}"
        )
    with _to_the_end_of_the_job(elastic):
        return _entered(elastic, LaunchWorld.current(), settings.timeout_seconds, number)


def _entered(elastic: ElasticMembership, alone: LaunchWorld, seconds: float, engine: int = 1) -> Entry:
    """Wait for a generation that this process can enter, and enter it. If the process has entered one already, use
    that.

    alone: the process group of this process alone.
    engine: the number of the engine that is being made.
    """
    generation = 0
    while True:
        world = elastic.world or elastic.member.wait_for_world(generation)
        generation = world.generation
        if entry := enter_generation(elastic, world, alone, seconds, engine):
            return entry
        if elastic.world is not None:
            raise ElasticError(f"engine {engine}: a member was lost while it was made; start the job again")


@contextmanager
def _to_the_end_of_the_job(elastic: Elastic) -> Iterator[None]:
    """Context manager for joining a job: if the job ends before this process has joined it, the script ends with
    SystemExit(0)."""
    try:
        yield
    except JobFinished as end:
        logger.info("%s: %s", elastic.member.id, end)
        elastic.member.stop()
        raise SystemExit(0) from end


def enter_generation(
    elastic: ElasticMembership, world: Generation, alone: LaunchWorld, seconds: float, engine: int = 1
) -> Entry | None:
    """Enter a generation of the job. Returns None if this process has to wait for a later one.

    alone: the process group of this process alone.
    engine: the number of the engine that is being made.
    """
    if elastic.member.id not in world.members:
        _stay_outside(elastic, world, engine)
        return None
    registry = Registry().extended(world.members)
    try:
        boards = elastic.open_boards(world, seconds=seconds, engine=engine)
        if not _all_start(elastic, world, boards, engine):
            whom = "rank 0 of the running job to say what it trains"
            record = _wait_on(elastic, world, whom, lambda: boards[0].read("job"))
            if record is None:
                return None
            number = from_record(Registry, record["registry"]).numbers[elastic.member.id]
            for board in boards:
                board.member = number
            elastic.member.building()
            elastic.is_newcomer, elastic.engine_count = True, int(record["engines"])
            elastic.loads[engine] = record["loaded"]
            return Entry(alone, *boards, number, 1, elastic, engine, world, alone, record)
        mine, size = registry.numbers[elastic.member.id], len(world.members)
        for board in boards:
            board.member = mine
        elastic.is_newcomer, elastic.restores = False, world.begun
        others = ", ".join(one for one in world.members if one != elastic.member.id)
        with elastic.building_first(world.generation, engine), telling_if_long(f"a connection to {others}"):
            launch = LaunchWorld.formed(boards[1].store, "start", mine, size, seconds, elastic.new_status())
        return Entry(launch, *boards, mine, size, elastic, engine, world, alone)
    except (td.DistError, RuntimeError, OSError) as error:
        logger.warning("generation %d could not be formed (%s); another one follows", world.generation, error)
        elastic.member.broken(world)
        return None


def _stay_outside(elastic: Elastic, world: Generation, engine: int) -> None:
    """Handle a generation that does not list this process; it may join a later one.

    After a failure the other members ask leaving members what state they hold; this process answers that it holds none.
    Raises JobFinished if this member was asked to leave. Raises ElasticError if this member was making a further
    engine, because it would need a description from the previous generation.
    """
    if world.change == "failure" and elastic.member.id in world.leaving:
        with suppress(td.DistError, OSError):
            _say_nothing_is_held(elastic, elastic.open_boards(world)[0])
    if elastic.member.is_leaving or not world.members:
        elastic.member.has_left = True
        raise JobFinished(f"{elastic.member.id} was told to leave")
    if engine > 1:
        raise ElasticError(
            f"engine {engine}: {world.reason}; the others have gone on while this process made its engines; start "
            "this process again"
        )


def _say_nothing_is_held(elastic: Elastic, board: Control) -> None:
    board.post(f"survivor/{elastic.member.id}", {"holds": [], "released": []})


def _all_start(elastic: Elastic, world: Generation, boards: Boards, engine: int) -> bool:
    """Return whether no member of a generation has an engine yet, so that all of them start the job together.

    Even if no member is known to hold the state, some may have an engine: they are about to leave with the state, or
    joined just before the state was lost. Raises ElasticError on a member that would have to make a further engine in
    such a job.
    """
    if world.survivors:
        return False
    if world.generation == 1 or elastic.world is not None:
        return True
    if engine > 1:
        raise ElasticError(
            f"generation {world.generation}: {world.reason}; nobody is known to hold the state of the job, and "
            f"engine {engine} of this process was not made yet: start the job again, from a checkpoint"
        )
    _say_nothing_is_held(elastic, boards[0])
    asked = (*world.members, *world.leaving)
    whom = f"one of {', '.join(asked)} to say what it holds"
    if not _wait_on(elastic, world, whom, lambda: boards[0].all_posted("survivor", asked)):
        return False
    return not any(boards[0].value(f"survivor/{one}")["holds"] for one in asked)


def _wait_on(elastic: Elastic, world: Generation, whom: str, look: Callable[[], T]) -> T | None:
    """Call `look` repeatedly until it returns a true value, and return that value. Returns None if a later generation
    is published first.

    whom: a description of what is awaited, for the status.

    Raises JobFinished if the job ends.
    """
    with Wait(lambda: f"{whom}, in generation {world.generation}", elastic.member.waits_for) as wait:
        while elastic.member.is_newest(world):
            wait.look()
            if found := look():
                return found
            if elastic.member.is_finished:
                raise JobFinished("the job has finished")
            time.sleep(POLL_SECONDS)
    return None


def start_of_job(elastic: Elastic) -> str:
    """Return a description, for the log, of what a process waits for until the coordinator includes it in a
    generation."""
    status = f"`ds-dynatrain status {elastic.member.place.coordinator}`"
    return f"the job to start, or to take this process in; {status} says which nodes are ready"


def start_alone() -> None:
    """Make `torch.distributed` use a world that contains only this process. Process groups that the script has made are
    destroyed."""
    if td.is_initialized():
        td.destroy_process_group()
    store = HashStore()
    td.init_process_group("gloo", store=store, rank=0, world_size=1)


# ---- an early entry, without an engine -------------------------------------------------------------------------------


@dataclass(eq=False)
class Early:
    """A member that has entered the job but has no engine yet. `PROCESS` keeps this object until `initialize` is
    called.

    launch: the process group that the member is in.
    entry: the entry of a process that starts a job; None if the process joins a running one.
    joins: whether the process joins a running job.
    """

    membership: ElasticMembership
    alone: LaunchWorld
    launch: LaunchWorld
    entry: Entry | None
    joins: bool
    is_taken: bool = False

    def install(self) -> None:
        """Make `torch.distributed`, DeepSpeed and the environment variables refer to this member's process group."""
        self.launch.install()
        at_exit(self.end)

    def connect(self) -> None:
        """Connect the accelerators of all starting processes, so that their process group can send accelerator tensors.
        All of these processes call it.

        Raises WorldChanged if one of them is lost during the call.
        """
        if self.entry is not None:
            self.launch.connect(self.membership.timeout_seconds, self.entry.stop)

    def take_over(self, settings: DynatrainConfig) -> Entry:
        """Complete this entry, which was begun without an engine, with the settings of the first engine. Return it in
        the form that `with_members` returns."""
        entry, launch = self.entry, self.launch
        self.is_taken = True
        self.entry, self.launch = None, self.alone  # this object must not keep the group alive
        elastic = self.membership
        elastic.configure(settings)
        if entry is not None and entry.world is not None:
            seconds = settings.timeout_seconds
            entry.control, entry.background = elastic.open_boards(entry.world, entry.mine, seconds)
            return entry
        self.alone.install()
        launch.retire()
        del launch
        return with_members(elastic.member.place, settings, self.membership)

    def end(self) -> None:
        """Report to the coordinator that the script has ended. Does nothing if an engine was made, because the engine
        then reports this."""
        if not self.is_taken:
            self.membership.member.stop(has_ended=not ended_in_error())


def begin(place: WorkerPlace) -> Early:
    """Enter an elastic job before an engine is made. Raises SystemExit(0) if the job ends first."""
    settings = DynatrainConfig()
    elastic = ElasticMembership(place, settings)
    start_alone()
    alone = LaunchWorld.current()
    with _to_the_end_of_the_job(elastic):
        elastic.member.start()
        with telling_if_long(start_of_job(elastic)):
            entry = None if _is_running(elastic) else _start(elastic, alone, settings.timeout_seconds)
    if entry is None:  # join: form a world of this node's workers
        at = elastic.member.place
        store = elastic.member.store(f"node/{at.node}", START_SECONDS)
        launch = LaunchWorld.formed(store, "node", at.local_rank, at.local_size, START_SECONDS, GroupStatus())
    else:
        launch = entry.launch
    early = Early(elastic, alone, launch, entry, joins=entry is None)
    early.install()
    return early


def _start(elastic: ElasticMembership, alone: LaunchWorld, seconds: float) -> Entry | None:
    """Start a job together with all other starting processes. Returns None if there is already a running job, which
    this process has to join."""
    member, generation = elastic.member, 0
    warm()
    member.ready()
    while True:
        try:
            world = member.wait_for_world(generation, LOOK_SECONDS)
        except TimeoutError:
            if _is_running(elastic):
                return None
            continue
        generation = world.generation
        if world.survivors:
            return None
        entry = enter_generation(elastic, world, alone, seconds)
        if entry is not None:
            return None if entry.joins else entry


def _is_running(elastic: Elastic) -> bool:
    """Return whether the coordinator already has a generation that trains without this process."""
    try:
        where = elastic.member.place.coordinator
        status = ask_status(where, job_token(where)[0], CONNECT_SECONDS)
    except OSError:
        return False
    return status.generation > 0 and elastic.member.id not in status.ranks
