"""A DeepSpeed checkpoint as rows of a manifest: its buffers are those that the space predicts for its layout.

What lies at which place in which buffer is not read from the checkpoint: it follows from the layout, as for living
ranks. What the files say of themselves (names, sizes) is compared with it, and nothing is believed that does not agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.checkpoint.extents import Extent, placed
from ds_dynatrain.checkpoint.files import WHERE_DAMAGED
from ds_dynatrain.checkpoint.manifest import Manifest, Row
from ds_dynatrain.checkpoint.others.torch_files import Stored
from ds_dynatrain.checkpoint.others.zero_files import OptimizerFile, ZeroFolder
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, LayoutError
from ds_dynatrain.space import (
    MASTER,
    WEIGHT,
    BufferId,
    Layout,
    Pieces,
    VirtualParameterSpace,
    ZeroRules,
    row_of,
)
from ds_dynatrain.space.tensor import Line
from ds_dynatrain.space.zero import LocalSpace, flat_order

SUB_GROUP_SIZE = 10**9
"""DeepSpeed's own default."""
ALIGNED_BYTES = 16
"""What `parameter_alignment` rounds the start of a tensor up to."""
Held = dict[tuple[str, BufferId], Stored]


def rows_of(folder: ZeroFolder, vps: VirtualParameterSpace, weight: torch.dtype) -> list[Row]:
    """Where every element of masters, moments and frozen weights lies; trained weights are casts of their masters.

    vps: of `then`. weight: the type of weights that are cast. Digests are left 0. Frozen weights that it was saved
    without have no rows (`frozen_left_out`). CheckpointError, naming the parameter, for a checkpoint of another model.
    """
    layout = vps.layout
    rows = [
        Row(each.name, WEIGHT, name_of(weight), each.shape, Extent(0, each.numel, 0, 1), "", 0, 0)
        for each in vps.tensors
        if each.trainable and each.numel
    ]
    for rank in range(layout.world_size):
        local, part = vps.local(layout, rank), part_of(layout, rank)
        check_names(folder, part, local)
        held = held_by(folder, part, local)
        present = {kind for kind, _ in held}
        for kind in vps.present_kinds(layout):
            if kind in present:
                pieces = vps.owned(layout, rank, kind)
                if kind == WEIGHT:
                    pieces = _of_frozen(vps.line, pieces, held)
                rows += _rows(vps, kind, pieces, held)
    return rows


def frozen_left_out(vps: VirtualParameterSpace, manifest: Manifest) -> tuple[int, ...]:
    """Numbers of the frozen tensors that a checkpoint was saved without."""
    return tuple(
        number
        for number, each in enumerate(vps.tensors)
        if not each.trainable and each.numel and (each.name, WEIGHT) not in manifest.rows
    )


def layout_of(folder: ZeroFolder) -> Layout:
    """The layout that a checkpoint was saved in; sequence ranks count as data ranks, since ZeRO cuts over both."""
    axis = "pipe" if folder.layers else "tensor"
    return Layout(zero_stage=folder.stage, data=folder.ranks).replace(**{axis: folder.parts})


def rules_then(folder: ZeroFolder, rules: ZeroRules) -> ZeroRules:
    """The rules of a training, with the numbers of the configuration that the checkpoint was saved under."""
    raw = folder.optimizer(0, 0).raw
    zero = folder.config.get("zero_optimization") or {}
    plain = frozenset({1, 2} if "zero_stage" in raw else ())  # BF16_Optimizer knows neither option
    low = any((folder.config.get(name) or {}).get("enabled") for name in ("bf16", "bfloat16", "fp16"))
    try:
        size = int(zero.get("sub_group_size", SUB_GROUP_SIZE))
    except (TypeError, ValueError):
        raise CheckpointError(
            f"sub_group_size was {zero['sub_group_size']!r}, which is no number; {WHERE_DAMAGED}"
        ) from None
    return replace(
        rules,
        sub_group_size=size,
        flat_without_zero="fp32_groups_flat" in raw,
        parts_without_zero=False,
        round_robin_stages=plain if zero.get("round_robin_gradients") else frozenset(),
        aligned_stages=plain if any(map(any, raw.get("param_alignment_paddings") or ())) else frozenset(),
        weight_alignment=ALIGNED_BYTES // (2 if low else 4),
    )


def then(folder: ZeroFolder, vps: VirtualParameterSpace) -> VirtualParameterSpace:
    """The space of the same model under the layout and rules that a checkpoint was saved under.

    CheckpointError for a layout that the model cannot have, or states that are not read here.
    """
    folder.check_ranks()
    layout = layout_of(folder)
    rules, members = rules_then(folder, vps.rules), tuple(range(layout.world_size))
    if any(kind.overlaps(layout) for kind in vps.kinds):
        raise CheckpointError(
            "states of whole tensors (Muon's) are not read from a checkpoint of DeepSpeed's; load it with DeepSpeed "
            "in the layout that wrote it, and save it with engine.save"
        )
    space = VirtualParameterSpace(vps.line, rules, vps.kinds, layout, members, vps.partitioner)
    try:
        space.mesh(layout)
    except LayoutError as error:
        raise CheckpointError(
            f"it was saved in {layout}, which this model cannot have: {error}; load it in the job that saved it, and "
            "save it with engine.save"
        ) from None
    return space


