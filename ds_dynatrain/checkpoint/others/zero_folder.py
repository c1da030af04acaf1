"""DeepSpeed checkpoints described as rows of a manifest.

The checkpoint does not store the position of each element in DeepSpeed's buffers. The position follows from the layout,
as it does for running ranks. Names and sizes in the files are checked, and a checkpoint that does not match is refused.

`read_zero` does not need the model, because the files contain names, shapes and groups. The tensors of a flat buffer
are read in buffer order, so DeepSpeed's assignment to ranks does not matter. Each pipeline stage is read as a separate
checkpoint. ZeRO stage 0 does not store which state belongs to which parameter; its states are matched with the weights
in module order, provided that there is a single group and that the weights are casts of the masters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_dynatrain.checkpoint.extents import WORD, Extent, placed
from ds_dynatrain.checkpoint.files import WHERE_DAMAGED
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow
from ds_dynatrain.checkpoint.others.foreign import (
    Foreign,
    cast_from_master,
    number_of,
    stored_row,
)
from ds_dynatrain.checkpoint.others.torch_files import Stored
from ds_dynatrain.checkpoint.others.zero_files import (
    OptimizerFile,
    ZeroFolder,
    carry_of,
    configured_type,
    frozen_shapes,
    groups_of,
)
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, LayoutError
from ds_dynatrain.space import (
    FROZEN,
    MASTER,
    WEIGHT,
    BufferId,
    Kind,
    Layout,
    LogicalTensor,
    Pieces,
    VirtualParameterSpace,
    ZeroRules,
    row_of,
    standard_kinds,
)
from ds_dynatrain.space.zero import LocalSpace, flat_order

SUB_GROUP_SIZE = 10**9
"""Number of elements of a sub-group that ZeRO-3 uses if the configuration does not set `sub_group_size`."""
ALIGNED_BYTES = 16
"""Alignment in bytes of each tensor's start, if DeepSpeed aligned parameters."""
FORMAT = "a checkpoint of DeepSpeed's save_checkpoint"
TIED = "tied_modules."
"""Name prefix of parameters in tied pipeline layers. The files of layers have layer numbers instead."""
INSTEAD = "load it into an engine with load_checkpoint, and save it with engine.save"
Shapes = Mapping[str, tuple[int, ...]]
Held = dict[tuple[str, BufferId], Stored]


def rows_of(folder: ZeroFolder, vps: VirtualParameterSpace, weight: torch.dtype) -> list[ManifestRow]:
    """Return the manifest rows of all masters, moments and weights in a DeepSpeed checkpoint.

    Trained weights are described as casts of their masters. Digests are set to 0. Frozen weights that the checkpoint
    lacks have no rows (see `frozen_left_out`).

    vps: the parameter space of the job that saved the checkpoint (see `then`).
    weight: the element type of trained weights.

    Raises CheckpointError, naming the parameter, if the checkpoint belongs to another model.
    """
    layout = vps.layout
    rows = [cast_from_master(each, weight) for each in vps.tensors if each.trainable and each.numel]
    for rank in range(layout.world_size):
        local, part = vps.local(layout, rank), part_of(layout, rank)
        check_names(folder, part, local)
        held = held_by(folder, part, local)
        for kind in vps.present_kinds(layout, among={kind for kind, _ in held}):
            rows += _rows(vps, kind, vps.owned(layout, rank, kind), held)
    return rows


def frozen_left_out(vps: VirtualParameterSpace, manifest: Manifest) -> tuple[int, ...]:
    """Return the numbers of the frozen tensors whose weights are not in a checkpoint's manifest."""
    return tuple(
        number
        for number, each in enumerate(vps.tensors)
        if not each.trainable and each.numel and (each.name, WEIGHT) not in manifest.rows
    )


def layout_of(folder: ZeroFolder) -> Layout:
    """Return the layout of the job that saved a DeepSpeed checkpoint.

    Sequence ranks count as data ranks, because ZeRO partitions over both.
    """
    axis = "pipe" if folder.layers else "tensor"
    return Layout(zero_stage=folder.stage, data=folder.ranks).replace(**{axis: folder.parts})


