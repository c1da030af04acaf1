"""`Group`: receivers that are plain torch processes. Each gets exactly its part, from the ranks that own the elements.

A link is one gloo group of all ranks of a trainer's world and all receiving ranks. It is used as long as both sides
stay the same. A switch, a join, a death or a restarted receiver requires a new link. The receivers' side is in
`group_receiver`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as td

from ds_dynatrain.checkpoint.extents import Extent, matrix_in
from ds_dynatrain.errors import DynatrainError, MemberMissing, TransferError
from ds_dynatrain.membership.control import Control
from ds_dynatrain.weights.blocks import Move, moves_between, part_of
from ds_dynatrain.weights.receivers.board import LinkConnection, TargetTensor, board_at, rows_to_post, targets_of
from ds_dynatrain.weights.receivers.deltas import packed
from ds_dynatrain.weights.update import Outgoing, Receiver

BUCKET_BYTES = 64 << 20


class OwnedPart(NamedTuple):
    """A part of tensor `number` that a rank owns, and the moves that copy it to each receiving rank."""

    number: int
    extent: Extent
    moves: list[list[Move]]


@dataclass
class TrainerLink:
    """The connections from one world of the trainer to the receivers, and the parts that this rank sends.

    world: the world's group and layout, and the tensors that it sends.
    trainers: the number of the trainer's ranks.
    receivers: the number of receiving ranks.
    plan: this rank's parts, in the order of `Outgoing.runs`.
    base: the version that all receivers have and whose values are in `previous`; 0 if there is none.
    previous: this rank's values in version `base`, in the order of the plan; empty unless deltas are wanted.
    """

    number: int
    world: tuple[Any, ...]
    trainers: int
    receivers: int
    connection: LinkConnection
    targets: list[TargetTensor]
    plan: list[OwnedPart]
    base: int = 0
    previous: list[torch.Tensor] = field(default_factory=list)


class Group(Receiver):
    """Receivers in plain torch processes, each with a `GroupReceiver`. Make one object on each rank of the trainer.

    address: HOST:PORT of the receivers' rank 0.
    timeout_seconds: the longest wait for a receiver's answer.
    bucket_bytes: the maximum number of bytes of weights that are sent at once.
    token: the receivers' token, if they have one.
    """

    full_on: ClassVar[Literal["first", "all", "none"]] = "none"
    has_deltas = True

    def __init__(
        self, address: str, *, timeout_seconds: float = 60.0, bucket_bytes: int = BUCKET_BYTES, token: str | None = None
    ) -> None:
        self.address, self.timeout_seconds, self.bucket_bytes = address, timeout_seconds, bucket_bytes
        self._token = token
        self._board: Control | None = None
        self._link: TrainerLink | None = None

    def close(self) -> None:
        """Close all connections. A later update connects again."""
        self._drop()
        self._board = None

    def _drop(self) -> None:
        if self._link is not None:
            self._link.connection.close()
        self._link = None

    # ---- one update --------------------------------------------------------------------------------------------------

    def claim(self, source: Any, is_delta: bool) -> tuple[int, int, int]:
        """Return (next version, number of the reusable link, version that a delta can build on).

        The next version is 0 except on rank 0. The other two numbers are 0 if there is no such link or version.
        """
        board, link = self._connected(source.rank), self._link
        if link is not None and link.world != _world_of(source):
            self._drop()
            link = None
        number, base = (0, 0) if link is None else (link.number, link.base if is_delta else 0)
        if source.rank:
            return 0, number, base
        size = board.wait({0: "receiver/0"}, f"receivers at {self.address}")[0]["size"]
        states = board.gather("state", range(size), f"receivers at {self.address}").values()
        if any(state["link"] != number for state in states):
            number = base = 0
        if any(state["version"] != base for state in states):
            base = 0
        return board.count("versions"), number, base

    def send(self, out: Outgoing) -> None:
        """Send one update, and return once all receivers use it. Raises TransferError on all ranks if it fails."""
        board, rank, verdict = self._connected(out.source.rank), out.source.rank, f"verdict/{out.version}"
        error: Exception | None = None

        def stop() -> None:
            if reason := board.read(verdict):
                raise TransferError(f"version {out.version} was given up: {reason}")

        try:
            try:
                link = self._linked(out, board, stop)
                what = f"receivers at {self.address} that take version {out.version}"
                board.gather(f"ready/{out.version}", range(link.receivers), what, stop=stop)
                self._ship(out, link)
            except (DynatrainError, RuntimeError) as failed:
                mine = f"the trainer's rank {rank}: {failed}"
                found = board.decide(verdict, mine)  # the first failure is the cause of the others
                error = failed if found == mine else TransferError(f"version {out.version} was given up: {found}")
                self._drop()
            if out.has_runs:
                out.prove(error)
            else:
                out.settle(error)
            if rank == 0:
                board.post(f"proof/{out.version}", np.array(list(out.digests.values()), np.uint64))
            if reason := board.wait({0: verdict}, f"verdict of the receivers on version {out.version}")[0]:
                raise TransferError(f"the receivers discarded version {out.version}: {reason}")
        except BaseException as failed:
            with suppress(td.DistError, DynatrainError):
                board.decide(verdict, f"the trainer's rank {rank}: {failed}")
            self._drop()
            raise
        link.base = out.version if out.wants_delta else 0
        if rank == 0:
            with suppress(MemberMissing):  # the next update will find that this receiver has another version
                board.gather(f"shown/{out.version}", range(link.receivers), "receivers that show the update")

    def _connected(self, rank: int) -> Control:
        if self._board is None or self._board.member != rank or not self._board.answers(self.timeout_seconds):
            self._drop()
            self._board = board_at(self.address, rank, self.timeout_seconds, self._token)
        return self._board

    # ---- links -------------------------------------------------------------------------------------------------------

    def _linked(self, out: Outgoing, board: Control, stop: Callable[[], None]) -> TrainerLink:
        """Announce the update on rank 0, and return the link over which all ranks send it. Connects again if needed."""
        source, rank = out.source, out.source.rank
        links = {row[1] for row in out.table}
        old = self._link if len(links) == 1 and links != {0} else None
        number = out.version if old is None else old.number
        out.is_delta = old is not None and len({row[2] for row in out.table}) == 1 and out.table[0][2] > 0
        if rank == 0:
            if old is None:
                record = {"trainers": source.world_size, "bucket_bytes": self.bucket_bytes}
                board.post(f"link/{number}", {**record, "tensors": rows_to_post(source.metadata)})
            record = {"version": out.version, "link": number, "base": out.table[0][2] if out.is_delta else 0}
            board.post("offer", {**record, "step": source.step, "layout": str(source.layout), "label": out.label})
            out.rpcs = 3
        if old is not None:
            return old
        self._drop()
        first = board.wait({0: "receiver/0"}, f"receivers at {self.address}")[0]
        size, cuts = int(first["size"]), first["placements"]
        targets = targets_of(rows_to_post(source.metadata), self.bucket_bytes)
        plan = list[OwnedPart]()
        for tensor, extent in out.extents():
            name, shape = targets[tensor].name, targets[tensor].shape
            parts = (part_of(shape, cuts.get(name), receiver, size)[0] for receiver in range(size))
            plan.append(OwnedPart(tensor, extent, [moves_between(extent, part) for part in parts]))
        connection = LinkConnection(board, number, rank, source.world_size, size, stop)
        link = self._link = TrainerLink(number, _world_of(source), source.world_size, size, connection, targets, plan)
        for receiver in range(size):
            rows = [(share.number, *move) for share in plan for move in share.moves[receiver]]
            for values in (torch.tensor([len(rows)]), torch.tensor(rows, dtype=torch.int64).reshape(-1)):
                connection.send(values, link.trainers + receiver, "the plan")()
        return link

    # ---- values ------------------------------------------------------------------------------------------------------

    def _ship(self, out: Outgoing, link: TrainerLink) -> None:
        """Send the elements that this rank owns to the receivers that need them, bucket by bucket."""
        if not out.wants_delta:
            link.previous.clear()
        seen, under_way = 0, list[Callable[[], None]]()
        for _, held in groupby(out.runs(), key=lambda run: link.targets[run[0]].bucket):
            values: list[list[torch.Tensor]] = [[] for _ in range(link.receivers)]
            before: list[list[torch.Tensor]] = [[] for _ in range(link.receivers)]
            for number, extent, flat in held:
                if seen >= len(link.plan) or link.plan[seen][:2] != (number, extent):
                    raise TransferError(f"{link.targets[number].name}: this rank owned other parts when it connected")
                sides = [(values, flat), (before, link.previous[seen])] if out.is_delta else [(values, flat)]
                for receiver, moves in enumerate(link.plan[seen].moves):
                    for at, step, _, _, length, count in moves:
                        for found, of in sides:
                            found[receiver].append(matrix_in(of, at, step, length, count).flatten())
                if out.wants_delta:  # copied, because `before` may contain views of the current values
                    link.previous[seen : seen + 1] = [flat.clone()]
                seen += 1
            waits = []
            for receiver in (number for number, parts in enumerate(values) if parts):
                message = torch.cat(values[receiver])
                parts = [message.view(torch.uint8)]
                if out.is_delta:
                    counts, delta = packed(message, torch.cat(before[receiver]))
                    parts = [torch.tensor(counts).view(torch.uint8), delta]
                for part in parts:
                    if len(part):
                        waits.append(link.connection.send(part, link.trainers + receiver, f"version {out.version}"))
                        out.nbytes += len(part)
            for wait in under_way:  # while one bucket is being sent, the next one is packed
                wait()
            under_way = waits
        for wait in under_way:
            wait()
        if seen != len(link.plan):
            raise TransferError(f"this rank owns {seen} parts of the weights, and {len(link.plan)} when it connected")


def _world_of(source: Any) -> tuple[Any, ...]:
    return td.group.WORLD, source.layout, rows_to_post(source.metadata)
