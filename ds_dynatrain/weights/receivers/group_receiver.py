"""`GroupReceiver`: the receivers' side of `Group`, for any torch process.

New values are received into separate memory. They replace the current ones once all receiving ranks have proved that
they hold what the trainer sent: the digests of all parts add up to those of the whole tensors. If the proof fails, the
current values stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as td

from ds_dynatrain.checkpoint.extents import WORD, Extent, digest_of_part, matrix_in
from ds_dynatrain.errors import ConfigError, DynatrainError, MemberMissing, OutcomeUnknown, TransferError
from ds_dynatrain.report import logger
from ds_dynatrain.weights.blocks import Move, check_coverage, part_of
from ds_dynatrain.weights.receivers.board import LinkConnection, TargetTensor, board_at, serve, targets_of
from ds_dynatrain.weights.receivers.deltas import COUNTS_BYTES, WHOLE, DeltaCounts, apply, check
from ds_dynatrain.weights.update import Update

LOOK_SECONDS = 0.02
"""Seconds between two polls for a new update."""
MOST_ROWS = 1 << 26
"""Maximum number of rows in a plan."""
Row = tuple[int, Move]
"""(number of a tensor, move into that tensor)"""


@dataclass
class ReceiverLink:
    """A link to the trainer, as a receiving rank sees it.

    targets: the tensors to receive.
    parts: the extent of this rank's part of each tensor.
    plan: a map from each bucket and each of the trainer's ranks to the moves that form one message, in order.
    beside: buffers for the parts of the next version, keyed by tensor name.
    """

    number: int
    trainers: int
    connection: LinkConnection
    targets: list[TargetTensor]
    parts: list[Extent]
    plan: dict[int, dict[int, list[Row]]]
    beside: dict[str, torch.Tensor]


class GroupReceiver:
    """A rank that receives weights from a trainer. The trainer may change its layout and size, and may be restarted.

    address: HOST:PORT at which rank 0 listens, and which the trainer's ranks can reach. With port 0, a free port is
        chosen and written into the attribute `address`.
    rank: this rank's number among the receiving ranks.
    world_size: the number of receiving ranks.
    placements: a map from a tensor's Hugging Face name to the dimension that the ranks cut, as `torch.chunk` does; the
        same on all ranks. Every rank holds all other tensors whole.
    device: the device on which the weights are stored.
    timeout_seconds: the longest wait for another rank during an update.
    token: a secret that trainer and receivers share. Records without it are refused.
    """

    def __init__(
        self,
        address: str,
        rank: int = 0,
        world_size: int = 1,
        placements: Mapping[str, int] | None = None,
        *,
        device: torch.device | str = "cpu",
        timeout_seconds: float = 60.0,
        token: str | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size} receiving ranks: give a rank from 0 to {world_size - 1}")
        self.rank, self.world_size, self.placements = rank, world_size, dict(placements or {})
        self.device, self.timeout_seconds = torch.device(device), timeout_seconds
        self.weights: dict[str, torch.Tensor] = {}
        """This rank's parts of the current version, keyed by name. Each update replaces the dictionary and its
        tensors."""
        self.version = 0
        """The current version; 0 before the first one."""
        self.address, self._store = address, None
        if rank == 0:
            self._store, self.address = serve(address)
        self._board = board_at(self.address, rank, timeout_seconds, token)
        self._link: ReceiverLink | None = None
        self._beside: dict[str, torch.Tensor] = {}
        self._seen = 0
        if offer := self._board.read("offer"):  # the address was meant for a previous process with this rank
            self._seen = int(offer["version"])
            self._board.decide(f"verdict/{self._seen}", f"receiving rank {rank} started anew")
        self._board.post(f"receiver/{rank}", {"size": world_size, "placements": self.placements})
        self._report()

    def update(self, timeout_seconds: float | None = None) -> Update:
        """Wait for the trainer's next version, receive it, and return its record. All receiving ranks call this.

        An update that fails half-way is logged and changes nothing, and the call continues to wait. The next update may
        come from another world of the trainer. Raises MemberMissing if no version arrives within `timeout_seconds`
        (default: the receiver's own `timeout_seconds`).
        """
        begin, patience = time.monotonic(), self.timeout_seconds if timeout_seconds is None else timeout_seconds
        while True:
            offer: dict[str, Any] | None = self._board.read("offer")
            if offer is None or offer["version"] <= self._seen:
                if time.monotonic() - begin > patience:
                    what = f"a version after {self._seen} for the receivers at {self.address}"
                    raise MemberMissing(what, [0], patience)
                time.sleep(LOOK_SECONDS)
                continue
            self._clean(int(offer["version"]))
            self._seen = int(offer["version"])
            try:
                return self._take(offer)
            except (DynatrainError, RuntimeError) as error:
                if isinstance(error, OutcomeUnknown):
                    raise
                self._give_up(offer["version"], error)

    def close(self) -> None:
        """Close all connections. A later call of `update` raises."""
        self._drop()
        self._store = None

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        link.connection.close()
        if self.rank == 0:
            ranks = range(link.trainers + self.world_size)
            self._board.remove([f"link/{link.number}", *(f"here/{link.number}/{rank}" for rank in ranks)])

    # ---- one update --------------------------------------------------------------------------------------------------

    def _take(self, offer: dict[str, Any]) -> Update:
        """Receive and prove one version, and make it the current one.

        Raises TransferError, RuntimeError or DistError if this fails.
        """
        begin, version, board = time.monotonic(), int(offer["version"]), self._board
        verdict, base = f"verdict/{version}", int(offer["base"])

        def stop() -> None:
            if reason := board.read(verdict):
                raise TransferError(reason)
            if board.value("offer")["version"] != version:
                raise TransferError("the trainer has begun another update")

        link = self._link
        if link is None or link.number != offer["link"]:
            self._drop()
            link = self._join(int(offer["link"]), stop)
            self._report()
        if base and base != self.version:
            raise TransferError(f"it builds on version {base}, and this rank has {self.version}")
        board.post(f"ready/{version}/{self.rank}", 1)
        if base:
            for name, values in link.beside.items():
                values.copy_(self.weights[name])
        nbytes = sum(self._receive(link, bucket, bool(base), version) for bucket in sorted(link.plan))
        board.post(f"held/{version}/{self.rank}", self._digests(link))
        proof = board.wait({0: f"proof/{version}"}, f"digests of version {version} from the trainer", stop=stop)[0]
        if self.rank == 0:
            held = board.gather(f"held/{version}", range(self.world_size), f"digests of version {version}", stop=stop)
            board.decide(verdict, self._judged(link, proof, held))
        if reason := board.wait({0: verdict}, f"verdict on version {version}")[0]:
            raise TransferError(reason)
        before = {name: self._room(self.weights, name, each.shape, each.dtype) for name, each in link.beside.items()}
        self.weights, link.beside, self._beside = link.beside, before, before
        self.version = version
        self._report()
        board.post(f"shown/{version}/{self.rank}", 1)
        digests = dict(zip((target.name for target in link.targets), proof.tolist(), strict=True))
        seconds = time.monotonic() - begin
        return Update(version, offer["step"], offer["layout"], len(digests), nbytes, seconds, digests, bool(base))

    def _give_up(self, version: int, error: Exception) -> None:
        """Discard a version on all ranks. Raises OutcomeUnknown if other ranks may already use it."""
        try:
            reason = self._board.decide(f"verdict/{version}", f"receiving rank {self.rank}: {error}")
            self._drop()
            self._report()
        except td.DistError as lost:
            raise OutcomeUnknown(f"version {version}", self.timeout_seconds, str(lost)) from error
        if not reason:
            raise OutcomeUnknown(f"version {version}", self.timeout_seconds, str(error)) from error
        logger.warning("version %d is discarded, version %d stays: %s", version, self.version, reason)

    def _clean(self, version: int) -> None:
        """Remove the records of versions older than the previous one, except for verdicts. Only rank 0 does this."""
        if self.rank == 0:
            kinds, ranks = ("ready", "held", "shown"), range(self.world_size)
            for old in range(max(1, self._seen - 1), version - 1):
                keys = [f"{kind}/{old}/{rank}" for kind in kinds for rank in ranks]
                self._board.remove([f"proof/{old}", *keys])

    def _report(self) -> None:
        number = self._link.number if self._link else 0
        self._board.post(f"state/{self.rank}", {"version": self.version, "link": number})

    # ---- links -------------------------------------------------------------------------------------------------------

    def _join(self, number: int, stop: Any) -> ReceiverLink:
        """Connect to a world of the trainer, and check that its ranks together write each element of this rank's parts
        once.
        """
        record = self._board.wait({0: f"link/{number}"}, f"link {number} of the trainer", stop=stop)[0]
        trainers, targets = int(record["trainers"]), targets_of(record["tensors"], int(record["bucket_bytes"]))
        if unknown := sorted(self.placements.keys() - {target.name for target in targets}):
            raise TransferError(f"placements name {unknown[:3]}, which the trainer does not have: use its names")
        parts, beside = list[Extent](), dict[str, Any]()
        for target in targets:
            part, shape = part_of(target.shape, self.placements.get(target.name), self.rank, self.world_size)
            parts.append(part)
            beside[target.name] = self._room(self._beside, target.name, shape, target.dtype)
        connection = LinkConnection(self._board, number, trainers + self.rank, trainers, self.world_size, stop)
        link = self._link = ReceiverLink(number, trainers, connection, targets, parts, {}, beside)
        moves: list[list[Move]] = [[] for _ in targets]
        for trainer in range(trainers):
            for tensor, *numbers in self._plan_of(link, trainer):
                if not 0 <= tensor < len(targets):
                    raise TransferError(f"the trainer's rank {trainer} names tensor {tensor} of {len(targets)}")
                move = Move(*numbers)
                link.plan.setdefault(targets[tensor].bucket, {}).setdefault(trainer, []).append((tensor, move))
                moves[tensor].append(move)
        for target, part, found in zip(targets, parts, moves, strict=True):
            check_coverage(target.name, part.numel, found)
        return link

    def _room(
        self, held: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the tensor with this name in `held` if its shape and type match, otherwise a new tensor."""
        old = held.get(name)
        if old is not None and (old.shape, old.dtype) == (shape, dtype):
            return old
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _plan_of(self, link: ReceiverLink, trainer: int) -> list[list[int]]:
        count = torch.empty(1, dtype=torch.int64)
        link.connection.receive(count, trainer, "the plan")()
        if not 0 <= int(count) <= MOST_ROWS:
            raise TransferError(f"the trainer's rank {trainer} announces a plan of {int(count)} rows")
        rows = torch.empty(int(count), 7, dtype=torch.int64)
        link.connection.receive(rows, trainer, "the plan")()
        found: list[list[int]] = rows.tolist()
        return found

    # ---- values ------------------------------------------------------------------------------------------------------

    def _receive(self, link: ReceiverLink, bucket: int, is_delta: bool, version: int) -> int:
        """Receive one bucket from all ranks of the trainer, and return the number of bytes received."""
        plan, what = link.plan[bucket], f"version {version}"
        dtype = link.targets[next(iter(plan.values()))[0][0]].dtype
        numels = {trainer: sum(move.numel for _, move in rows) for trainer, rows in plan.items()}
        heads = {trainer: torch.tensor([WHOLE, 0, 0]) for trainer in plan}
        if is_delta:
            for wait in [link.connection.receive(head.view(torch.uint8), each, what) for each, head in heads.items()]:
                wait()
        counts = {each: check(DeltaCounts(*head.tolist()), numels[each]) for each, head in heads.items()}
        sizes = {trainer: counts[trainer].nbytes(numels[trainer], dtype.itemsize) for trainer in plan}
        messages = {trainer: torch.empty(size, dtype=torch.uint8) for trainer, size in sizes.items()}
        waits = {each: link.connection.receive(data, each, what) for each, data in messages.items() if len(data)}
        for trainer, wait in waits.items():
            wait()
            rows = plan[trainer]
            if counts[trainer].places == WHOLE:
                values = messages[trainer].view(dtype)
            else:
                values = torch.empty(numels[trainer], dtype=dtype)
                for held, part in _blocks(link, rows, values):
                    part.copy_(held)
                apply(values, messages[trainer], counts[trainer])
            for held, part in _blocks(link, rows, values):
                held.copy_(part)
        return sum(sizes.values()) + (COUNTS_BYTES * len(plan) if is_delta else 0)

    # ---- proof -------------------------------------------------------------------------------------------------------

    def _digests(self, link: ReceiverLink) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return this rank's contribution to the digest of each tensor."""
        found = []
        for target, part in zip(link.targets, link.parts, strict=True):
            matrix = link.beside[target.name].view(part.count, part.length)
            found.append(digest_of_part(matrix, part, torch.Size(target.shape).numel()))
        return np.array(found, np.uint64)

    def _judged(self, link: ReceiverLink, proof: Any, held: Mapping[int, Any]) -> str:
        """Return the reason to discard a version; "" if all ranks hold what the trainer sent.

        proof: the digest of each tensor from the trainer.
        held: the digests of the values that each rank received.
        """
        for number, target in enumerate(link.targets):
            parts = [int(each[number]) for each in held.values()]
            is_cut = target.name in self.placements
            for found in [sum(parts) & WORD] if is_cut else parts:
                if found != int(proof[number]):
                    where = "all ranks together" if is_cut else f"rank {parts.index(found)}"
                    return (
                        f"{target.name}: {where} received digest {found:#x}, the trainer sent {int(proof[number]):#x}"
                    )
        return ""


def _blocks(link: ReceiverLink, rows: list[Row], values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (destination, source) for each move in `rows`: a block of a tensor of the next version, and its part of the
    message `values`.
    """
    at = 0
    for tensor, (_, _, to, pace, length, count) in rows:
        flat = link.beside[link.targets[tensor].name].view(-1)
        yield matrix_in(flat, to, pace, length, count), values[at : at + length * count].view(count, length)
        at += length * count