def rules_then(folder: ZeroFolder, rules: ZeroRules) -> ZeroRules:
    """Return `rules`, changed to the partitioning settings with which a DeepSpeed checkpoint was saved.

    Raises CheckpointError if the sub-group size in the checkpoint's configuration is not a number.
    """
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
    """Return this model's parameter space with the layout and rules of the job that saved a DeepSpeed checkpoint.

    vps: the current parameter space of the model.

    Raises CheckpointDamaged if files of data ranks are missing. Raises CheckpointError if the model cannot have that
    layout or has states that are not read from DeepSpeed's checkpoints.
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
    """Return a rank's model-parallel rank in DeepSpeed's file names: stage * (number of tensor ranks) + tensor rank."""
    place = layout.coordinate(rank)
    return place["pipe"] * layout.tensor + place["tensor"]


def check_names(folder: ZeroFolder, part: int, local: LocalSpace) -> None:
    """Raise CheckpointError, naming the parameter, unless the checkpoint has a rank's trained tensors in this order.

    part: the model-parallel rank.
    local: the rank's local parameter space.
    """
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


def _trained(local: LocalSpace) -> list[int]:
    """Return the numbers of the trainable local tensors with elements, which are ordered by group."""
    return [number for number, tensor in enumerate(local.tensors) if tensor.trainable and tensor.numel]


def _order(local: LocalSpace) -> Iterator[str]:
    """Yield the names of the trainable local tensors, in the order of the optimizer's buffers."""
    for group, numbers in groupby(_trained(local), lambda number: local.tensors[number].group):
        is_flat = local.layout.zero_stage in (1, 2)
        ordered = flat_order(local.line, local.rules, local.layout, group)[0].tolist() if is_flat else numbers
        yield from (local.tensors[number].name for number in ordered)


def _buffers(folder: ZeroFolder, file: OptimizerFile, local: LocalSpace) -> dict[BufferId, list[int]]:
    """Return a map from each buffer of a rank's optimizer, in DeepSpeed's order, to the numbers of its tensors."""
    found: dict[BufferId, list[int]] = {}
    if folder.stage == 3:
        found = {BufferId("subgroup", number): [] for number in range(len(file.masters))}
        numbers, pieces = local.rows(MASTER)
        for number, buffer in zip(numbers.tolist(), pieces.buffer.tolist(), strict=True):
            found.setdefault(pieces.buffers[buffer], []).append(number)
        return found
    is_flat = folder.stage or "fp32_groups_flat" in file.raw
    for number in _trained(local):
        name = BufferId("group", local.tensors[number].group) if is_flat else BufferId("tensor", number)
        found.setdefault(name, []).append(number)
    return found


def held_by(folder: ZeroFolder, part: int, local: LocalSpace) -> Held:
    """Return the positions of one rank's buffers in the checkpoint, keyed by (state kind, buffer name).

    part: the model-parallel rank.
    local: the rank's local parameter space.

    Raises CheckpointError if the checkpoint's buffers differ from this model's.
    """
    file = folder.optimizer(part, local.zero_rank)
    buffers = _buffers(folder, file, local)
    masters = file.masters
    if not masters:
        weights, names = folder.weights(part), [local.tensors[each.index].name for each in buffers]
        if lacking := [name for name in names if name not in weights]:
            raise CheckpointError(
                f"it has no {lacking[0]!r}, which this model trains; freeze it, or build the model of the job that "
                "saved it"
            )
        masters = [weights[name] for name in names]
    if len(buffers) != len(masters):
        raise CheckpointError(
            f"it has {len(masters)} buffers of masters, and this model would have {len(buffers)}; build the same model "
            "and groups"
        )
    states = file.states if any(file.states) else [{}] * len(buffers)
    if len(states) != len(buffers):
        raise CheckpointError(
            f"its optimizer has states of {len(states)} buffers, and {len(buffers)} are expected; where a stage had "
            "nothing of a group without ZeRO, load it in the layout that saved it, and save it with engine.save"
        )
    found: Held = {(MASTER, name): held for name, held in zip(buffers, masters, strict=True)}
    known = {kind.name for kind in local.kinds if row_of(kind.name).is_moment}
    for name, state in zip(buffers, states, strict=True):
        found.update({(kind, name): state[kind] for kind in known if isinstance(state.get(kind), Stored)})
    return {**found, **_frozen(folder, part, local)}


