"""`send`: one update of a receiver's weights, with a version, a proof of coverage and the digests of what was sent.

All ranks of the trainer's world call `send`. They agree on a version in one small collective. The receiver class then
moves the weights. A second collective adds up how many elements of each tensor were sent, and their digests. Receivers
use the new weights only after that. A rank that fails reports this in the second collective, and all ranks raise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as td

from ds_dynatrain.checkpoint.extents import Extent, digest_of_part
from ds_dynatrain.errors import DynatrainError, TransferError, UnsupportedError, WorldChanged

FAILED = -1
"""Version that a rank reports if it cannot take part in an update."""


@dataclass(frozen=True)
class Update:
    """Record of one update.

    version: a number that increases with each update of a receiver; the number of a failed update is not used again.
    step: number of optimizer steps that the trainer had taken.
    layout: the trainer's layout.
    tensors: number of tensors that were sent.
    nbytes: bytes of weights that all ranks sent together.
    seconds: duration of the update on this rank.
    digests: digest of each whole tensor (see `transfer.digests`), which is the sum of the digests of its parts.
    is_delta: whether only changed elements were sent.
    collectives: number of collectives that the update used in the trainer's world.
    rpcs: number of requests that this rank sent to the receivers.
    """

    version: int
    step: int
    layout: str
    tensors: int
    nbytes: int
    seconds: float
    digests: Mapping[str, int] = field(repr=False)
    is_delta: bool = False
    collectives: int = 0
    rpcs: int = 0


class Receiver:
    """Base class of receivers of weights. Each rank of the trainer has one object, for as long as the rollouts run.

    full_on: what `send` reads: full tensors, with values on the "first" rank or on "all" ranks (`Outgoing.full`), or
        each rank's own parts ("none", `Outgoing.runs`).
    has_deltas: whether the class can send only changed elements.
    always_claims: whether ranks agree on a version before each update; otherwise only before the first one in a world.
    """

    full_on: ClassVar[Literal["first", "all", "none"]] = "first"
    has_deltas: bool = False
    always_claims: ClassVar[bool] = True
    world: tuple[Any, ...] | None = None
    """Group and layout of the world in which the last update succeeded; equal on all ranks of that world."""
    version = 0
    """Version of the newest update in which this rank took part; 0 before the first."""

    def claim(self, source: Any, is_delta: bool) -> tuple[int, int, int]:
        """Return the version that this rank proposes, and two numbers for use by the class. All ranks see all three.

        Called on each rank before an update; must not run collectives. The highest proposal becomes the version.
        """
        return self.version + 1, 0, 0

    def send(self, out: Outgoing) -> None:
        """Move the weights. Overrides must call `out.prove` on all ranks before the receiver makes the weights visible.

        By default the first rank sends everything by `deliver`, and its error is raised on all ranks.
        """
        error: Exception | None = None
        try:
            out.begin()
            if out.source.rank == 0:
                self.deliver(out)
        except Exception as failed:  # reported to all ranks by `settle`
            error = failed
        out.settle(error)

    def deliver(self, out: Outgoing) -> None:
        """Move all tensors of `out.full()`, and call `out.check_whole` before the receiver makes them available."""
        raise NotImplementedError(f"{type(self).__name__} has neither `send` nor `deliver`")


class Outgoing:
    """One update in progress, on one rank. Iterating over `full` or `runs` counts what is sent; `prove` compares all
    ranks.
    """

    def __init__(self, source: Any, table: list[list[int]], label: str | None, is_delta: bool) -> None:
        self.source = source
        self.version = max(row[0] for row in table)
        self.table = table
        """The claims of all ranks, by rank."""
        self.label = str(self.version) if label is None else label
        self.wants_delta = is_delta
        """Whether the next update may be a delta to this one. Whether this one is a delta is `is_delta`, which the
        receiver sets."""
        self.is_delta = False
        self.nbytes = 0
        """Bytes of weights that this rank has sent, counted by the receiver class; after `prove`, those of all
        ranks."""
        self.rpcs = 0
        self.digests: dict[str, int] = {}
        self.has_runs = bool(getattr(source, "has_runs", True))
        """Whether ranks own parts. Otherwise the first rank has each tensor as a whole, as if it owned all of it."""
        self._passing: Iterator[tuple[str, torch.Tensor]] = source.iter_full()
        self._numbers = {each.name: number for number, each in enumerate(source.metadata)}
        self._sums = np.zeros((2, len(self._numbers)), np.uint64)

    def begin(self) -> None:
        """Gather the first full tensor, before the update is announced to the receiver. Called on all ranks.

        If the weights cannot be read, this raises on all ranks.
        """
        self._passing = chain(list(islice(self._passing, 1)), self._passing)

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of the metadata. All ranks must iterate together, to the end.

        A tensor has values on the ranks that the receiver's `full_on` names, and is valid until the next one is
        requested.
        """
        for name, tensor in self._passing:
            if self.source.rank == 0:
                meta = self.source.metadata[self._numbers[name]]
                if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
                    found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                    raise TransferError(f"{name}: the source gave {found}, and announced {meta.dtype} of {meta.shape}")
                flat = tensor.detach().reshape(-1)
                self._note(name, Extent(0, flat.numel()), flat)
            yield name, tensor

    def runs(self) -> Iterator[tuple[int, Extent, torch.Tensor]]:
        """Yield (tensor number, extent, flat values on the host) of the elements that this rank owns, without
        communication.
        """
        if not self.has_runs:
            for name, tensor in self.full():
                if self.source.rank == 0:
                    flat = tensor.detach().reshape(-1).cpu()
                    yield self._numbers[name], Extent(0, flat.numel()), flat.clone()
            return
        for name, extent, matrix in self.source.runs():
            flat = matrix.detach().reshape(-1).cpu()
            self._note(name, extent, flat)
            yield self._numbers[name], extent, flat

    def settle(self, error: Exception | None) -> None:
        """Read all remaining full tensors, and call `prove`. All ranks must call this together.

        error: the error because of which this rank could not send its part; None if there was none.
        """
        try:
            for _ in self._passing:
                pass
        except Exception as failed:  # reported to all ranks by `prove`
            error = error or failed
        self.prove(error)

    def extents(self) -> Iterator[tuple[int, Extent]]:
        """Yield (tensor number, extent) of the elements that this rank owns: the result of `runs` without values."""
        if not self.has_runs:
            metadata = self.source.metadata if self.source.rank == 0 else ()
            yield from ((number, Extent(0, meta.numel)) for number, meta in enumerate(metadata))
            return
        for name, extent, _ in self.source.runs():
            yield self._numbers[name], extent

    def _note(self, name: str, extent: Extent, flat: torch.Tensor) -> None:
        number = self._numbers[name]
        added = digest_of_part(flat.view(extent.count, extent.length), extent, self.source.metadata[number].numel)
        self._sums[:, number] += np.array([added, extent.numel], np.uint64)

    def prove(self, error: Exception | None = None) -> None:
        """Add up what all ranks have sent, and raise on all ranks if anything is missing. This is a collective.

        error: the error because of which this rank could not send its part; None if there was none.
        """
        own = [int(error is not None), self.nbytes]
        sums = torch.from_numpy(np.append(self._sums.view(np.int64).reshape(-1), np.array(own, np.int64)))
        td.all_reduce(sums)
        failed, self.nbytes = sums[-2:].tolist()
        if error is not None:
            raise error
        if failed:
            raise TransferError(
                f"{failed} of {self.source.world_size} ranks could not send version {self.version}: see their errors"
            )
        self._judge(sums[:-2].numpy().view(np.uint64).reshape(2, -1))

    def check_whole(self) -> None:
        """Raise TransferError unless every element of every tensor was sent. Called on the rank that has iterated over
        all full tensors.
        """
        self._judge(self._sums)

    def _judge(self, sums: Any) -> None:
        """Store the digests. Raises TransferError unless each element of each tensor was counted once."""
        digests, counts = sums.tolist()
        for meta, count in zip(self.source.metadata, counts, strict=True):
            if count != meta.numel:
                raise TransferError(
                    f"{meta.name}: all ranks together sent {count} of {meta.numel} elements (shape {meta.shape}); "
                    "make a new source and send again"
                )
        self.digests = dict(zip(self._numbers, digests, strict=True))


