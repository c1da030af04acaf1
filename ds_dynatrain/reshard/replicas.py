"""Replicas that have drifted apart: whole tensors that several pipeline stages or tensor ranks each compute for
themselves.

Norms under tensor parallelism and tied weights are equal because each rank computes the same values, not because they
communicate. On accelerators, their last digits may therefore differ. If digests differ before the moves, every holder
receives the values of the tensor's owner and compares them with its own. If all differences are within the tolerance,
all holders adopt the owner's values before anything is read; otherwise the switch fails. Copies along the data axis are
equal because gradients are reduced over them, and are not handled here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.space import VirtualParameterSpace
from ds_dynatrain.space.interval import Ints
from ds_dynatrain.transfer import Transport

TAG = 3
NAMED = 3
"""Maximum number of tensors that a message names. Further tensors are only counted."""


Distances = dict[str, dict[str, float]]
"""For each state kind and tensor name, the largest difference between a rank's values and the owner's, as a fraction of
the owner's largest absolute value."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of tensors that rank `holder` has a replica of and rank `owner` owns: elements [start[i], stop[i]) of
    tensor[i]."""

    kind: str
    holder: int
    owner: int
    tensor: Ints
    start: Ints
    stop: Ints


@dataclass
class Settlement:
    """Record of how one rank's drifted replicas were overwritten with the values of their owners.

    before: pairs of overwritten memory and its earlier values.
    distances: how far the replicas were from their owners' values; see `Distances`.
    """

    before: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    distances: Distances = field(default_factory=dict)

    def take(self, kind: str, name: str, held: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite a part of this rank's replica with the owner's values, and save the old values.

        kind: the state kind.
        name: the name of the tensor.
        held: the memory of this part.
        values: the owner's values.
        """
        own, of_kind = held.clone(), self.distances.setdefault(kind, {})
        self.before.append((held, own))
        of_kind[name] = max(of_kind.get(name, 0.0), distance(own, values))
        held.copy_(values)

    def undo(self) -> None:
        """Restore this rank's own values. The order is reversed, because two state kinds may share memory."""
        while self.before:
            held, own = self.before.pop()
            held.copy_(own)

    def take_owners(
        self,
        vps: VirtualParameterSpace,
        rank: int,
        buffers: Buffers,
        drifting: Mapping[str, list[int]],
        transport: Transport,
        seconds: float,
    ) -> None:
        """Overwrite drifted replicas with their owners' values. Called on each rank of the current layout.

        buffers: this rank's buffers.
        drifting: for each state kind, the numbers of the tensors that drifted; the same on all ranks.
        seconds: the timeout, after which this raises the transport's error.
        """
        deadline = time.monotonic() + seconds
        sends, receives = [], []
        for parts in (part for kind, tensors in sorted(drifting.items()) for part in _exchanged(vps, kind, tensors)):
            if rank == parts.owner:
                _, views = _views(vps, parts, rank, buffers)
                sends.append(transport.send(torch.cat(views), vps.members[parts.holder], TAG))
            elif rank == parts.holder:
                numbers, views = _views(vps, parts, rank, buffers)
                names = [vps.tensors[number].name for number in numbers]
                room = torch.empty_like(torch.cat(views))
                arrival = transport.receive(room, vps.members[parts.owner], TAG)
                receives.append((parts.kind, names, views, room, arrival))
        for handle in sends:
            handle.wait(deadline)
        for kind, names, views, room, handle in receives:
            handle.wait(deadline)
            for name, held, values in zip(names, views, room.split([len(view) for view in views]), strict=True):
                self.take(kind, name, held, values)


def furthest(one: Distances, other: Distances) -> Distances:
    """Merge the distances measured by two groups of ranks: take the larger one for each tensor."""
    kinds = {kind: (one.get(kind, {}), other.get(kind, {})) for kind in {**one, **other}}
    return {
        kind: {name: max(mine.get(name, 0.0), theirs.get(name, 0.0)) for name in {**mine, **theirs}}
        for kind, (mine, theirs) in kinds.items()
    }


def judge(distances: Distances, tolerance: float, types: Mapping[str, torch.dtype]) -> str:
    """Return a warning that replicas have drifted apart and were set to their owners' values.

    Raises CertificateError if a replica has drifted by more than the tolerance.

    distances: for each tensor, the largest distance over all ranks.
    types: the dtype of each state kind. Values of a low-precision kind may differ by one rounding step of its dtype,
        because masters within the tolerance may be cast to neighboring values.
    """
    far_of = {(kind, name): far for kind, found in distances.items() for name, far in found.items()}
    for (kind, name), far in far_of.items():
        allowed = max(tolerance, torch.finfo(types[kind]).eps)
        if not far <= allowed:
            raise CertificateError(
                f"replicas of the {kind} of {name!r} on several pipeline stages or tensor ranks differ by {far:.1e} of "
                f"its largest value, and {allowed:.1e} is allowed: train on from a checkpoint, or, if that much is "
                "harmless, raise dynatrain.replica_tolerance"
            )
    named = sorted(f"{kind} of {name!r}" for kind, name in far_of)
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return (
        f"replicas of the {', '.join(named[:NAMED])}{more} had drifted apart by up to {max(far_of.values()):.1e} of "
        "their largest value: those of one rank were taken for all"
    )


def distance(own: torch.Tensor, owners: torch.Tensor) -> float:
    """Return the largest difference between a replica and its owner's values, as a fraction of the owner's largest
    absolute value.

    The result is infinite if a value is not finite. It is huge if all of the owner's values are 0 but the replica's are
    not.
    """
    if torch.equal(own, owners):
        return 0.0
    far = float((own.double() - owners.double()).abs().max()) / max(float(owners.double().abs().max()), 1e-300)
    return far if math.isfinite(far) else math.inf


def _exchanged(vps: VirtualParameterSpace, kind: str, tensors: list[int]) -> Iterator[Parts]:
    """Yield all parts of drifted tensors that one rank holds and another one owns, in the same order on all ranks."""
    for holder in range(vps.layout.world_size):
        number, held = vps.split_by_tensor(vps.holding(vps.layout, holder, kind))
        wanted = np.flatnonzero(np.isin(number, tensors))
        row, start, stop, owner = vps.sharding(vps.layout, kind).owners(held.start[wanted], held.stop[wanted])
        for other in sorted(set(owner.tolist()) - {holder}):
            mine = owner == other
            yield Parts(kind, holder, other, number[wanted][row[mine]], start[mine], stop[mine])


def _views(
    vps: VirtualParameterSpace, parts: Parts, rank: int, buffers: Buffers
) -> tuple[list[int], list[torch.Tensor]]:
    """Return the memory on a rank of all parts, piece by piece, and the tensor number of each piece."""
    sharding = vps.sharding(vps.layout, parts.kind)
    places = sharding.place(parts.start, parts.stop, np.full(len(parts.start), rank))
    row, low, high, buffer, offset, _ = (column.tolist() for column in places)
    held = [buffers[parts.kind, sharding.buffers[index]].detach() for index in buffer]
    views = [each[at : at + stop - start] for each, at, start, stop in zip(held, offset, low, high, strict=True)]
    return parts.tensor[row].tolist(), views