def _frozen(folder: ZeroFolder, part: int, local: LocalSpace) -> Held:
    found: Held = {}
    for number, tensor in enumerate(local.tensors):
        if tensor.trainable or not tensor.numel:
            continue
        if folder.stage == 3:
            held = (folder.model(part, local.zero_rank).get("frozen_param_fragments") or {}).get(tensor.name)
            name = BufferId("partition", number)
        else:
            held, name = folder.weights(part).get(tensor.name), BufferId("tensor", number)
        if isinstance(held, Stored):
            found[WEIGHT, name] = held
        elif held is not None:
            raise CheckpointDamaged(f"the frozen {tensor.name!r} is a {type(held).__name__} in it, and no tensor")
    return found


def _rows(vps: VirtualParameterSpace, kind: str, pieces: Pieces, held: Held) -> Iterator[ManifestRow]:
    """Yield the manifest rows of the pieces of one state kind that a rank owns.

    held: the positions of the rank's buffers.

    Weights without a buffer are skipped. Raises CheckpointDamaged if any other buffer is missing, and CheckpointError
    if a buffer is not as expected.
    """
    for number in np.unique(pieces.buffer).tolist():
        here, name = np.flatnonzero(pieces.buffer == number), pieces.buffers[number]
        if kind == WEIGHT and (kind, name) not in held:
            continue  # trained weights are cast from masters; frozen weights may be left out
        of_buffer = pieces.take(here, pieces.start[here], pieces.stop[here])
        stored = _checked_buffer(vps, kind, name, of_buffer, held.get((kind, name)))
        memory = {name: torch.empty(stored.numel, dtype=stored.dtype, device="meta")}
        for tensor, extent, (matrix,) in placed(vps.line, (of_buffer,), (memory,)):
            first, stride = int(matrix.storage_offset()), int(matrix.stride(0))
            if extent.count == 1 or stride == extent.length:  # its runs follow one another in the file
                yield stored_row(vps.tensors[tensor], kind, stored, extent, first)
                continue
            for run in range(extent.count):
                alone = Extent(extent.start + run * extent.step, extent.length)
                yield stored_row(vps.tensors[tensor], kind, stored, alone, first + run * stride)


def _checked_buffer(
    vps: VirtualParameterSpace, kind: str, name: BufferId, pieces: Pieces, stored: Stored | None
) -> Stored:
    end = int((pieces.offset + pieces.stop - pieces.start).max())
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
    return stored


def scalars_of(folder: ZeroFolder, vps: VirtualParameterSpace) -> dict[str, dict[int, Any]]:
    """Return the optimizer's scalars, keyed by name and tensor number.

    Each scalar is a number or a one-element `Stored` tensor.

    vps: the parameter space of the job that saved the checkpoint (see `then`).
    """
    layout = vps.layout
    found: dict[str, dict[int, Any]] = {}
    for rank in range(layout.world_size):
        local = vps.local(layout, rank)
        if local.zero_rank:
            continue
        file = folder.optimizer(part_of(layout, rank), 0)
        for numbers, state in zip(_buffers(folder, file, local).values(), file.states, strict=False):
            for name, value in state.items():
                is_scalar = isinstance(value, int | float) or (isinstance(value, Stored) and value.numel == 1)
                if is_scalar and not any(kind.name == name for kind in vps.kinds):
                    found.setdefault(name, {}).update(dict.fromkeys(numbers, value))
    return found


# ---- without the model -----------------------------------------------------------------------------------------------