def send(engine: Any, receiver: Receiver, *, delta: bool = False, version: str | None = None) -> Update:
    """Send the current weights of an engine to a receiver. Call it on every working rank, with the same arguments.

    engine: the engine, or a source of it (`source(engine, ...)`) that was made since the last switch.

    delta: send only elements whose bits have changed since the last update if the receiver has that update; otherwise
        send all elements.

    version: a label for receivers that show one; by default the number of the version.

    Raises TransferError, on all ranks, if an update does not arrive completely. `Group` and `Folder` then keep the
    previous weights. A vLLM or SGLang server has already overwritten some of its weights, and needs another update.
    Raises WorldChanged in a discarded global batch, and if the trainer's own world changes during the call.
    """
    if delta and not receiver.has_deltas:
        raise UnsupportedError(f"{type(receiver).__name__} takes whole tensors only: call send without delta=True")
    begin, found = time.monotonic(), engine
    turn: AbstractContextManager[None] = nullcontext()
    if not hasattr(engine, "iter_full"):
        from ds_dynatrain.engine.discarded import DISCARDED
        from ds_dynatrain.weights.weight_source import source

        if engine.is_discarded:  # new members do not take part in this batch, so they would not answer
            raise WorldChanged(f"send: {'; '.join(DISCARDED)}")
        turn, found = engine.turn(), source(engine, full_on="first" if receiver.full_on == "none" else receiver.full_on)
    with turn:
        world = (td.group.WORLD, found.layout)
        if is_known := receiver.world == world and not receiver.always_claims:
            table = [[receiver.version + 1, 0, 0]]
        else:
            table = _claims(found, receiver, delta)
        out = Outgoing(found, table, version, delta)
        # set even if the update fails, because its number is not used again
        receiver.version, receiver.world = out.version, None
        receiver.send(out)
        receiver.world = world
    collectives = 2 - is_known + (0 if receiver.full_on == "none" and out.has_runs else found.collectives)
    shape, seconds = (str(found.layout), len(found.metadata)), time.monotonic() - begin
    return Update(
        out.version, found.step, *shape, out.nbytes, seconds, out.digests, out.is_delta, collectives, out.rpcs
    )


def _claims(source: Any, receiver: Receiver, delta: bool) -> list[list[int]]:
    """Return what `receiver.claim` returned on each rank. Raises on all ranks if one of them cannot take part."""
    error: Exception | None = None
    try:
        mine = receiver.claim(source, delta)
    except (DynatrainError, RuntimeError, OSError) as failed:
        error, mine = failed, (FAILED, 0, 0)
    table = torch.empty(source.world_size, 3, dtype=torch.int64)
    td.all_gather_into_tensor(table, torch.tensor([mine], dtype=torch.int64))
    if error is not None:
        raise error
    rows: list[list[int]] = table.tolist()
    if failing := [rank for rank, row in enumerate(rows) if row[0] == FAILED]:
        raise TransferError(f"ranks {failing} cannot reach the receiver: see their errors; nothing was sent")
    return rows
