"""Into an elastic job before there is an engine, so that a script sees the job's world from the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_dynatrain.adapters.device import warm
from ds_dynatrain.adapters.launch_world import LaunchWorld
from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.connection import ask_status
from ds_dynatrain.elastic.environment import WorkerPlace, job_token
from ds_dynatrain.elastic.process import at_exit
from ds_dynatrain.engine.liveness import ended_in_error
from ds_dynatrain.engine.members.elastic import CONNECT_SECONDS, Elastic
from ds_dynatrain.engine.members.elastic_membership import ElasticMembership
from ds_dynatrain.engine.members.entry import (
    START_SECONDS,
    Entry,
    into,
    start_alone,
    start_of_job,
    with_members,
)
from ds_dynatrain.errors import JobFinished
from ds_dynatrain.report import logger, telling_if_long

LOOK_SECONDS = 0.5
"""Between two looks whether a job runs already, of a process that waits for one to start."""


@dataclass(eq=False)
class Early:
    """A member without an engine; `PROCESS` has it until `initialize` comes.

    launch: the group that it stands in. entry: where the process starts a job; None where it joins one. joins: whether
    a job ran already when it came.
    """

    membership: ElasticMembership
    alone: LaunchWorld
    launch: LaunchWorld
    entry: Entry | None
    is_taken: bool = False
    joins: bool = field(init=False)

    def __post_init__(self) -> None:
        self.joins = self.entry is None

    def install(self) -> None:
        """Let `torch.distributed`, DeepSpeed and the environment variables speak of its group."""
        self.launch.install()
        at_exit(self.end)

    def connect(self) -> None:
        """Let tensors of an accelerator go over the group of those that start a job: all of them call it.

        WorldChanged where one of them is lost meanwhile.
        """
        if self.entry is not None:
            self.launch.connect(self.membership.timeout_seconds, self.entry.stop)

    def take_over(self, settings: DynatrainConfig) -> Entry:
        """On into the job, with an engine; as `with_members`."""
        entry, launch = self.entry, self.launch
        self.is_taken = True
        self.entry, self.launch = None, self.alone  # the group is to go soon, and this object lives to the end
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
        """The script has ended; without an engine nobody else says so."""
        if not self.is_taken:
            self.membership.member.stop(has_ended=not ended_in_error())


def begin(place: WorkerPlace) -> Early:
    """Into the job of an elastic launch, without an engine. SystemExit(0) if it ends before that."""
    settings = DynatrainConfig()
    elastic = ElasticMembership(place, settings)
    start_alone()
    alone = LaunchWorld.current()
    try:
        elastic.member.start()
        with telling_if_long(start_of_job(elastic)):
            entry = None if _is_running(elastic) else _start(elastic, alone, settings.timeout_seconds)
    except JobFinished as end:
        logger.info("%s: %s", elastic.member.id, end)
        elastic.member.stop()
        raise SystemExit(0) from end
    early = Early(elastic, alone, _node_of(elastic) if entry is None else entry.launch, entry)
    early.install()
    return early


def _start(elastic: ElasticMembership, alone: LaunchWorld, seconds: float) -> Entry | None:
    """With all that start a job; None if one runs meanwhile that goes on without this process."""
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
        entry = into(elastic, world, alone, seconds)
        if entry is not None:
            return None if entry.joins else entry


def _is_running(elastic: Elastic) -> bool:
    """Whether the coordinator has a world already, without this process."""
    try:
        where = elastic.member.place.coordinator
        status = ask_status(where, job_token(where)[0], CONNECT_SECONDS)
    except OSError:
        return False
    return status.generation > 0 and elastic.member.id not in status.ranks


def _node_of(elastic: Elastic) -> LaunchWorld:
    """The world of this process's node; its workers wait for each other."""
    place = elastic.member.place
    store = elastic.member.node_store(START_SECONDS)
    return LaunchWorld.formed(store, "node", place.local_rank, place.local_size, START_SECONDS, GroupStatus())
