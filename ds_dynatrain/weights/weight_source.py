"""`WeightSource`: yields a trainer's weights as full tensors, bucket by bucket, or as the parts that this rank has.

The class has the methods of vLLM's class of the same name, without importing vLLM.

Shards are described as in torch's `DTensor`. The mesh has the axis that ZeRO divides (data x sequence), and the tensor
axis if that has more than one rank. ZeRO stages 0 to 2 replicate weights. Stage 3 cuts dimension 0 if each rank's part
is whole rows. Weights in pipelines, experts, and tensors that AutoTP cuts in several blocks or unevenly cannot be
described this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import Replicate, Shard

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.checkpoint.extents import Extent, placed
from ds_dynatrain.engine.discarded import DISCARDED
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import CensusError, ConfigError, MemberMissing, WeightsError, WorldChanged
from ds_dynatrain.membership.session import ASK_ALL, Session
from ds_dynatrain.reshard.swap import check_census
from ds_dynatrain.space import WEIGHT, BufferId, DimCut, Layout, VirtualParameterSpace, of_kind
from ds_dynatrain.weights.buckets import PACKED, Gathering, assembled, bucketed, pieces_of
from ds_dynatrain.weights.naming import outputs_of
from ds_dynatrain.weights.outputs import Names, Output, ParamMeta

FullOn = Literal["first", "all", "none"]


def source(
    engine: Any,
    names: Names = "hf",
    full_on: FullOn = "first",
    bucket_bytes: int | None = None,
    *,
    poison: bool = False,
) -> WeightSource:
    """Return a source of an engine's weights in its current world. Call this on every working member, and again after
    every switch.

    names: "hf" for the names in the model's Hugging Face checkpoint; or a mapping or function from the model's own
        parameter names to others, for example for a PipelineModule, which names parameters by the numbers of their
        layers.
    full_on: the ranks on which `iter_full` yields tensors with values: the "first", "all", or "none".
    bucket_bytes: the maximum number of bytes that are gathered at once; by default, a layer is gathered.
    poison: whether to overwrite each tensor with NaN when the next one is requested, to find code that keeps a tensor
        too long.
    """
    parts: EngineParts = engine._parts
    if full_on not in get_args(FullOn):
        raise ConfigError(f"full_on={full_on!r}; give one of {', '.join(map(repr, get_args(FullOn)))}")
    if parts.idle:
        raise WeightsError(
            "source: this member is idle and holds no weights; call it on the working members, where engine.idle is "
            "false"
        )
    return WeightSource(parts, names, full_on, bucket_bytes, poison)


class WeightSource:
    """The weights of one world of an engine. Made by `source`.

    step: number of optimizer steps done when the source was made. Iterating yields the weights at the time of
        iteration.
    layout, rank, world_size: describe the world in which the source was made.
    dtype: the type of all tensors.
    collectives: number of collectives that the last `iter_full` has used so far.
    """

    def __init__(
        self, engine: EngineParts, names: Names, full_on: FullOn, bucket_bytes: int | None, poison: bool
    ) -> None:
        self._engine, self._full_on, self._poison = engine, full_on, poison
        self._bucket_bytes = bucket_bytes
        self._vps, self._generation = engine.vps, engine.generation
        self.step, self.layout, self.rank = engine.global_steps, engine.layout, engine.rank
        self.world_size, self.collectives = engine.layout.world_size, 0
        self.dtype = engine.host.model_map.dtype
        host = engine.host
        self._outputs = outputs_of(host.module, host.shaper, self._vps.tensors, engine.job.has_stages, names)

    # ---- what there is -----------------------------------------------------------------------------------------------

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Descriptions of all output tensors, in the order of iteration. They are the same on every rank."""
        owners = tuple(range(self.world_size))
        found = []
        for output, form in zip(self._outputs, self._forms, strict=True):
            cut = (None, None) if form is None else (form.mesh_shape, form.placements)
            found.append(ParamMeta(output.name, self.dtype, output.shape, owners, *cut))
        return found

    @cached_property
    def _forms(self) -> list[LocalForm | None]:
        return [form_of(self._vps, self.layout, each) for each in self._outputs]

    def owned_names(self, rank: int) -> list[str]:
        """Return the names of the tensors that a rank takes part in sending, which are all tensors."""
        return [each.name for each in self.metadata if rank in (each.owners or ())]

    @cached_property
    def buckets(self) -> list[list[Output]]:
        """The output tensors, in the groups that `iter_full` gathers at once."""
        return bucketed(self._outputs, self.dtype.itemsize, self._bucket_bytes)

    @cached_property
    def _gatherings(self) -> list[Gathering]:
        vps, sharding = self._vps, self._vps.sharding(self.layout, WEIGHT)
        ranks = range({"first": 1, "all": sharding.ranks, "none": 0}[self._full_on])
        holdings = {rank: vps.holding(self.layout, rank, WEIGHT) for rank in ranks}
        owned = vps.owned(self.layout, self.rank, WEIGHT)
        return [
            Gathering.of(vps.line, sharding, self.rank, (t for each in bucket for t in each.tensors), owned, holdings)
            for bucket in self.buckets
        ]

    # ---- full tensors ------------------------------------------------------------------------------------------------

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) in the order of `metadata`. All ranks iterate together, to the end.

        A tensor must not be written to, and may be changed or freed when the next one is requested. On ranks without
        values (see `full_on`) the tensor is on the meta device. Raises WeightsError, on all ranks alike, if the world
        has changed, a global batch is open, or the weights are not where the layout says.
        """
        self._check_world("source.iter_full")
        engine, self.collectives = self._engine, 0
        _, buffers = agreed_buffers(engine, "source.iter_full", engine.in_the_way(of_reading=True))
        live = of_kind(buffers, WEIGHT)
        like = next(iter(live.values()))
        sizes = [(each.sent, each.received) for each in self._gatherings]
        send, got = (
            torch.empty(max(of), dtype=self.dtype, device=like.device) for of in zip((0, 0), *sizes, strict=True)
        )
        for bucket, gathering in zip(self.buckets, self._gatherings, strict=True):
            if gathering.is_needed and engine.world is not None:
                self._check_world("source.iter_full")
                with engine.turn():
                    gathering.run(live, send, got, engine.world.default)
                self.collectives += 1
            memory = {**live, PACKED: got}
            for output in bucket:
                if gathering.parts is None:
                    tensor = torch.empty(output.shape, dtype=self.dtype, device="meta")
                else:
                    tensor = assembled(self._vps.line, output, gathering.parts, memory, like, self._poison)
                yield output.name, tensor
                if self._poison:
                    tensor.fill_(torch.nan)

    # ---- what this rank has ------------------------------------------------------------------------------------------

    @property
    def has_runs(self) -> bool:
        """Whether `runs` can yield all tensors, which it cannot if an adapter is merged into any tensor."""
        return not any(each.deltas for each in self._outputs)

    def runs(self) -> Iterator[tuple[str, Extent, torch.Tensor]]:
        """Yield (name, extent, values) of the elements that this rank owns, in the order of `metadata`. Does not
        communicate.

        Each element of an output tensor is owned by exactly one rank. The values are views of the weights, one row per
        run of the extent, and must not be written to.
        """
        live, line = self._live("source.runs"), self._vps.line
        owned = self._vps.owned(self.layout, self.rank, WEIGHT)
        if merged := next((each.name for each in self._outputs if each.deltas), None):
            raise WeightsError(
                f"source.runs: {merged!r} has an adapter added to it, which no rank holds; take source.iter_full(), or "
                'the adapter alone by source(engine, names="adapters")'
            )
        for output in self._outputs:
            for run in output.runs:
                pieces, shift = pieces_of(line, run, owned), run.at - run.start
                if len(pieces) > 2:
                    for _, extent, (values,) in placed(line, (pieces,), (dict(live),)):
                        yield output.name, replace(extent, start=extent.start + shift), values
                    continue
                for piece in pieces:  # too few to form a matrix
                    start, length = piece.start - int(line.bases[run.tensor]) + shift, piece.stop - piece.start
                    values = live[piece.buffer].detach().narrow(0, piece.offset, length)
                    yield output.name, Extent(start, length), values.view(1, length)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, this rank's shard) in the order of `metadata`, which has the placements. Does not communicate.

        Shards are views of the weights and must not be written to. Raises WeightsError, before the first one, if a
        tensor has no shards that `DTensor` can describe.
        """
        live = self._live("source.iter_local")
        pairs = list(zip(self._outputs, self._forms, strict=True))
        if other := next((output.name for output, form in pairs if form is None), None):
            raise WeightsError(
                f"source.iter_local: the ranks of {self.layout} do not hold {other!r} in equal blocks along one "
                "dimension; take source.iter_full(), or source.runs()"
            )
        held = self._vps.holding(self.layout, self.rank, WEIGHT)
        for output, form in pairs:
            if form is not None:
                pieces = pieces_of(self._vps.line, output.runs[0], held)
                first = next(iter(pieces))
                flat = live[first.buffer].detach().narrow(0, first.offset, pieces.numel)
                yield output.name, flat.view(form.shape)

    def _live(self, what: str) -> dict[BufferId, torch.Tensor]:
        """Return this rank's flat weights, without communication. Raises WeightsError if they cannot be read now."""
        self._check_world(what)
        engine = self._engine
        return of_kind(read_buffers(engine, what, engine.in_the_way(of_reading=True)), WEIGHT)

    def _check_world(self, what: str) -> None:
        """Raise WeightsError if the engine is no longer in the world in which the source was made."""
        engine = self._engine
        if engine.idle or engine.generation != self._generation or engine.vps.line is not self._vps.line:
            now = "no world" if engine.idle else f"generation {engine.generation}, {engine.layout}"
            raise WeightsError(
                f"{what}: the source was made in generation {self._generation}, {self.layout}, and the engine is in "
                f"{now}; call ds_dynatrain.weights.source(engine) again"
            )