def part_of(layout: Layout, rank: int) -> int:
    """The model-parallel rank in DeepSpeed's file names: stages, and tensor ranks in them."""
    place = layout.coordinate(rank)
    return place["pipe"] * layout.tensor + place["tensor"]


def check_names(folder: ZeroFolder, part: int, local: LocalSpace) -> None:
    """CheckpointError, naming the parameter, unless the local tensors are those that were saved, in this order."""
    said = folder.shapes(part)
    if said is None:
        return
    there = {name: shape for group in said for name, shape in group.items()}
    here = {each.name: each.shape for each in local.tensors if each.trainable and each.numel}
    for name, shape in there.items():
        if here.get(name) != shape:
            mine = f"one of {here[name]}" if name in here else "no such trained parameter"
            raise CheckpointError(
                f"it has {name!r} {shape}, and this model has {mine}; build the model of the job that saved it"
            )
    missing = [name for name in here if name not in there]
    if missing:
        raise CheckpointError(
            f"this model trains {missing[0]!r}, which was not trained there; freeze it, as in the job that saved it"
        )
    for wanted, found in zip(_order(local), there, strict=True):
        if wanted != found:
            raise CheckpointError(
                f"its optimizer has {found!r} where this one has {wanted!r}; build the same groups, in the same order"
            )


def _order(local: LocalSpace) -> Iterator[str]:
    """Names of the trained local tensors in the order of the optimizer's buffers."""
    groups = sorted({each.group for each in local.tensors if each.trainable and each.numel})
    flat = local.layout.zero_stage in (1, 2)
    for group in groups:
        if flat:
            for number in flat_order(local.line, local.rules, local.layout, group)[0].tolist():
                yield local.tensors[number].name
        else:
            yield from (each.name for each in local.tensors if each.group == group and each.numel)


def held_by(folder: ZeroFolder, part: int, local: LocalSpace) -> Held:
    """The buffers of one rank that are in the checkpoint, under the names that the space has for them."""
    rank = local.zero_rank
    file = folder.optimizer(part, rank)
    whole = {number: tensor for number, tensor in enumerate(local.tensors) if tensor.trainable and tensor.numel}
    frozen = _frozen(folder, part, rank, local)
    groups = sorted({tensor.group for tensor in whole.values()})
    if folder.stage == 3:
        names = [BufferId("subgroup", number) for number in range(len(file.masters))]
    elif folder.stage or "fp32_groups_flat" in file.raw:
        names = [BufferId("group", group) for group in groups]
    else:
        names = [BufferId("tensor", number) for number in whole]
    masters = file.masters or _from_module(folder, part, local, list(whole))
    if len(names) != len(masters):
        raise CheckpointError(
            f"it has {len(masters)} buffers of masters, and this model would have {len(names)}; build the same model "
            "and groups"
        )
    found: Held = {(MASTER, name): held for name, held in zip(names, masters, strict=True)}
    known = {kind.name for kind in local.kinds if row_of(kind.name).is_moment}
    for name, state in zip(names, _in_order(file, len(names)), strict=True):
        found.update({(kind, name): state[kind] for kind in known if isinstance(state.get(kind), Stored)})
    return {**found, **frozen}


def _in_order(file: OptimizerFile, count: int) -> list[Mapping[str, Any]]:
    if not any(file.states):
        return [{}] * count
    if len(file.states) != count:
        raise CheckpointError(
            f"its optimizer has states of {len(file.states)} buffers, and {count} are expected; where a stage had "
            "nothing of a group without ZeRO, load it in the layout that saved it, and save it with engine.save"
        )
    return file.states


def _from_module(folder: ZeroFolder, part: int, local: LocalSpace, numbers: list[int]) -> list[Stored]:
    weights = folder.weights(part)
    for number in numbers:
        if local.tensors[number].name not in weights:
            raise CheckpointError(
                f"it has no {local.tensors[number].name!r}, which this model trains; freeze it, or build the model of "
                "the job that saved it"
            )
    return [weights[local.tensors[number].name] for number in numbers]


def _frozen(folder: ZeroFolder, part: int, rank: int, local: LocalSpace) -> Held:
    found: Held = {}
    for number, tensor in enumerate(local.tensors):
        if tensor.trainable or not tensor.numel:
            continue
        if folder.stage == 3:
            held = (folder.model(part, rank).get("frozen_param_fragments") or {}).get(tensor.name)
            name = BufferId("partition", number)
        else:
            held, name = folder.weights(part).get(tensor.name), BufferId("tensor", number)
        if isinstance(held, Stored):
            found[WEIGHT, name] = held
        elif held is not None:
            raise CheckpointDamaged(f"the frozen {tensor.name!r} is a {type(held).__name__} in it, and no tensor")
    return found


