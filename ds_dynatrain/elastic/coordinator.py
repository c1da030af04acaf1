"""The coordinator: a server that decides which processes train together in a job.

Each peer has its own task that reads its messages. A faulty peer (slow, silent, unknown, or with malformed or oversized
messages) loses its connection, and nothing else is affected. Another task keeps the time and carries out the decisions.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import defaultdict

from ds_dynatrain.elastic.door import Door, Peer
from ds_dynatrain.elastic.generation import Amendment, Generation, node_of, nodes_of
from ds_dynatrain.elastic.history import JobHistory
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import (
    LARGEST_ANSWER,
    LARGEST_MESSAGE,
    Agent,
    Amended,
    Announce,
    Bye,
    Changed,
    Dismiss,
    Dismissed,
    Fence,
    Finished,
    Hello,
    Leave,
    Probe,
    Probed,
    Query,
    Report,
    Show,
    Shown,
    Status,
    Switched,
    Welcome,
    encode,
)
from ds_dynatrain.elastic.roster import Effect, Finish, GiveUpMember, ProbeMembers, Publish
from ds_dynatrain.elastic.settings import ORPHAN_SECONDS
from ds_dynatrain.elastic.view import View, snapshot, view
from ds_dynatrain.errors import JobFinished, MessageError, PeerRefused

GREETING_SECONDS = 5.0
"""How long a peer may take, after it has authenticated, to introduce itself."""
LINGER_SECONDS = 30.0
"""How long a coordinator whose job has finished waits for its peers to disconnect."""
SHOW_SECONDS = 3.0
"""How long a worker may take to say what it is doing."""
MOST_OWED = 4096
"""The maximum number of disconnected agents for which orders to end workers are kept. The oldest orders are dropped."""

logger = logging.getLogger("ds_dynatrain.elastic")


class Coordinator:
    """Server of one job, on a listening socket. It runs until the job has finished."""

    def __init__(
        self,
        membership: MembershipStateMachine,
        store_port: int,
        token: str | None = None,
        job: str = "",
        token_file: str = "",
    ) -> None:
        self.membership = membership
        self.history = JobHistory()
        self._store_port = store_port
        self._token, self._token_file = token, token_file
        self._job = job
        self._workers: dict[str, Peer] = {}
        self._agents: dict[str, Peer] = {}
        self._owed: defaultdict[str, list[Fence]] = defaultdict(list)
        self._asked: dict[str, asyncio.Future[Shown]] = {}
        """For each worker that was asked what it is doing, the answer that is being waited for."""
        self._peers: set[Peer] = set()
        self.host_node = ""
        """The node whose agent hosts this coordinator; "" if none does."""
        self._dismissed: set[str] = set()
        """Nodes that were asked to leave."""
        self._stirred = asyncio.Event()
        self._wakes_at = 0.0

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Serve until the job has finished and all peers have disconnected, or until `stop` is set. Then close all
        connections."""
        door = Door(listener, self._token, _refusal(self._token_file), self._take)
        tasks = [asyncio.create_task(each) for each in (self._keep_time(), door.serve(), stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()  # raises the error of the task, if it has ended with one
        finally:
            for task in tasks:
                task.cancel()
            for peer in list(self._peers):
                peer.abort()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connected(self) -> int:
        """Number of workers and agents that are connected."""
        return len(self._workers) + len(self._agents)

    def view(self) -> View:
        """Return everything that the web page and the metrics show of the job. Called on the serving thread."""
        now = time.monotonic()
        return view(self._status(now), self.history, now, time.time())

    async def shown(self, member: str) -> Shown:
        """Ask a worker what it is doing. Simultaneous calls share one request to the worker.

        Raises KeyError if there is no such worker, TimeoutError if it does not answer in time.
        """
        peer = self._workers[member]
        if member not in self._asked:
            self._asked[member] = asyncio.get_running_loop().create_future()
            peer.send(Show())
        answer = self._asked[member]
        try:
            return await asyncio.wait_for(asyncio.shield(answer), SHOW_SECONDS)
        except asyncio.TimeoutError:
            raise TimeoutError(f"{member} has not answered for {SHOW_SECONDS:g} s") from None
        finally:
            if self._asked.get(member) is answer:
                del self._asked[member]

    def _status(self, now: float) -> Status:
        return snapshot(self.membership, self._job, now)

    # -- one peer ----------------------------------------------------------------------------------------------------

    async def _take(self, peer: Peer, hello: Hello) -> None:
        """Serve a peer that has proved that it knows the token. If the peer is refused, send it the reason."""
        self._peers.add(peer)
        try:
            said = await asyncio.wait_for(self._introduction(peer, hello), GREETING_SECONDS)
            match said:
                case Announce():
                    await self._attend_worker(peer, said)
                case Agent():
                    await self._attend_agent(peer, said.node)
                case Query():
                    peer.send(self._status(time.monotonic()))
                case Dismiss():
                    peer.send(self._dismiss(said))
        except (PeerRefused, MessageError) as error:
            logger.warning("%s: refused: %s", peer.name, error)
            peer.refuse(str(error))
        except JobFinished:
            peer.send(Finished())
        except (EOFError, OSError, asyncio.TimeoutError):
            pass
        finally:
            self._peers.discard(peer)

    def _dismiss(self, said: Dismiss) -> Dismissed:
        """Ask the workers of a node to leave; return the workers that were asked.

        Raises PeerRefused if the node has no workers (the message names the nodes that have some), and if the job
        itself makes the request (`is_spare`) but needs the node.
        """
        node, least = said.node, self.membership.settings.min_nodes
        members = tuple(member for member in self._workers if node_of(member) == node)
        if not members:
            there = ", ".join(sorted(nodes_of(self._workers))) or "none"
            raise PeerRefused(f"no worker of node {node!r} is in this job; nodes: {there}; give one of these")
        if said.is_spare and node == self.host_node:
            raise PeerRefused("its agent hosts the coordinator; run ds-dynatrain coordinator to have one apart")
        world = self.membership.world
        staying = [each.member for each in self.membership.roster.values() if not each.report.leaving]
        stay = nodes_of(staying if world is None else {*staying} & {*world.members}) - self._dismissed - {node}
        if said.is_spare and len(stay) < least:
            raise PeerRefused(f"the nodes that stay would be {len(stay)}, and MIN is {least}")
        self._dismissed.add(node)
        logger.info("node %s is told to go", node)
        self._send_all(encode(Leave()), members)
        return Dismissed(members=members)

    async def _introduction(self, peer: Peer, hello: Hello) -> Announce | Agent | Query | Dismiss:
        self._check_job(hello.job)
        settings = self.membership.settings
        peer.send(
            Welcome(
                term=self.membership.term,
                store_port=self._store_port,
                beat_seconds=settings.beat_seconds,
                stuck_seconds=settings.stuck_seconds,
                min_nodes=settings.min_nodes,
                max_nodes=settings.max_nodes,
            )
        )
        said = await peer.receive(LARGEST_MESSAGE)
        if not isinstance(said, Announce | Agent | Query | Dismiss):
            raise MessageError(f"{said.kind}: announce, agent, query or dismiss comes after hello")
        if isinstance(said, Announce | Agent):
            self._check_job(hello.job)  # checked again: another peer may have named the job in the meantime
            self._job = self._job or hello.job
        return said

    def _check_job(self, job: str) -> None:
        """Raise PeerRefused if a peer names another job than this one.

        The job's name is the one given at the coordinator's start, or else the one that the first agent or worker
        names.
        """
        if job and self._job and job != self._job:
            raise PeerRefused(
                f"this is the coordinator of job {self._job!r}, not of {job!r}; give --rdzv-id={self._job}, or this "
                "job's own --rdzv-endpoint"
            )

    async def _attend_worker(self, peer: Peer, said: Announce) -> None:
        member = self.membership.announce(said, time.monotonic())
        if said.restarts and self.membership.is_recovering and said.world is None:
            what = "%s was started again, so there was a job: no other one begins for %g s, its members may come back"
            logger.info(what, member, ORPHAN_SECONDS)
        peer.name = member
        before, self._workers[member] = self._workers.get(member), peer
        if before is not None:
            before.abort()
        self.history.goodput.begin(time.monotonic())
        self._wake_if_due()
        try:
            while True:
                message = await peer.receive(LARGEST_ANSWER)
                if self._workers.get(member) is not peer:
                    return  # the same process has opened a newer connection
                now = time.monotonic()
                match message:
                    case Bye():
                        self.membership.bye(member, message, now)
                        return
                    case Switched():
                        self.history.switched(message, now)
                    case Shown():
                        asked = self._asked.pop(member, None)
                        if asked is not None:
                            asked.set_result(message)
                    case Probed():
                        self.membership.probed(member, message, now)
                    case Report():
                        self.membership.report(member, message, now)
                        self.history.reported(member, message, self.membership.world, now)
                        self._wake_if_due()
                    case _:
                        raise MessageError(f"{message.kind}: a worker sends report, switched, probed, shown or bye")
        except (PeerRefused, MessageError) as error:
            if self._workers.get(member) is peer:
                self.membership.lost(member, str(error), time.monotonic())
            raise
        finally:
            if self._workers.get(member) is peer:
                del self._workers[member]
                self.membership.disconnected(member, "its connection ended", time.monotonic())
                self.history.gone(member)
            self._wake_if_due()

    async def _attend_agent(self, peer: Peer, node: str) -> None:
        if self.membership.is_finished:
            raise JobFinished
        peer.name = f"agent of {node}"
        self.history.goodput.begin(time.monotonic())
        self._agents[node] = peer
        self.membership.watched.setdefault(node, time.monotonic())
        for fence in self._owed.pop(node, []):
            peer.send(fence)
        try:
            while True:
                message = await asyncio.wait_for(peer.receive(), self.membership.settings.silent_seconds)
                if isinstance(message, Bye):
                    if message.failed:
                        self.membership.failed(node, time.monotonic())
                    return
                if not isinstance(message, Agent):
                    raise MessageError(f"{message.kind}: an agent sends agent or bye")
        finally:
            if self._agents.get(node) is peer:
                del self._agents[node], self.membership.watched[node]
            self._stirred.set()

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _wake_if_due(self) -> None:
        """Wake the task `_keep_time` if a decision is due before the time at which the task would wake by itself."""
        is_over = self.membership.is_finished and not self.connected
        if is_over or self.membership.deadline < self._wakes_at:
            self._stirred.set()

    async def _keep_time(self) -> None:
        """Carry out the decisions about membership when they are due. Returns once the job has finished and all peers
        have disconnected."""
        end: float | None = None
        while True:
            self._stirred.clear()
            now = time.monotonic()
            for effect in self.membership.advance(now):
                self._act(effect)
            if self.membership.is_finished:
                end = now + LINGER_SECONDS if end is None else end
                if not self.connected or now > end:
                    return
            self._wakes_at = self.membership.deadline
            timer = asyncio.get_running_loop().call_later(self._wakes_at - time.monotonic(), self._stirred.set)
            await self._stirred.wait()
            timer.cancel()

    def _act(self, effect: Effect) -> None:
        match effect:
            case Publish(world, to):
                logger.info("generation %d: %d members; %s", world.generation, len(world.members), world.reason)
                self.history.published(world, self.membership.term, time.monotonic())
                self._publish(world, to)
            case GiveUpMember(member, pid, reason):
                logger.warning("%s: given up: %s; the others go on without it", member, reason)
                peer = self._workers.pop(member, None)
                self._fence(node_of(member), Fence(member=member, pid=pid))
                if peer is not None:
                    peer.refuse(reason)
            case ProbeMembers(member, peers):
                self._send_all(encode(Probe(peers=peers)), (member,))
            case Finish(to):
                logger.info("the job has finished")
                self.history.goodput.end(time.monotonic())
                self._send_all(encode(Finished()), to)

    def _publish(self, world: Generation, to: tuple[str, ...]) -> None:
        """Send members a generation. A member that already has an earlier generation gets only the difference, if it
        can be expressed as one."""
        wires = dict[str, bytes]()
        for peer in (self._workers[member] for member in to if member in self._workers):
            base = "" if peer.told is None else peer.told.digest
            if base not in wires:
                change = None if peer.told is None else Amendment.between(peer.told, world)
                wires[base] = encode(Changed(world=world) if change is None else Amended(change=change))
            peer.send_bytes(wires[base])
            peer.told = world

    def _fence(self, node: str, fence: Fence) -> None:
        """Order a node's agent to end a worker: at once if the agent is connected, otherwise when it reconnects."""
        agent = self._agents.get(node)
        if agent is not None:
            agent.send(fence)
        else:
            self._owed[node].append(fence)
            if len(self._owed) > MOST_OWED:
                del self._owed[next(iter(self._owed))]

    def _send_all(self, wire: bytes, to: tuple[str, ...]) -> None:
        for member in to:
            if member in self._workers:
                self._workers[member].send_bytes(wire)


def _refusal(token_file: str) -> str:
    """Return the reason given to a peer that has not proved that it knows the token.

    token_file: path of the token's file on this machine; "" if the token is in no file.
    """
    what = "the token is missing or another one (DYNATRAIN_TOKEN_FILE, DYNATRAIN_TOKEN); give this process that of "
    if not token_file:
        return what + "the coordinator"
    return (
        f"{what}{token_file} on {socket.gethostname()}: copy this file to its machine, with mode 600, and name it in "
        "DYNATRAIN_TOKEN_FILE"
    )
