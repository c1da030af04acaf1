"""What a checkpoint of DeepSpeed's `save_checkpoint` tells without the model: its files have names, shapes and groups.

The tensors of a flat buffer are taken in the order in which they lie there, so it does not matter how DeepSpeed had
dealt them. Each stage of a pipeline is read as a checkpoint of its own. Stage 0 notes no names: there they are those of
the weights, in the module's order, as long as there is one group, and the weights have to be casts of the masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint.manifest import Manifest, Row
from ds_dynatrain.checkpoint.others.foreign import Foreign, in_order, number_of
from ds_dynatrain.checkpoint.others.torch_files import Stored
from ds_dynatrain.checkpoint.others.zero_files import (
    OptimizerFile,
    ZeroFolder,
    carry_of,
    configured_type,
    frozen_shapes,
)
from ds_dynatrain.checkpoint.others.zero_rows import frozen_left_out, layout_of, rows_of, rules_then, scalars_of
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, Kind, LogicalTensor, VirtualParameterSpace, ZeroRules
from ds_dynatrain.space import standard_kinds as kinds_of

FORMAT = "a checkpoint of DeepSpeed's save_checkpoint"
TIED = "tied_modules."
"""What parameters of a pipeline's tied layers are called, which lie in its files under the numbers of their layers."""
INSTEAD = "load it into an engine with load_checkpoint, and save it with engine.save"
Shapes = Mapping[str, tuple[int, ...]]


def read_zero(path: Path, trust_pickle: bool = False) -> Foreign:
    """Describe a checkpoint; CheckpointError for one that cannot be read without its model, CheckpointDamaged if a
    part of it is missing.
    """
    folder = ZeroFolder.open(path, trust_pickle)
    folder.check_ranks()
    if folder.parts > 1 and not folder.layers:
        raise CheckpointError(f"{path} is of {folder.parts} tensor ranks, whose cuts it does not note: {INSTEAD}")
    tensors, rows = dict[str, LogicalTensor](), dict[tuple[str, str], list[Row]]()
    scalars: dict[str, dict[str, float]] = {}
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
        new = {each.name: each for each in space.tensors if each.name not in tensors}  # stages share tied ones
        tensors.update(new)
        rows.update({key: list(held) for key, held in found.rows.items() if key[0] in new})
        for name, table in scalars_of(alone, space).items():
            plain = {space.tensors[number].name: number_of(path, value) for number, value in table.items()}
            scalars.setdefault(name, {}).update({key: value for key, value in plain.items() if key in new})
    ordered = in_order(tensors.values())
    numbers = {each.name: str(number) for number, each in enumerate(ordered)}
    carry = carry_of(path, folder.model(0), folder.optimizer(0, 0))
    carry["scalars"] = {name: {numbers[key]: value for key, value in table.items()} for name, table in scalars.items()}
    manifest = Manifest.of(row for held in rows.values() for row in held)
    step, left_out = int(folder.model(0).get("global_steps", 0)), ("the client state",)
    return Foreign(path, FORMAT, manifest, ordered, step, carry, _buffers(folder), left_out, folder.archives)


def _shapes_in(folder: ZeroFolder) -> dict[str, tuple[int, ...]]:
    return {
        **{name: shape for table in folder.shapes(0) or () for name, shape in table.items()},
        **dict.fromkeys(folder.model(0).get("buffer_names") or (), ()),
    }


def _prefixes(folder: ZeroFolder) -> tuple[str, ...]:
    """Names of a pipeline's layers: their numbers (empty), or of tied ones what their trained parameters are called."""
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


def _buffers(folder: ZeroFolder) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for part in range(folder.parts):
        names, weights = folder.model(part).get("buffer_names") or (), folder.weights(part)
        found.update({name: weights[name] for name in names if name in weights})
    return found


# ---- the space of one part -------------------------------------------------------------------------------------------


def space_of(folder: ZeroFolder, others: Shapes) -> VirtualParameterSpace:
    """The space of a checkpoint of one model-parallel rank, under the layout that it was saved in.

    others: what other ranks trained.
    """
    layout, file = layout_of(folder), folder.optimizer(0, 0)
    if any("use_muon" in group for group in file.groups):
        raise CheckpointError(f"{folder.path} has states of whole tensors (Muon's): {INSTEAD}")
    shapes = folder.shapes(0)
    trained = _by_order(folder) if shapes is None else _by_group(folder, file, shapes)
    known = {**others, **{each.name: each.shape for each in trained}}
    frozen = [LogicalTensor(name, shape, FROZEN) for name, shape in _frozen(folder, known).items()]
    rules = replace(rules_then(folder, ZeroRules()), round_robin_stages=frozenset())
    weight = weight_type(folder)
    master = file.masters[0].dtype if file.masters else weight
    kinds = kinds_of(weight.itemsize, master.itemsize, _moments(folder))
    return VirtualParameterSpace.of([*trained, *frozen], rules, kinds, layout, range(layout.world_size))