def read_zero(path: Path, trust_pickle: bool = False) -> Foreign:
    """Return a description of a checkpoint that DeepSpeed's `save_checkpoint` wrote. Does not need the model.

    trust_pickle: whether to unpickle content that is neither tensors nor plain values.

    Raises CheckpointError if the checkpoint cannot be read without its model, and CheckpointDamaged if part of the
    checkpoint is missing.
    """
    folder = ZeroFolder.open(path, trust_pickle)
    folder.check_ranks()
    if folder.parts > 1 and not folder.layers:
        raise CheckpointError(f"{path} is of {folder.parts} tensor ranks, whose cuts it does not note: {INSTEAD}")
    tensors, rows = dict[str, LogicalTensor](), list[ManifestRow]()
    scalars, buffers = defaultdict[str, dict[str, float]](dict), dict[str, Stored]()
    folder = replace(folder, prefixes=_prefixes(folder))
    parts = [folder.alone(part) for part in range(folder.parts)]
    others = {name: tuple(shape) for part in parts for name, shape in _shapes_in(part).items()}
    for alone in parts:
        space = space_of(alone, others)
        found = Manifest.of(rows_of(alone, space, weight_type(alone)))
        for number in frozen_left_out(space, found):
            raise CheckpointDamaged(f"{path} names the frozen {space.tensors[number].name!r}, and has no values of it")
        if alone.model(0).get("param_shapes") is None:
            _check_casts(alone, found)
        new = {each.name: each for each in space.tensors if each.name not in tensors}  # stages share tied tensors
        tensors.update(new)
        rows += [row for row in found if row.tensor in new]
        for kind, table in scalars_of(alone, space).items():
            by_name = {space.tensors[number].name: value for number, value in table.items()}
            scalars[kind].update({name: number_of(path, value) for name, value in by_name.items() if name in new})
        weights = alone.weights(0)
        buffers.update({name: weights[name] for name in alone.buffer_names if name in weights})
    carry = carry_of(path, folder.model(0), folder.optimizer(0, 0))
    return Foreign.of(
        path,
        FORMAT,
        tensors.values(),
        rows,
        int(folder.model(0).get("global_steps", 0)),
        carry,
        scalars,
        buffers=buffers,
        left_out=("the client state",),
        archives=folder.archives,
    )


def _shapes_in(folder: ZeroFolder) -> dict[str, tuple[int, ...]]:
    return {
        **{name: shape for table in folder.shapes(0) or () for name, shape in table.items()},
        **dict.fromkeys(folder.buffer_names, ()),
    }


def _prefixes(folder: ZeroFolder) -> tuple[str, ...]:
    """Return the name prefix of each pipeline layer's parameters: its number, or the name of its tied layer.

    The result is empty without a pipeline. Raises CheckpointError if a layer could belong to several tied layers.
    """
    tied: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for part in range(folder.parts):
        for name, shape in _shapes_in(folder.alone(part)).items():
            if name.startswith(TIED):
                key, _, rest = name.removeprefix(TIED).partition(".")
                tied.setdefault((rest, shape), set()).add(f"{TIED}{key}")
    found = [str(number) for number in range(1 + max(folder.layers, default=-1))]
    for name, held in folder.weights(0).items() if folder.layers else ():
        number, _, rest = name.partition(".")
        keys = tied.get((rest, held.shape), set()) - {found[int(number)]}
        if keys and (len(keys) > 1 or found[int(number)] != number):
            raise CheckpointError(f"{folder.path}: which tied layer {name!r} is of is not clear: {INSTEAD}")
        found[int(number)] = next(iter(keys), found[int(number)])
    return tuple(found)


# ---- the space of one part -------------------------------------------------------------------------------------------


