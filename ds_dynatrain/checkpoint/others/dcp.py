"""A checkpoint of ours as one of torch's distributed checkpoints (DCP), tensor by tensor.

Names are those of torch's `get_state_dict`: `model.NAME`, `optim.state.NAME.exp_avg`. The model's values are the
masters, unless another type is asked for: torch's own training keeps no others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_dynatrain.checkpoint.convert import Progress, proven, silent
from ds_dynatrain.checkpoint.elements import named
from ds_dynatrain.checkpoint.hidden import appearing
from ds_dynatrain.checkpoint.names import check_names
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.space import MASTER, WEIGHT, LogicalTensor, row_of

DATA = "__0_0.distcp"
"""What torch calls the first file of rank 0."""
Keys = tuple[str, ...]
"""The levels of a name."""


def to_dcp(
    saved: Saved,
    carry: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
) -> Path:
    """Write weights, optimizer states and hyper-parameters into a new folder; memory for the largest tensor.

    carry: the shared carry, decoded. dtype: of `model.*`; None: masters, and frozen weights as they are.
    CheckpointError if the folder is there, CheckpointDamaged for values that are not what was saved. It has its name
    only when it is whole.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    check_names([each.name for each in saved.record.logical_tensors()], saved.record.kinds)
    wanted = _wanted(saved, dtype)
    state: dict[str, Any] = {"step": saved.record.step}
    for keys, (tensor, _, held) in wanted.items():
        _put(state, keys, torch.empty(tensor.shape, dtype=held, device="meta"))
    for keys, value in _plain(saved, carry).items():
        _put(state, keys, value)
    by_key = {".".join(keys): each for keys, each in wanted.items()}
    with appearing(path, parents=True) as hidden, Reader(saved.path, saved.manifest) as reader:

        class Lazy(DefaultSavePlanner):
            """Reads a tensor when it is about to be written."""

            def resolve_data(self, write_item: WriteItem) -> Any:
                if write_item.index.fqn not in by_key:
                    return super().resolve_data(write_item)
                tensor, kind, kind_type = by_key[write_item.index.fqn]
                progress(tensor.numel * kind_type.itemsize)
                return proven(reader, tensor, kind, kind_type)

        class OneByOne(FileSystemWriter):
            """One file, without holding on to all that is in it, as torch's own writer does."""

            def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
                done: Future[list[WriteResult]] = Future()
                with (hidden / DATA).open("xb") as file:
                    done.set_result([_written(item, planner.resolve_data(item), file) for item in plan.items])
                    file.flush()
                    os.fsync(file.fileno())
                return done

            def storage_meta(self) -> StorageMeta | None:
                return StorageMeta(checkpoint_id=path, save_id=self.save_id)

        try:
            save(state, storage_writer=OneByOne(hidden), planner=Lazy(), no_dist=True)
        except CheckpointException as error:  # torch wraps what was raised while it wrote
            raise next(iter(error.failures.values()))[0] from None
    return path


def _written(item: Any, value: Any, file: BinaryIO) -> Any:
    """Write a tensor, or what torch has serialized, behind what is in the file; where it lies, in torch's words."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    begin = file.tell()
    if isinstance(value, torch.Tensor):
        torch.save(value, file)
    else:
        file.write(value.getbuffer())
    length = file.tell() - begin
    return WriteResult(item.index, length, _StorageInfo(DATA, begin, length))


def _put(state: dict[str, Any], path: Keys, value: Any) -> None:
    """Into nested tables: torch notes the levels of a name, which may have dots of its own."""
    *tables, last = path
    for name in tables:
        state = state.setdefault(name, {})
    state[last] = value


def _wanted(saved: Saved, dtype: torch.dtype | None) -> dict[Keys, tuple[LogicalTensor, str, torch.dtype]]:
    """Name in the other checkpoint -> tensor, state kind, type."""
    found: dict[Keys, tuple[LogicalTensor, str, torch.dtype]] = {}
    rows = saved.manifest.rows
    for tensor in saved.record.logical_tensors():
        if not tensor.numel:
            continue
        kind = MASTER if dtype is None and (tensor.name, MASTER) in rows else WEIGHT
        found["model", tensor.name] = tensor, kind, dtype or named(rows[tensor.name, kind][0].dtype)
        for moment in saved.record.kinds:
            held = rows.get((tensor.name, moment))
            if row_of(moment).is_moment and held:
                found["optim", "state", tensor.name, moment] = tensor, moment, named(held[0].dtype)
    return found


def _plain(saved: Saved, carry: Mapping[str, Any]) -> dict[Keys, Any]:
    """Scalars of each tensor, and hyper-parameters by tensor, as torch flattens them."""
    found: dict[Keys, Any] = {}
    tensors = saved.record.logical_tensors()
    for name, table in carry.get("scalars", {}).items():
        for number, value in table.items():
            held, exact = torch.tensor(value), torch.tensor(value, dtype=torch.float64)  # torch's own have 32 bits
            found["optim", "state", tensors[int(number)].name, name] = held if held == exact else exact
    for tensor in tensors:
        for key, value in carry["groups"][tensor.group].items() if tensor.trainable and "groups" in carry else ():
            found["optim", "param_groups", tensor.name, key] = value
    return found
