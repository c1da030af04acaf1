"""What one member has to say and to write of a save: after it was taken, the engine is not looked at any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.checkpoint import HostMemory, Record, Share, record, shares_of
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.carry import rest_carry, shared_carry
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.checkpoints.extra_state import packed
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.digests import SideDigests, side_digests
from ds_dynatrain.engine.encoding import encode, fingerprint
from ds_dynatrain.engine.registration import registration_of
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.space import Layout, VirtualParameterSpace

Exchange = Callable[[dict[str, Any]], Mapping[int, Any]]
"""Post a record; those of all working members, by member."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A member's part of a save. own: what goes into its own small file. record: without the sums of the files.

    replicas: computes the digests of what other members hold copies of; None where the values go on changing.
    """

    rank: int
    shares: list[Share]
    own: dict[str, Any]
    record: Record
    replicas: Callable[[], SideDigests] | None = None

    @staticmethod
    def take(engine: EngineCore, exchange: Exchange, memory: HostMemory | None) -> Snapshot:
        """Look at everything; with `memory`, values are copied there, else they must stay until they are written.

        CheckpointError if the carry differs between members, CensusError if DeepSpeed keeps its state elsewhere,
        ConfigError for an object that cannot be saved.
        """
        rank = engine.rank
        engine.host.settle_parameters()
        buffers, scalars = engine.host.state_buffers()
        check_census(engine.host, engine.vps, rank, buffers, "before saving")
        shared, rest = shared_carry(engine, scalars), rest_carry(engine)
        mine = {
            "shared": fingerprint(shared),
            "rest": fingerprint(rest),
            "kinds": sorted({kind for kind, _ in buffers}),
        }
        found = exchange(mine)
        rests, kinds = _compared(engine, found)
        shares = list(
            shares_of(engine.vps, engine.layout, rank, buffers, tuple(k for k in kinds if k in mine["kinds"]))
        )
        own: dict[str, Any] = {"streams": streams.capture(), "rest": None}
        if rests[rank] == rank:
            own["rest"], tensors = packed(rank, rest)
            shares += tensors
        said = Record(
            step=engine.global_steps,
            layout=engine.layout.to_dict(),
            generation=engine.generation,
            seed=engine.job.job_seed,
            kinds=kinds,
            tensors=[(each.name, list(each.shape), each.group, each.expert) for each in engine.vps.tensors],
            carry=plain({**shared, "registration": registration_of(engine).to_json()}),
            rests=rests,
            sums={},
            sizes={},
            written_by=record.writer(),
        )
        if memory is not None:
            return Snapshot(rank, memory.copies(shares), own, said)
        return Snapshot(rank, shares, own, said, partial(_copied, engine.vps, engine.layout, rank, buffers))


def _copied(vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers) -> SideDigests:
    """Digests of the state kinds of which several ranks hold the same elements."""
    several = vps.mesh(layout) is not None
    held = {kind for kind, _ in buffers if several or vps.is_replicated(layout, kind)}
    kinds = tuple(kind for kind in vps.present_kinds(layout) if kind in held)
    return side_digests(vps, layout, rank, buffers, kinds)[0]


def plain(shared: dict[str, Any]) -> Any:
    """A shared carry, encoded; CheckpointError if there is a tensor in it."""
    tensors: list[torch.Tensor] = []
    encoded = encode(shared, tensors)
    if tensors:
        raise CheckpointError(
            "a hyper-parameter or the scheduler's state is a tensor or numpy value; give plain numbers"
        )
    return encoded


def _compared(engine: EngineCore, found: Mapping[int, Any]) -> tuple[list[int], list[str]]:
    """(for each rank the first one whose rest is the same, the state kinds that some member has)."""
    first, *others = engine.members
    for member in others:
        if found[member]["shared"] != found[first]["shared"]:
            raise CheckpointError(
                f"hyper-parameters, counters, the scheduler or a loader's position of member {member} are not those "
                f"of member {first}; change them on all members alike"
            )
    prints = [found[member]["rest"] for member in engine.members]
    held = {kind for each in found.values() for kind in each["kinds"]}
    return [prints.index(each) for each in prints], [kind for kind in engine.vps.present_kinds() if kind in held]
