"""`engine.load_weights`: writes full tensors into weights and masters, in any layout.

Each member first fills copies of its own buffers, so an error on any member leaves all weights unchanged. Once all
members have received everything, the copies are written to the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.groups.device import compute_device
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.checkpoint.extents import WORD
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import WeightsError, WorldChanged
from ds_dynatrain.membership.session import Session
from ds_dynatrain.report import logger
from ds_dynatrain.space import MASTER, WEIGHT, of_kind
from ds_dynatrain.transfer import digest
from ds_dynatrain.weights.buckets import matched
from ds_dynatrain.weights.naming import is_peft, outputs_of, persistent_buffers
from ds_dynatrain.weights.outputs import Output, batches
from ds_dynatrain.weights.weight_source import agreed_buffers, raise_first

SEND_BYTES = 64 << 20
"""Maximum number of bytes of tensors that rank 0 sends at once. A larger tensor is sent alone."""
CALL = "load_weights"
AS_BEFORE = "; the weights are as before"
Pairs = Iterable[tuple[str, torch.Tensor]]


def load_weights(engine: Any, weights: Pairs | None) -> None:
    """Replace the weights and masters of an engine. Implements `DynatrainEngine.load_weights`."""
    parts: EngineParts = engine._parts
    if parts.idle:
        raise WeightsError(f"{CALL}: this member is idle and holds no weights; call it where engine.idle is false")
    session, buffers = agreed_buffers(parts, CALL, parts.in_the_way())
    given = session.all("given", weights is not None)
    without = [member for member in parts.members if not given[member]]
    if without not in ([], list(parts.members[1:])):
        raise WeightsError(
            f"{CALL}: member {without[0]} gave None and others gave weights; give the same on all members, or None on "
            "all but rank 0"
        )
    staged, problem, cause = StagedWeights(parts, buffers), "", None
    stream = _sent(weights) if without else iter(weights or ())
    try:
        staged.take(stream)
    except WorldChanged:
        raise
    # includes errors of the caller's iterator; the other members wait for this member's report
    except Exception as error:
        problem, cause = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}", error
        _drain(stream)
    patient = Session(parts.control, f"{session.key}/taken", parts.members, CALL, is_patient=True)
    said = patient.all("weights", {"problem": problem, "digest": f"{staged.digest & WORD:016x}"})
    raise_first({member: each["problem"] for member, each in said.items()}, AS_BEFORE, cause)
    first, *others = parts.members
    if differing := [member for member in others if said[member]["digest"] != said[first]["digest"]]:
        raise WeightsError(
            f"{CALL}: members {first} and {differing[0]} gave different values; give the same{AS_BEFORE}"
        )
    parts.begin_segment()
    parts.host.settle_parameters()
    staged.write()


class StagedWeights:
    """Copies of this member's weights and masters, which receive the new values before the originals do."""

    def __init__(self, engine: EngineParts, buffers: Buffers) -> None:
        self._vps, layout, rank = engine.vps, engine.layout, engine.rank
        self._live = {key: held for key, held in buffers.items() if key[0] in (WEIGHT, MASTER)}
        # with fp32, a weight and its master may share memory
        places = {key: (held.data_ptr(), held.numel()) for key, held in self._live.items()}
        self._places, self._copies = places, Buffers()
        self._holding = {kind: self._vps.holding(layout, rank, kind) for kind in {kind for kind, _ in self._live}}
        names = "adapters" if is_peft(engine.host.module) else "hf"
        outputs = outputs_of(engine.host.module, engine.host.shaper, self._vps.tensors, engine.job.has_stages, names)
        self._outputs = {each.name: each for each in outputs}
        self._ties = _ties(engine.host.module, self._outputs)
        self._buffers = dict[str, torch.Tensor]() if engine.job.has_stages else persistent_buffers(engine.host.module)
        self._new_buffers = dict[str, torch.Tensor]()
        self.digest = 0
        """Sum of the digests of all tensors that were copied, in their given types."""

    def take(self, weights: Pairs) -> None:
        """Write all given tensors into the copies. Raises WeightsError if a tensor is unknown, missing, of a wrong
        shape, or given twice with different values.
        """
        copies = {self._places[key]: held.detach().clone() for key, held in self._live.items()}
        self._copies = {key: copies[place] for key, place in self._places.items()}
        taken = dict[str, str]()
        for given, tensor in weights:
            name = self._ties.get(given, given)
            if name in self._buffers:
                self._take_buffer(name, tensor)
                continue
            if name not in self._outputs:
                near = get_close_matches(given, self._outputs, 1, 0) or ["none"]
                raise WeightsError(
                    f"there is no tensor {given!r} among {len(self._outputs)}; give names such as {near[0]!r}, as "
                    "save_pretrained writes them"
                )
            output = self._outputs[name]
            if tensor.shape != output.shape or tensor.is_meta or not tensor.is_floating_point():
                there = "on the meta device" if tensor.is_meta else f"{tensor.dtype} of {tuple(tensor.shape)}"
                raise WeightsError(
                    f"{given!r} is {there}, and {output.shape} floating-point values are expected; give the full tensor"
                )
            flat = tensor.detach().reshape(-1)
            self.digest += digest(flat, int(self._vps.bases[output.runs[0].tensor]) + output.runs[0].start)
            for kind, pieces in self._holding.items():
                for mine, its in matched(self._vps.line, output, pieces, of_kind(self._copies, kind), flat):
                    if name not in taken:
                        mine.copy_(its)
                    elif not torch.equal(mine, its.to(mine)):
                        raise WeightsError(
                            f"{taken[name]!r} and {given!r} are one tensor, and have two values; give one"
                        )
            taken[name] = given
        if missing := [name for name in self._outputs if name not in taken]:
            raise WeightsError(f"{len(missing)} of {len(self._outputs)} tensors are missing, such as {missing[0]!r}")

    def _take_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of the new value of one of the module's persistent buffers. Other buffers keep their values."""
        if tensor.shape != self._buffers[name].shape or tensor.is_meta:
            raise WeightsError(
                f"buffer {name!r} is of {tuple(tensor.shape)}, and {tuple(self._buffers[name].shape)} is expected"
            )
        self._new_buffers[name] = tensor.detach().to(self._buffers[name], copy=True)
        self.digest += digest(self._new_buffers[name].reshape(-1))

    def write(self) -> None:
        """Write the copies over this member's weights, masters and module buffers."""
        with torch.no_grad():
            for key, held in self._live.items():
                held.copy_(self._copies[key])
            for name, held in self._new_buffers.items():
                self._buffers[name].copy_(held)