def _of_frozen(line: Line, pieces: Pieces, held: Held) -> Pieces:
    """The pieces of the frozen tensors that are held; no other weight is."""
    numbers = np.array(sorted(name.index for kind, name in held if kind == WEIGHT), dtype=np.int64)
    return pieces.restrict(line.bases[numbers], line.bases[numbers + 1])


def _rows(vps: VirtualParameterSpace, kind: str, pieces: Pieces, held: Held) -> Iterator[Row]:
    """The rows of a rank's pieces; CheckpointError for a buffer that cannot be the one that is expected."""
    wanted = {pieces.buffers[number] for number in np.unique(pieces.buffer).tolist()}
    for name in wanted:
        _check_buffer(vps, kind, name, pieces, held.get((kind, name)))
    memory = {
        name: torch.empty(each.numel, dtype=each.dtype, device="meta")
        for (of, name), each in held.items()
        if of == kind
    }
    for (each,) in placed(vps.line, (pieces,), (memory,)):
        buffer = _buffer_at(vps, pieces, each.tensor, each.extent.start)
        stored = held[kind, buffer]
        yield from _dense(vps, kind, each.tensor, each.extent, each.matrix, stored)


def _dense(
    vps: VirtualParameterSpace, kind: str, number: int, extent: Extent, matrix: torch.Tensor, stored: Stored
) -> Iterator[Row]:
    """A row for an extent whose runs follow one another in the file, else one for each of its runs."""
    tensor, size = vps.tensors[number], stored.dtype.itemsize
    first, stride = int(matrix.storage_offset()), int(matrix.stride(0))
    dtype = name_of(stored.dtype)
    if extent.count == 1 or stride == extent.length:
        yield Row(tensor.name, kind, dtype, tensor.shape, extent, stored.file, stored.offset + first * size, 0)
        return
    for run in range(extent.count):
        alone = Extent(extent.start + run * extent.step, extent.length, 0, 1)
        at = stored.offset + (first + run * stride) * size
        yield Row(tensor.name, kind, dtype, tensor.shape, alone, stored.file, at, 0)


def _buffer_at(vps: VirtualParameterSpace, pieces: Pieces, number: int, element: int) -> BufferId:
    place = int(np.searchsorted(pieces.start, int(vps.bases[number]) + element, side="right")) - 1
    return pieces.buffers[int(pieces.buffer[place])]


def _check_buffer(vps: VirtualParameterSpace, kind: str, name: BufferId, pieces: Pieces, stored: Stored | None) -> None:
    here = pieces.buffer == pieces.buffers.index(name)
    end = int((pieces.offset[here] + pieces.stop[here] - pieces.start[here]).max())
    what = f"{kind} of {name.place} {name.index}"
    if name.place == "tensor":
        what = f"{kind} of {vps.tensors[name.index].name!r}"
    if stored is None:
        raise CheckpointDamaged(f"{what} is not in it; {WHERE_DAMAGED}")
    if not stored.is_dense:
        raise CheckpointError(
            f"{what} is not stored row by row in {stored.file}; save the checkpoint again with contiguous tensors"
        )
    if stored.numel < end:
        raise CheckpointError(
            f"{what} has {stored.numel} elements in {stored.file}, and {end} are expected; build the model of the job "
            "that saved it"
        )


def scalars_of(folder: ZeroFolder, vps: VirtualParameterSpace) -> dict[str, dict[int, Any]]:
    """Optimizer scalars: name -> tensor number -> value, a number or where it is stored. vps: of `then`."""
    layout = vps.layout
    found: dict[str, dict[int, Any]] = {}
    for rank in range(layout.world_size):
        local = vps.local(layout, rank)
        if local.zero_rank:
            continue
        for numbers, state in _states(folder.optimizer(part_of(layout, rank), 0), folder.stage, local):
            for name, value in state.items():
                is_scalar = isinstance(value, int | float) or (isinstance(value, Stored) and value.numel == 1)
                if is_scalar and not any(kind.name == name for kind in vps.kinds):
                    found.setdefault(name, {}).update(dict.fromkeys(numbers, value))
    return found


def _states(file: OptimizerFile, stage: int, local: LocalSpace) -> Iterator[tuple[list[int], Mapping[str, Any]]]:
    """(tensor numbers, what the optimizer keeps for them) of each of a rank's buffers."""
    if not any(file.states):
        return
    whole = [number for number, tensor in enumerate(local.tensors) if tensor.trainable and tensor.numel]
    by_group: dict[int, list[int]] = {}
    for number in whole:
        by_group.setdefault(local.tensors[number].group, []).append(number)
    if stage == 3:
        sets = _by_subgroup(local)
    elif stage or "fp32_groups_flat" in file.raw:
        sets = list(by_group.values())
    else:
        sets = [[number] for number in whole]
    yield from zip(sets, file.states, strict=False)


def _by_subgroup(local: LocalSpace) -> list[list[int]]:
    numbers, pieces = local.rows(MASTER)
    sets: dict[int, list[int]] = {}
    for number, buffer in zip(numbers.tolist(), pieces.buffer.tolist(), strict=True):
        sets.setdefault(pieces.buffers[buffer].index, []).append(number)
    return [sets[index] for index in sorted(sets)]