def weight_type(folder: ZeroFolder) -> torch.dtype:
    """Of the weights that were trained with; from the configuration where the files have none."""
    said = folder.model(0)
    buffers, frozen = said.get("buffer_names") or (), said.get("frozen_param_shapes") or {}
    for name, held in folder.weights(0).items():
        if name not in buffers and name not in frozen and held.dtype.is_floating_point:
            return held.dtype
    return configured_type(folder.config)


def _by_group(folder: ZeroFolder, file: OptimizerFile, shapes: Sequence[Shapes]) -> list[LogicalTensor]:
    """Trained tensors from `param_shapes`, which has a table for each group, in stage 3 for each sub-group."""
    groups = [number for number, group in enumerate(file.groups) for _ in group["params"]]
    if not groups:  # elastic_checkpoint has no hyper-parameters
        groups = list(range(len(shapes)))
    if len(groups) != len(shapes):
        raise CheckpointError(
            f"{folder.path}: its optimizer has {len(groups)} buffers, and names are there of {len(shapes)}: {INSTEAD}"
        )
    return [
        LogicalTensor(name, shape, group)
        for group, table in zip(groups, shapes, strict=True)
        for name, shape in table.items()
    ]


def _by_order(folder: ZeroFolder) -> list[LogicalTensor]:
    """Trained tensors of stage 0: all of the module, in its order; CheckpointError if these cannot be they."""
    file, buffers = folder.optimizer(0, 0), folder.model(0).get("buffer_names") or ()
    found: dict[tuple[str, int], LogicalTensor] = {}
    for name, held in folder.weights(0).items():
        if name not in buffers:
            found.setdefault((held.file, held.offset), LogicalTensor(name, held.shape))
    tensors = [each for each in found.values() if each.numel]
    shapes = [each.shape for each in tensors]
    there = [held.shape for held in file.masters if len(held.shape) or held.numel]
    is_flat = "fp32_groups_flat" in file.raw or bool(folder.optimizers)
    agrees = is_flat or (not there and len(_in_use(file)) in (0, len(shapes))) or there == shapes
    if not there and agrees:
        agrees = all(_agrees(state, shape) for state, shape in zip(_in_use(file), shapes, strict=False))
    if len(file.groups) != 1 or not agrees:
        raise CheckpointError(
            f"{folder.path}, of ZeRO stage 0, does not say which of its optimizer's states is of which parameter, and "
            f"has {len(file.groups)} groups or frozen parameters: {INSTEAD}"
        )
    return tensors


def _in_use(file: OptimizerFile) -> list[Mapping[str, Any]]:
    return [state for state in file.states if state]


def _agrees(state: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    return all(held.shape in ((), shape) for held in state.values() if isinstance(held, Stored))


def _frozen(folder: ZeroFolder, known: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is in the module and was not trained. known: what was, in all stages."""
    said = folder.model(0)
    if said.get("frozen_param_shapes") is None and said.get("param_shapes") is None:
        return {}
    return frozen_shapes(said, folder.weights(0), known)


def _moments(folder: ZeroFolder) -> Iterator[Kind]:
    """What the optimizer keeps of each element: what is no scalar."""
    found: dict[str, int] = {}
    for rank in range(folder.ranks):
        for state in folder.optimizer(0, rank).states:
            for name, held in state.items():
                if isinstance(held, Stored) and held.shape:
                    found.setdefault(name, held.dtype.itemsize)
    for name, itemsize in found.items():
        yield Kind(name, itemsize)


def _check_casts(folder: ZeroFolder, manifest: Manifest) -> None:
    """CheckpointError unless each weight of the module is the cast of the master that is taken for its own."""
    weights = folder.weights(0)
    with Reader(folder.path, manifest, links=True) as reader:
        for (name, kind), rows in manifest.rows.items():
            if kind != MASTER or rows[0].file == weights[name].file:
                continue
            mine = sum(reader.digest(row, weights[name].dtype) for row in rows)
            held = manifest.rows[name, WEIGHT][0]
            there = reader.digest(replace(held, file=weights[name].file, offset=weights[name].offset))
            if (mine - there) % (1 << 64):
                raise CheckpointError(f"{folder.path} does not say which of its masters is {name!r}'s: {INSTEAD}")