# ---- shards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalForm:
    """The sharding of an output tensor: a placement for each axis of the mesh, and the shape of this rank's shard."""

    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]


def form_of(vps: VirtualParameterSpace, layout: Layout, output: Output) -> LocalForm | None:
    """Return the sharding of an output tensor; None if `DTensor` cannot describe it."""
    ranks = layout.data * layout.sequence
    if len(output.runs) != 1 or output.deltas or layout.pipe > 1:
        return None
    tensor = vps.tensors[output.runs[0].tensor]
    if tensor.shape != output.shape or (tensor.expert and layout.expert > 1):
        return None
    shape, mesh = list(output.shape), vps.mesh(layout)
    cut = None if mesh is None or layout.tensor == 1 else mesh.partition[output.runs[0].tensor].tensor
    if cut is not None:
        sizes = {*cut.blocks[0]} if isinstance(cut, DimCut) and len(cut.blocks) == 1 else set()
        if not isinstance(cut, DimCut) or sizes != {shape[cut.dim] / layout.tensor}:
            return None
        shape[cut.dim] //= layout.tensor
    data: Any = Replicate()
    if layout.zero_stage == 3:
        if not shape or (cut is not None and cut.dim == 0) or shape[0] % ranks:
            return None
        data, shape[0] = Shard(0), shape[0] // ranks
    if layout.tensor == 1:
        return LocalForm((ranks,), (data,), tuple(shape))
    return LocalForm((ranks, layout.tensor), (data, Replicate() if cut is None else Shard(cut.dim)), tuple(shape))