def _ties(module: Any, outputs: Mapping[str, Output]) -> dict[str, str]:
    """Return a map from each additional name of a tied parameter to its output name. A state dict may contain both
    names.
    """
    first = {id(held): name for name, held in module.named_parameters()}
    every = {name: first[id(held)] for name, held in module.named_parameters(remove_duplicate=False)}
    return {
        name: other
        for one, two in every.items()
        for name, other in ((one, two), (two, one))
        if name not in outputs and other in outputs
    }


def _drain(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Read a stream to its end after an error, because members without the error also read it to the end."""
    try:
        for _ in stream:
            pass
    except WorldChanged:
        raise
    except Exception as error:
        logger.debug("%s: a second error, after the one that is reported: %s", CALL, error)


def _sent(weights: Pairs | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield rank 0's tensors on all ranks. All ranks must iterate together.

    A tensor is valid until the next one is requested. If rank 0's iterator fails, or one rank has no memory for a
    batch, that rank raises its error and all others raise WeightsError.
    """
    group, device = td.group.WORLD, compute_device()
    copies, failed = None if weights is None else _copies(weights), torch.zeros(1, device=device)
    given = None if copies is None else batches(copies, lambda pair: pair[1].nbytes, SEND_BYTES)
    while True:
        said: list[Any] = [None]
        batch: list[tuple[str, torch.Tensor]] = []
        error: Exception | None = None
        if given is not None:
            try:
                batch = next(given, [])
                said = [[(name, held.dtype, tuple(held.shape)) for name, held in batch]]
            except Exception as found:  # the other ranks wait for the next batch
                said, error = [f"{type(found).__name__}: {found}"], found
        td.broadcast_object_list(said, group=group, group_src=0, device=device)
        if isinstance(said[0], str):
            raise error or WeightsError(f"rank 0: {said[0]}")
        if not said[0]:
            return
        try:
            sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in said[0]]
            flats = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            for flat, (_, held) in zip(flats, batch, strict=False):
                flat.copy_(held.contiguous().reshape(-1).view(torch.uint8))
        except RuntimeError as found:  # out of memory; the other ranks would wait in the broadcast
            error = found
        failed.fill_(error is not None)
        td.all_reduce(failed, group=group)
        if failed.item():
            raise error or WeightsError(f"{int(failed)} other ranks have no room for a batch: see their errors")
        for flat, (name, dtype, shape) in zip(flats, said[0], strict=True):
            td.broadcast(flat, group=group, group_src=0)
            yield name, flat.view(dtype).view(shape)


def _copies(weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the tensors, because the caller's iterator may reuse a tensor's memory for the next one."""
    for name, tensor in weights:
        if tensor.is_meta:
            raise WeightsError(f"{name!r} is on the meta device; give the full tensor")
        yield name, tensor.detach().clone()
