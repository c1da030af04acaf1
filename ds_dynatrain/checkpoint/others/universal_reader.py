"""What DeepSpeed's universal format tells: what its `ds_to_universal` writes, and what `universal` writes of ours.

| file | what is in it |
|---|---|
| `zero/NAME/fp32.pt` and other states | `{"param": values}`, or (of stage 3) the values alone, flat |
| `zero/NAME/step.pt`, else in `optimizer_state.pt` | steps |
| `zero/optimizer_state.pt` | hyper-parameters of the groups, the loss scale |
| `*_model_states.pt` | names and shapes by group, counters, schedule, buffers, frozen weights (of stage 3 in parts) |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.files import WHERE_DAMAGED
from ds_dynatrain.checkpoint.manifest import Manifest, Row
from ds_dynatrain.checkpoint.names import is_component
from ds_dynatrain.checkpoint.others.foreign import Foreign, in_order, number_of, whole_row
from ds_dynatrain.checkpoint.others.torch_files import Stored, read_tree
from ds_dynatrain.checkpoint.others.zero_files import (
    OptimizerFile,
    carry_of,
    configured_type,
    frozen_shapes,
    model_files,
    read_table,
)
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, LogicalTensor

FORMAT = "DeepSpeed's universal format"
ZERO, OPTIMIZER, STEP = "zero", "optimizer_state.pt", "step"


def is_universal(path: Path) -> bool:
    """Whether a folder looks like such a checkpoint."""
    return (path / ZERO / OPTIMIZER).is_file()


def read_universal(path: Path, trust_pickle: bool = False) -> Foreign:
    """Describe a checkpoint; CheckpointError for what cannot be read without its model, CheckpointDamaged if a part of
    it is missing.
    """
    return _Folder(path, trust_pickle).foreign()


@dataclass(frozen=True, eq=False)
class _Folder:
    path: Path
    trust_pickle: bool
    _trees: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    _states_in: list[str] = field(default_factory=list, repr=False)

    def foreign(self) -> Foreign:
        tensors, rows = list[LogicalTensor](), list[Row]()
        steps: dict[str, float] = {}
        for name, (group, shape) in self.trained.items():
            tensor, held, step = self._states(name, group, shape)
            tensors.append(tensor)
            rows += held
            if step is not None:
                steps[name] = step
        for tensor, parts in self._frozen():
            tensors.append(tensor)
            rows += parts
        ordered, said = in_order(tensors), self.model
        scalars = {str(number): steps[each.name] for number, each in enumerate(ordered) if each.name in steps}
        carry = carry_of(self.path, said, OptimizerFile(0, [], [], self.groups, self.optimizer))
        carry["scalars"] = {STEP: scalars} if scalars else {}
        names = said.get("buffer_names") or ()
        buffers = {name: held for name, held in self.module.items() if name in names}
        step, archives = (
            int(said.get("global_steps", 0)),
            tuple((name, None) for name in (*self._trees, *self._states_in)),
        )
        return Foreign(self.path, FORMAT, Manifest.of(rows), ordered, step, carry, buffers, archives=archives)

    # ---- files -------------------------------------------------------------------------------------------------------

    def _tree(self, name: str) -> Mapping[str, Any]:
        return read_table(self.path, name, self.trust_pickle, self._trees)

    @cached_property
    def models(self) -> dict[tuple[int, int], str]:
        """Files of model states by (model-parallel rank, data rank)."""
        found = model_files(self.path)
        if (0, 0) not in found:
            raise CheckpointDamaged(
                f"{self.path}: the model states of model-parallel rank 0 are not there; {WHERE_DAMAGED}"
            )
        return found

    @property
    def model(self) -> Mapping[str, Any]:
        """The first file of model states."""
        return self._tree(self.models[0, 0])

    @property
    def module(self) -> dict[str, Stored]:
        """Weights and buffers, as far as they are there."""
        held = self.model.get("module")
        return {name: each for name, each in (held or {}).items() if isinstance(each, Stored)}

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """What all tensors share."""
        return self._tree(f"{ZERO}/{OPTIMIZER}")

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Hyper-parameters of the optimizer's groups."""
        return list(self.optimizer["param_groups"])

    # ---- tensors -----------------------------------------------------------------------------------------------------

    @cached_property
    def trained(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name -> (group, shape), in the optimizer's order."""
        found: dict[str, tuple[int, tuple[int, ...]]] = {}
        for (_, rank), file in sorted(self.models.items()):
            if rank:
                continue
            tables = self._tree(file).get("param_shapes")
            if tables is None:
                raise CheckpointError(
                    f"{self.path / file} has no param_shapes, which say what was trained; load it with DeepSpeed, and "
                    "save it with engine.save"
                )
            groups = [number for number, group in enumerate(self.groups) for _ in group["params"]]
            groups = groups if len(groups) == len(tables) else list(range(len(self.groups)))
            if len(groups) != len(tables):
                raise CheckpointError(
                    f"{self.path}: {len(groups)} groups of the optimizer, and names of {len(tables)}; {WHERE_DAMAGED}"
                )
            for group, table in zip(groups, tables, strict=True):
                for name, shape in table.items():
                    found.setdefault(name, (group, tuple(shape)))
        return found

    def _states(self, name: str, group: int, shape: tuple[int, ...]) -> tuple[LogicalTensor, list[Row], float | None]:
        """A trained tensor, where its states lie, and its steps."""
        tensor, rows, step = LogicalTensor(name, shape, group), list[Row](), self._common_step
        if not tensor.numel:
            return tensor, rows, None
        folder = self.path / ZERO / name
        if not is_component(name) or not (folder / "fp32.pt").is_file():
            raise CheckpointDamaged(f"{self.path} trained {name!r} and has no {ZERO}/{name}/fp32.pt")
        for file in sorted(folder.glob("*.pt")):
            self._states_in.append(f"{ZERO}/{name}/{file.name}")
            held = read_tree(self.path, self._states_in[-1], self.trust_pickle)
            if file.stem == STEP:
                step = number_of(self.path, held)
                continue
            kind = MASTER if file.stem == "fp32" else file.stem
            stored = self._values(file, held)
            if kind == MASTER and len({part for part, _ in self.models}) > 1 and stored.numel != tensor.numel:
                raise CheckpointError(
                    f"{self.path}: {name!r} is cut over tensor ranks; load it into an engine of DeepSpeed's in the "
                    "layout that wrote it, and save it with engine.save"
                )
            rows.append(whole_row(tensor, kind, stored))
        dtype = self._weight_type(name)
        rows.append(Row(name, WEIGHT, name_of(dtype), shape, Extent(0, tensor.numel, 0, 1), "", 0, 0))
        return tensor, rows, step

    def _values(self, file: Path, held: Any) -> Stored:
        if isinstance(held, Mapping):
            if held.get("ep_is_expert_param") or held.get("vocab_tensor"):
                raise CheckpointError(
                    f"{file} is of experts or of a padded vocabulary, which is not read; load it into an engine of "
                    "DeepSpeed's in the layout that wrote it, and save it with engine.save"
                )
            held = held.get("param")
        if not isinstance(held, Stored):
            raise CheckpointDamaged(f"{file} has no values")
        return held

    @cached_property
    def _common_step(self) -> float | None:
        """Steps of all tensors, where they are noted once."""
        own = self.optimizer.get("optimizer_state_dict")
        states = own.get("state", {}).values() if isinstance(own, Mapping) else ()
        found = {number_of(self.path, state[STEP]) for state in states if STEP in state}
        return found.pop() if len(found) == 1 else None

    def _weight_type(self, name: str) -> torch.dtype:
        """Of the weights that were trained with; from the configuration where the files have none."""
        if name in self.module:
            return self.module[name].dtype
        return configured_type(self.model.get("ds_config"))

    def _frozen(self) -> Iterator[tuple[LogicalTensor, list[Row]]]:
        """What is in the module and was not trained, and where it lies."""
        for name, shape in frozen_shapes(self.model, self.module, self.trained).items():
            tensor, stored = LogicalTensor(name, shape, FROZEN), self.module.get(name)
            if len({part for part, _ in self.models}) > 1:
                raise CheckpointError(
                    f"{self.path}: {name!r} is frozen, and may be cut over model-parallel ranks; load it into an "
                    "engine of DeepSpeed's, and save it with engine.save"
                )
            if not tensor.numel:
                yield tensor, []
            elif stored is not None and stored.numel == math.prod(shape):
                yield tensor, [whole_row(tensor, WEIGHT, stored)]
            else:
                yield tensor, self._parts(tensor)

    def _parts(self, tensor: LogicalTensor) -> list[Row]:
        """A frozen weight of stage 3: an equal part from each rank, the last one padded."""
        rows: list[Row] = []
        at = 0
        for (_, rank), file in sorted(self.models.items()):
            held = (self._tree(file).get("frozen_param_fragments") or {}).get(tensor.name)
            if not isinstance(held, Stored):
                raise CheckpointDamaged(
                    f"{self.path}: the part of the frozen {tensor.name!r} of rank {rank} is missing"
                )
            numel = min(held.numel, tensor.numel - at)
            if numel > 0:
                extent = Extent(at, numel, 0, 1)
                place = held.file, held.offset, 0
                rows.append(Row(tensor.name, WEIGHT, name_of(held.dtype), tensor.shape, extent, *place))
                at += numel
        return rows
