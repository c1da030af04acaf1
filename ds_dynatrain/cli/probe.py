"""The command `ds-dynatrain probe`: measure a cluster's links under torchrun and write a cluster file."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_dynatrain.elastic.environment import NODE
from ds_dynatrain.errors import ConfigError, TransferError
from ds_dynatrain.plan import LinkClass, Topology, plan_switch
from ds_dynatrain.space import BufferId, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from ds_dynatrain.transfer import (
    Buffers,
    GroupTransport,
    Neighbors,
    ReadyPlan,
    RoutedTransport,
    Transport,
    allocate,
    execute,
    prefault,
)

COMMAND = "torchrun --nproc-per-node=MEMBERS -m ds_dynatrain.cli probe --write cluster.toml"
LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECONDS = 60.0
"""Limit of each wait for another process."""
FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 20, 1 << 28, 4
LONG_SECONDS = 0.02
"""Duration in seconds up to which the size of test messages is increased."""
REPEATS, MESSAGES = 5, 64
STAGING_BYTES = 1 << 28
TAG = 1
SAME = 0.8
"""Members that send at once and keep this fraction of the speed of one alone count as not slowing each other down."""
Flows = Sequence[tuple[int, int]]
"""Pairs (sender, receiver) of members that transfer at the same time. A pair of equal members is a copy in memory."""


def probe(way: str) -> str | None:
    """Measure memory, links inside nodes and links between nodes. All processes of a launch call this.

    way: "auto", or "gloo" to use gloo inside nodes as well, as with `dynatrain.transport`.

    Returns the text of a cluster file on rank 0, and None on other ranks. Raises ConfigError outside of torchrun, and
    TransferError if a process does not answer.
    """
    missing = [name for name in LAUNCH if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: links are measured between the processes of a launch, one for each member; "
            f"start it on every node by: {COMMAND}"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.device_count() > local:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("gloo" if device.type == "cpu" else None, timeout=timedelta(seconds=SECONDS))
        links = Links.between(device, way)
        found = links.measure()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"the processes of the launch do not reach each other: {error}") from error
    return found if links.rank == 0 else None


@dataclass(eq=False)
class Links:
    """The links between the processes of a launch.

    nodes: the node of each rank.
    near: the transport between members of a node, for tensors in host memory.
    far: the transport between nodes, for tensors in host memory.
    device: the device of this rank's tensors. If it is an accelerator, NCCL transfers them instead.
    """

    rank: int
    nodes: Mapping[int, str]
    near: Transport
    far: Transport
    device: torch.device
    _buffers: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def between(device: torch.device, way: str) -> Links:
        """Connect the processes of a launch, and return the links. All processes call this."""
        rank, size = dist.get_rank(), dist.get_world_size()
        nodes = dict(enumerate(_gathered(os.environ.get(NODE) or socket.gethostname())))
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("there is no process group")
        far = GroupTransport(world, range(size))
        if way == "gloo" or size == 1:
            return Links(rank, nodes, far, far, device)
        neighbors = Neighbors.meet(rank, lambda _, record: dict(enumerate(_gathered(record))), SECONDS)
        return Links(rank, nodes, RoutedTransport(neighbors, far), far, device)

    def measure(self) -> str:
        """Measure each class of links, and return the text of a cluster file. All processes call this."""
        groups = [[r for r, node in self.nodes.items() if node == name] for name in dict.fromkeys(self.nodes.values())]
        width = min(map(len, groups))
        rows = [list(row) for row in zip(*(group[:width] for group in groups), strict=True)]
        flows = {"memory": [(r, r) for r in self.nodes], "node": _rings(groups), "network": _rings(rows)}
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "host memory"
        where = f"{len(self.nodes)} members on {len(groups)} nodes, {kind}, torch {torch.__version__}"
        links, lines = dict[str, LinkClass](), [f"Measured by `ds-dynatrain probe`: {where}."]
        for name, pairs in flows.items():
            if pairs:
                links[name] = self._link(pairs, width, self.far if name == "network" else self.near)
            else:
                links[name] = getattr(Topology, name)
                lines.append(f"{name}: not measured, as there is no such pair of members; its figures are assumed.")
        memory = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None
        topology = Topology(self.nodes, links["memory"], links["node"], links["network"], memory)
        if self.device.type == "cpu":
            topology = self._with_overhead(replace(topology, overhead_factor=1.0))
        else:
            lines.append("overhead: not measured on this device; a switch takes longer than its links alone.")
        return topology.to_toml("\n".join(lines))

    def _with_overhead(self, topology: Topology) -> Topology:
        """Return the topology with a switch's overhead, measured by exchanging the state of a small model between all
        members.
        """
        start, _ = self._moves(topology, width=8)
        seconds, links_alone = self._moves(topology, width=256)
        return replace(topology, overhead_seconds=start, overhead_factor=max(1.0, (seconds - start) / links_alone))

    def _moves(self, topology: Topology, width: int) -> tuple[float, float]:
        """Move the state of each member to the next one. Return (measured seconds, seconds expected from the links)."""
        size = len(self.nodes)
        shapes = [(3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width), (width,)]
        tensors = [LogicalTensor(f"{layer}.{n}", shape) for layer in range(12) for n, shape in enumerate(shapes)]
        layout, members = Layout(data=size, zero_stage=1), [(rank + 1) % size for rank in range(size)]
        vps = VirtualParameterSpace.of(tensors, ZeroRules(), standard_kinds(2), layout, range(size))
        part = plan_switch(vps, layout, members).for_member(self.rank)
        source, target = (self._state(vps, layout, rank) for rank in (self.rank, members.index(self.rank)))
        ready = ReadyPlan.of(part, STAGING_BYTES)
        act = partial(execute, ready, source, target, self.near, SECONDS)
        self._slowest(act)
        measured = statistics.median(self._slowest(act) for _ in range(REPEATS))
        mine = [(self.rank, self.rank, part.local.nbytes)]
        mine += [(self.rank, each.peer, each.sends.nbytes) for each in part.rounds]
        pairs = np.array([pair for pairs in _gathered(mine) for pair in pairs], np.int64)
        return measured, topology.seconds(*pairs.T).expected

    def _state(self, vps: VirtualParameterSpace, layout: Layout, rank: int) -> Buffers:
        """Return buffers for the state of a rank, with all of their memory pages already allocated."""
        found: dict[tuple[str, BufferId], torch.Tensor] = {}
        for (kind, buffer), numel in vps.local(layout, rank).sizes().items():
            held = allocate(numel, torch.float32 if vps.kind(kind).itemsize == 4 else torch.bfloat16)
            prefault(held)
            found[kind, buffer] = held
        return found

    def _link(self, flows: Flows, width: int, way: Transport) -> LinkClass:
        """Measure one class of links, and return the result. Measures the first of `flows` alone, and all together.

        width: the number of members of a node.
        """
        alone, together = self._speed(flows[:1], way), self._speed(flows, way)
        latency = self._slowest(partial(self._act, flows[:1], way, 1, MESSAGES)) / MESSAGES
        is_shared = together < SAME * alone
        return LinkClass(alone, latency, max(1.0, width * together / alone) if is_shared else None)

    def _speed(self, flows: Flows, way: Transport) -> float:
        """Return the speed of one of several flows that run at the same time, in bytes per second."""
        nbytes = FIRST_BYTES
        while self._slowest(partial(self._act, flows, way, nbytes)) < LONG_SECONDS and nbytes < MOST_BYTES:
            nbytes *= GROWTH
        act = partial(self._act, flows, way, nbytes)
        return nbytes / statistics.median(self._slowest(act) for _ in range(REPEATS))

    def _slowest(self, act: Callable[[], object]) -> float:
        """Return the time that the slowest process needs for `act`. All processes call this and get the same result."""
        dist.barrier()
        begin = time.perf_counter()
        act()
        seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def _act(self, flows: Flows, way: Transport, nbytes: int, messages: int = 1) -> None:
        """Carry out this rank's part of the transfers in `flows`.

        nbytes: the size of a message.
        messages: the number of messages in each flow.
        """
        mine = [flow for flow in flows if self.rank in flow]
        ends = [(self._buffer("from", nbytes), self._buffer("into", nbytes))] * messages
        if self.device.type == "cuda":
            self._on_device(mine, ends)
            return
        handles = []
        for out, into in ends:
            for sender, receiver in mine:
                if sender == receiver:
                    into.copy_(out)
                elif receiver == self.rank:
                    handles.append(way.receive(into, sender, TAG))
                else:
                    handles.append(way.send(out, receiver, TAG))
        deadline = time.monotonic() + SECONDS
        for handle in handles:
            handle.wait(deadline)

    def _on_device(self, mine: Flows, ends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for out, into in ends:
            calls = list[dist.P2POp]()
            for sender, receiver in mine:
                if sender == receiver:
                    into.copy_(out)
                elif receiver == self.rank:
                    calls.append(dist.P2POp(dist.irecv, into, sender))
                else:
                    calls.append(dist.P2POp(dist.isend, out, receiver))
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
        torch.cuda.synchronize(self.device)

    def _buffer(self, what: str, nbytes: int) -> torch.Tensor:
        """Return a buffer with all of its memory pages already allocated; later calls with the same size reuse it.

        what: the buffer's use, "from" or "into".
        """
        if (what, nbytes) not in self._buffers:
            for key in [key for key in self._buffers if key[0] == what]:
                del self._buffers[key]
            host = allocate(nbytes, torch.uint8)
            prefault(host)
            self._buffers[what, nbytes] = host.to(self.device)
        return self._buffers[what, nbytes]


def _rings(groups: list[list[int]]) -> list[tuple[int, int]]:
    """Return (member, next member) for each member, so that each group of several members forms a ring."""
    rings = (zip(group, group[1:] + group[:1], strict=True) for group in groups if len(group) > 1)
    return [pair for ring in rings for pair in ring]


def _gathered(record: Any) -> list[Any]:
    """Gather a record from each rank, and return the records in the order of ranks. All processes call this."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, record)
    return found