# ---- buffers ---------------------------------------------------------------------------------------------------------


def read_buffers(engine: EngineParts, what: str, in_the_way: str) -> Buffers:
    """Return this rank's buffers, without communication. Raises WeightsError if they cannot be read now.

    what: the name of the call, for messages.
    in_the_way: a reason that is already known; "" if there is none.
    """
    if in_the_way:
        raise WeightsError(f"{what}: {in_the_way}; call it after engine.step()")
    with engine.turn():
        buffers, _ = engine.host.state_buffers()
        try:
            check_census(engine.host, engine.vps, engine.rank, buffers, what)
        except CensusError as error:
            raise WeightsError(str(error)) from error
    return buffers


def agreed_buffers(engine: EngineParts, what: str, in_the_way: str) -> tuple[Session, Buffers]:
    """Return a session (a negotiation among all ranks) and this rank's buffers, if all ranks' buffers can be read.

    Called on all ranks. Raises WeightsError, on all ranks alike, if one rank's buffers cannot be read. Raises
    WorldChanged in a discarded global batch, because new members do not take part in it and would not answer.
    """
    if engine.is_discarded:
        raise WorldChanged(f"{what}: {'; '.join(DISCARDED)}")
    session = Session(engine.control, f"weights/{engine.place_in_training()}", engine.members, what)
    problem, buffers = "", Buffers()
    try:
        buffers = read_buffers(engine, what, in_the_way)
    except WeightsError as error:
        problem = str(error)
    try:
        said = session.all("ready", problem)
    except MemberMissing as missing:
        raise WeightsError(f"{missing}; {ASK_ALL}") from missing
    raise_first(said, "")
    engine.agree()
    return session, buffers


def raise_first(said: dict[int, str], end: str, cause: Exception | None = None) -> None:
    """Raise WeightsError with the first problem that a member has reported, if there is one.

    said: the problem of each member; "" if it has none.
    end: text to add to the message.
    cause: the exception to chain to the error.
    """
    for member, problem in sorted(said.items()):
        if problem:
            raise WeightsError(f"member {member}: {problem}{end}") from cause