def space_of(folder: ZeroFolder, others: Shapes) -> VirtualParameterSpace:
    """Return the parameter space that a single model-parallel rank's files describe, in the layout of the job.

    others: the shapes of all tensors that any model-parallel rank trained, and the names of module buffers.

    Raises CheckpointError if the files do not contain enough information.
    """
    layout, file = layout_of(folder), folder.optimizer(0, 0)
    if any("use_muon" in group for group in file.groups):
        raise CheckpointError(f"{folder.path} has states of whole tensors (Muon's): {INSTEAD}")
    shapes = folder.shapes(0)
    trained = (
        _by_order(folder)
        if shapes is None
        else [
            LogicalTensor(name, shape, group)
            for group, table in zip(groups_of(folder.path, file.groups, len(shapes)), shapes, strict=True)
            for name, shape in table.items()
        ]
    )
    said, known = folder.model(0), {*others, *(each.name for each in trained)}
    is_noted = said.get("frozen_param_shapes") is not None or shapes is not None
    there = frozen_shapes(said, folder.weights(0), known) if is_noted else {}
    frozen = [LogicalTensor(name, shape, FROZEN) for name, shape in there.items()]
    rules = replace(rules_then(folder, ZeroRules()), round_robin_stages=frozenset())
    weight = weight_type(folder)
    master = file.masters[0].dtype if file.masters else weight
    kinds = standard_kinds(weight.itemsize, master.itemsize, _moments(folder))
    return VirtualParameterSpace.of([*trained, *frozen], rules, kinds, layout, range(layout.world_size))


def weight_type(folder: ZeroFolder) -> torch.dtype:
    """Return the type of a checkpoint's trained weights, or the configured type if the files have no weights."""
    others = {*folder.buffer_names, *(folder.model(0).get("frozen_param_shapes") or ())}
    for name, held in folder.weights(0).items():
        if name not in others and held.dtype.is_floating_point:
            return held.dtype
    return configured_type(folder.config)


def _by_order(folder: ZeroFolder) -> list[LogicalTensor]:
    """Return the trained tensors of a ZeRO stage 0 checkpoint: all parameters of the module, in module order.

    Raises CheckpointError if there are several groups, or if the optimizer's states do not match these tensors.
    """
    file = folder.optimizer(0, 0)
    found: dict[tuple[str, int], LogicalTensor] = {}
    for name, held in folder.weights(0).items():
        if name not in folder.buffer_names:
            found.setdefault((held.file, held.offset), LogicalTensor(name, held.shape))
    tensors = [each for each in found.values() if each.numel]
    states = [state for state in file.states if state]
    if "fp32_groups_flat" in file.raw or folder.optimizers:
        agrees = True
    elif file.masters:
        agrees = [each.shape for each in tensors] == [held.shape for held in file.masters if held.numel]
    else:
        agrees = len(states) in (0, len(tensors)) and all(
            held.shape in ((), tensor.shape)
            for state, tensor in zip(states, tensors, strict=False)
            for held in state.values()
            if isinstance(held, Stored)
        )
    if len(file.groups) != 1 or not agrees:
        raise CheckpointError(
            f"{folder.path}, of ZeRO stage 0, does not say which of its optimizer's states is of which parameter, and "
            f"has {len(file.groups)} groups or frozen parameters: {INSTEAD}"
        )
    return tensors


def _moments(folder: ZeroFolder) -> Iterator[Kind]:
    """Return the state kinds that the optimizer keeps per element, with their element sizes."""
    found: dict[str, int] = {}
    for rank in range(folder.ranks):
        for state in folder.optimizer(0, rank).states:
            for name, held in state.items():
                if isinstance(held, Stored) and held.shape:
                    found.setdefault(name, held.dtype.itemsize)
    return starmap(Kind, found.items())


def _check_casts(folder: ZeroFolder, manifest: Manifest) -> None:
    """Raise CheckpointError unless each weight has the same digest as the cast of the master assigned to it."""
    weights = folder.weights(0)
    with Reader(folder.path, manifest, links=True) as reader:
        for (name, kind), rows in manifest.rows.items():
            if kind != MASTER or rows[0].file == weights[name].file:
                continue
            mine = sum(reader.digest(row, weights[name].dtype) for row in rows)
            held = manifest.rows[name, WEIGHT][0]
            there = reader.digest(replace(held, file=weights[name].file, offset=weights[name].offset))
            if (mine - there) & WORD:
                raise CheckpointError(f"{folder.path} does not say which of its masters is {name!r}'s: {INSTEAD}")
