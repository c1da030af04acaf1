"""What an agent does besides starting workers: it is known to the coordinator, and ends workers that hang.

A thread keeps the connection, as well as it can: an agent goes on without a coordinator as long as its workers do.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from ds_dynatrain.elastic.announcement import Endpoint
from ds_dynatrain.elastic.connection import RETRY_SECONDS, Connection
from ds_dynatrain.elastic.environment import LOCAL_RANK, NODE
from ds_dynatrain.elastic.messages import Agent, Beat, Bye, Fence, Finished, Refused
from ds_dynatrain.elastic.world import node_of
from ds_dynatrain.errors import CoordinatorUnproved, MessageError, PeerRefused

logger = logging.getLogger("ds_dynatrain.elastic")


class AgentLine:
    """The agent's connection to the coordinator, for one start of its workers."""

    def __init__(self, connection: Connection, node: str, endpoint: Endpoint, token: str | None, job: str) -> None:
        self._connection = connection
        self._node = node
        self._endpoint = endpoint
        self._token = token
        self._job = job
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain-agent", daemon=True)

    def start(self) -> None:
        """Announce the node, and listen."""
        self._connection.send(Agent(node=self._node))
        self._thread.start()

    def close(self, failed: bool = False) -> None:
        """Say good-bye once all workers have ended. failed: one of them with an exit code other than 0."""
        self._ended.set()
        self._thread.join()
        try:
            self._connection.send(Bye(failed=failed))
        except OSError:
            pass
        self._connection.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._listen()
            except (OSError, MessageError):
                self._connection.close()
            if not self._ended.is_set() and not self._reconnect():
                return

    def _listen(self) -> None:
        """Send heartbeats and end workers until the connection breaks or `close` is called."""
        beat = self._connection.welcome.beat_seconds
        while not self._ended.is_set():
            self._connection.send(Beat())
            try:
                message = self._connection.receive(min(beat, RETRY_SECONDS))
            except TimeoutError:
                continue
            match message:
                case Fence():
                    self._end_worker(message)
                case Finished() | Refused():
                    raise ConnectionError(message.kind)

    def _reconnect(self) -> bool:
        """Whether there is a coordinator again."""
        while not self._ended.wait(RETRY_SECONDS):
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
        """Kill a worker that the others go on without, if it is a child of this agent."""
        found = processes_of(order.member) if order.pid is None else [order.pid]
        for pid in found:
            if not is_child(pid):
                logger.warning("process %d of %s is no worker of this agent; left alone", pid, order.member)
                continue
            logger.warning("%s does not answer and the others go on: its process %d is ended", order.member, pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(member: str) -> list[int]:
    """Processes of this machine that were started as this member: a worker, and what it has started itself."""
    node, local_rank = node_of(member), member.rpartition("/")[2]
    wanted = {f"{NODE}={node}".encode(), f"{LOCAL_RANK}={local_rank}".encode()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended since, or another user's
        if wanted.issubset(variables):
            found.append(int(folder.name))
    return found


def is_child(process: int) -> bool:
    """Whether a process was started by this one, directly or by a wrapper in between."""
    for _ in range(8):
        if process == os.getpid():
            return True
        try:
            status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        process = int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))
        if process <= 1:
            return process == os.getpid()
    return False
