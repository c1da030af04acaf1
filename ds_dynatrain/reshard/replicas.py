"""Replicas that drifted: tensors that pipeline stages or tensor ranks hold whole, and compute each for itself.

Norms under tensor parallelism and tied weights are equal by arithmetic, not by a message: on an accelerator their last
digits may differ. If digests differ before the moves, every holder gets its owner's values and compares them with its
own. Within the tolerance all take the owner's, before anything is read; beyond it the switch fails. Copies along the
data axis are equal by a reduction, and are not handled here.
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
"""Tensors that a message names; the others it counts."""


Distances = dict[str, dict[str, float]]
"""By kind and tensor, how far a rank's values were from the owners' at most: a share of the owner's largest value."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Runs [start[i], stop[i]) of tensors tensor[i], which the rank `holder` has and the rank `owner` owns."""

    kind: str
    holder: int
    owner: int
    tensor: Ints
    start: Ints
    stop: Ints


@dataclass
class Settlement:
    """Changes made on one rank. before: (memory, its earlier values). distances: see `Distances`."""

    before: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    distances: Distances = field(default_factory=dict)

    def take(self, kind: str, name: str, held: torch.Tensor, values: torch.Tensor) -> None:
        """Write an owner's values of a part of a tensor over this rank's, and keep these."""
        own, of_kind = held.clone(), self.distances.setdefault(kind, {})
        self.before.append((held, own))
        of_kind[name] = max(of_kind.get(name, 0.0), distance(own, values))
        held.copy_(values)

    def undo(self) -> None:
        """Put this rank's own values back; the last ones first, as memory of two kinds may be the same."""
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
        """Give every holder the owner's values of the tensors that drifted; each rank of the present layout calls it.

        buffers: this rank's, which are written to. drifting: kind -> tensor numbers, the same on all ranks. Raises as
        the transport does when `seconds` have passed.
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
    """Return the larger distance of each tensor in two parts of the ranks."""
    kinds = {kind: (one.get(kind, {}), other.get(kind, {})) for kind in {**one, **other}}
    return {
        kind: {name: max(mine.get(name, 0.0), theirs.get(name, 0.0)) for name in {**mine, **theirs}}
        for kind, (mine, theirs) in kinds.items()
    }


def judge(distances: Distances, tolerance: float, types: Mapping[str, torch.dtype]) -> str:
    """Return a warning of replicas that were set to their owners' values; raise CertificateError if one was too far
    off.

    distances: the furthest of all ranks. types: of each kind. A kind of few bits may differ by one of its own steps, as
    a cast of masters within the tolerance may.
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
    """Return the largest difference, as a share of the owner's largest value; infinite if one is not finite or all are
    0.
    """
    if torch.equal(own, owners):
        return 0.0
    far = float((own.double() - owners.double()).abs().max()) / max(float(owners.double().abs().max()), 1e-300)
    return far if math.isfinite(far) else math.inf


def _exchanged(vps: VirtualParameterSpace, kind: str, tensors: list[int]) -> Iterator[Parts]:
    """Yield all parts of replicas that a rank holds and another one owns, in one order on all ranks."""
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
    """Return (tensor, memory on a rank) of each piece of the parts, in their order."""
    sharding = vps.sharding(vps.layout, parts.kind)
    places = sharding.place(parts.start, parts.stop, np.full(len(parts.start), rank))
    row, low, high, buffer, offset = (column.tolist() for column in places)
    held = [buffers[parts.kind, sharding.buffers[index]].detach() for index in buffer]
    views = [each[at : at + stop - start] for each, at, start, stop in zip(held, offset, low, high, strict=True)]
    return parts.tensor[row].tolist(), views
