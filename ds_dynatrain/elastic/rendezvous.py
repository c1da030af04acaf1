"""An agent's side of membership: a rendezvous of its own node alone, and a connection to the coordinator, which may
order the agent to end hanging workers."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from contextlib import suppress

import psutil
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from ds_dynatrain.elastic.address import Address, Endpoint, read_endpoint
from ds_dynatrain.elastic.connection import RETRY_SECONDS, Connection, connect, logger, retry_pause
from ds_dynatrain.elastic.environment import LOCAL_RANK, NODE, WorkerPlace, hand_over, job_token, new_node
from ds_dynatrain.elastic.hosting import CoordinatorHost
from ds_dynatrain.elastic.messages import Agent, Bye, Fence
from ds_dynatrain.elastic.settings import Settings
from ds_dynatrain.elastic.store import serve_store
from ds_dynatrain.elastic.token import Reading
from ds_dynatrain.errors import (
    ConfigError,
    CoordinatorUnproved,
    ElasticError,
    JobFinished,
    MessageError,
    PeerRefused,
)
from ds_dynatrain.report import show_by_default

LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 600.0
TIMES = ("debounce_seconds", "beat_seconds", "silent_seconds", "stuck_seconds", "recovery_seconds")
FOREIGN_ADDRESS = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


class NodeRendezvous(RendezvousHandler):
    """Rendezvous of one node alone. It never waits for another node, and never tells torchrun that another node is
    waiting."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        show_by_default()
        self._parameters = parameters
        self._endpoint = read_endpoint(parameters.endpoint)
        self._token, self._token_file = job_token(self._endpoint, file=parameters.get("token_file"))
        self._host = self._hosted()
        self._line: AgentLine | None = None
        self._store: TCPStore | None = None
        self._starts = 0

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _hosted(self) -> CoordinatorHost | None:
        """Return the coordinator that this agent has to host; None if it need not host one.

        By default an agent hosts the coordinator if the coordinator's address belongs to this machine and is still
        free.
        """
        is_host = self._parameters.get_as_bool("is_host")
        if is_host is False:
            return None
        if not isinstance(self._endpoint, Address):
            if is_host:
                raise ConfigError(
                    f"is_host=1: an agent hosts a coordinator at HOST:PORT, not at {self._endpoint}; leave it out, and "
                    f"start ds-dynatrain coordinator --announce {self._endpoint.file}"
                )
            return None
        given = self._parameters
        store_port = given.get_as_int("store_port", 0) or 0
        times = {name: float(given.get(name)) for name in TIMES if given.get(name) is not None}
        settings = Settings(given.min_nodes, given.max_nodes, **times)
        reading = Reading.of(given.get("http"), given.get("http_token_file"), self._token)
        try:
            host = CoordinatorHost(
                self._endpoint, settings, self._token, given.run_id, store_port, reading, self._token_file
            )
        except OSError as error:
            is_elsewhere = error.errno in FOREIGN_ADDRESS or isinstance(error, socket.gaierror)
            if is_host or not is_elsewhere:
                raise ElasticError(
                    f"the coordinator cannot listen at {self._endpoint}: {error}; give --rdzv-endpoint another port, "
                    "or end the process that has this one"
                ) from error
            return None
        host.start()
        return host

    # -- torchrun's rendezvous interface -----------------------------------------------------------------------------

    def get_backend(self) -> str:
        """Return the name of the back-end as the user gave it."""
        return str(self._parameters.backend)

    @property
    def use_agent_store(self) -> bool:
        """Whether workers may use the node's own store before they join the job. Always True."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a world that consists of this node alone. Each start of the node's workers gets a new world.

        Raises RendezvousConnectionError if no coordinator answers in time or the coordinator refuses this agent. Raises
        RendezvousClosedError if the job has finished.
        """
        self._end_line(failed=True)  # torchrun asks again only to restart failed workers
        self._starts += 1
        node = f"{new_node(self._parameters.local_addr or '')}-{self._starts}"
        if self._host is not None:
            self._host.coordinator.host_node = node
        seconds = float(self._parameters.get("join_timeout", JOIN_SECONDS))
        job = self.get_run_id()
        try:
            connection = connect(self._endpoint, self._token, job, seconds)
        except JobFinished as error:
            raise RendezvousClosedError(str(error)) from error
        except (TimeoutError, PeerRefused, MessageError) as error:
            raise RendezvousConnectionError(f"{self._endpoint}: {error}") from error
        mine, counted = ((each.min_nodes, each.max_nodes) for each in (self._parameters, connection.welcome))
        if mine != counted:
            logger.warning(
                "--nnodes=%d:%d here, and the coordinator's %d:%d count; give all nodes the same", *mine, *counted
            )
        self._line = AgentLine(connection, node, self._endpoint, self._token, job)
        self._line.start()
        hand_over(WorkerPlace(node, 0, 1, self._endpoint, job, os.getpid()), token_file=self._token_file)
        self._store = serve_store(LOOPBACK)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        """Return False, because a node that ends does not close the rendezvous for the others."""
        return False

    def set_closed(self) -> None:
        """Do nothing, because one agent must not close the rendezvous for the others."""

    def num_nodes_waiting(self) -> int:
        """Return 0, because a new node is no reason to restart workers."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return str(self._parameters.run_id)

    def shutdown(self) -> bool:
        """Report to the coordinator how the workers have ended.

        torchrun calls this last; if a worker has failed, it calls this while ChildFailedError is raised. A coordinator
        hosted by this agent keeps running until the workers of the other nodes have ended.
        """
        self._end_line(failed=sys.exc_info()[0] is not None)
        if self._host is not None:
            self._host.stop_when_finished()
        return True

    # -- the connection to the coordinator ---------------------------------------------------------------------------

    def _end_line(self, failed: bool) -> None:
        if self._line is not None:
            self._line.close(failed)
            self._line = None


class AgentLine:
    """Connection of an agent to the coordinator, from one start of the agent's workers until they have ended.

    A thread reconnects whenever the connection breaks. The agent continues without a coordinator for as long as its
    workers do.
    """

    def __init__(self, connection: Connection, node: str, endpoint: Endpoint, token: str | None, job: str) -> None:
        self._connection = connection
        self._node = node
        self._endpoint = endpoint
        self._token = token
        self._job = job
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain-agent", daemon=True)

    def start(self) -> None:
        """Announce the node, and start a thread that listens to the coordinator."""
        self._connection.send(Agent(node=self._node))
        self._thread.start()

    def close(self, failed: bool = False) -> None:
        """Say goodbye and close the connection, after all workers have ended.

        failed: whether one of the workers ended with a nonzero exit code.
        """
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            self._connection.send(Bye(failed=failed))
        self._connection.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._listen()
            except (OSError, MessageError, PeerRefused, JobFinished):
                self._connection.close()
            if not self._ended.is_set() and not self._reconnect():
                return

    def _listen(self) -> None:
        """Send heartbeats and end workers on request, until the connection breaks or `close` is called."""
        beat = self._connection.welcome.beat_seconds
        while not self._ended.is_set():
            self._connection.send(Agent(node=self._node))
            try:
                message = self._connection.receive(min(beat, RETRY_SECONDS))
            except TimeoutError:
                continue
            if isinstance(message, Fence):
                self._end_worker(message)

    def _reconnect(self) -> bool:
        """Reconnect, however long that takes. Returns False if the coordinator refuses the agent or `close` is
        called."""
        while not self._ended.wait(retry_pause()):
            try:
                self._connection = Connection.open(self._endpoint, self._token, self._job)
                self._connection.send(Agent(node=self._node))
                return True
            except (OSError, MessageError, CoordinatorUnproved):
                continue
            except PeerRefused as error:
                logger.warning("the coordinator at %s does not take this agent back: %s", self._endpoint, error)
                return False
        return False

    def _end_worker(self, order: Fence) -> None:
        """Kill the processes of a worker that the coordinator has declared lost, if this agent started them."""
        found = workers_of(order.member, order.pid)
        if not found:
            logger.warning("process %s of %s is no worker of this agent; left alone", order.pid, order.member)
        for process in found:
            logger.warning("%s does not answer and the others go on: process %d is ended", order.member, process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()


def workers_of(member: str, pid: int | None) -> list[psutil.Process]:
    """Return the processes of a member that this process has started, directly or indirectly.

    pid: the member's process. If it is None (unknown), all processes that were started as this member are returned.
    """
    node, _, local_rank = member.rpartition("/")
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process has ended
            if process.pid == pid or (
                pid is None
                and (variables := process.environ()).get(NODE) == node
                and variables.get(LOCAL_RANK) == local_rank
            ):
                found.append(process)
    return found
