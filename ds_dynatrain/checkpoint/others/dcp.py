"""A checkpoint of ours as one of torch's distributed checkpoints (DCP), tensor by tensor.

Names are those of torch's `get_state_dict`: `model.NAME`, `optim.state.NAME.exp_avg`. The model's values are the
masters, unless another type is asked for: torch's own training keeps no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint.convert import whole
from ds_dynatrain.checkpoint.elements import named
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.space import HOST_GRAD, MASTER, STALE_GRAD, WEIGHT, LogicalTensor

Progress = Callable[[int], object]
"""Called with the bytes of each tensor that is written."""


def to_dcp(
    saved: Saved,
    carry: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write weights, optimizer states and hyper-parameters into a new folder; memory for the largest tensor.

    carry: the shared carry, decoded. dtype: of `model.*`; None: masters, and frozen weights as they are.
    CheckpointError if the folder is there.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save

    if path.exists():
        raise CheckpointError(f"{path} is there already: give another name, or remove it")
    wanted = _wanted(saved, dtype)
    state: dict[str, Any] = {
        name: torch.empty(tensor.shape, dtype=held, device="meta") for name, (tensor, _, held) in wanted.items()
    }
    state.update(_plain(saved, carry))
    with Reader(saved.path, saved.manifest) as reader:

        class Lazy(DefaultSavePlanner):
            """Reads a tensor when it is about to be written."""

            def resolve_data(self, write_item: WriteItem) -> Any:
                if write_item.index.fqn not in wanted:
                    return super().resolve_data(write_item)
                tensor, kind, kind_type = wanted[write_item.index.fqn]
                values = whole(reader, tensor, kind, kind_type)
                if progress is not None:
                    progress(values.numel() * values.element_size())
                return values

        writer = FileSystemWriter(path, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
        save(state, storage_writer=writer, planner=Lazy(flatten_state_dict=False), no_dist=True)
    return path


def _wanted(saved: Saved, dtype: torch.dtype | None) -> dict[str, tuple[LogicalTensor, str, torch.dtype]]:
    """Name in the other checkpoint -> tensor, state kind, type."""
    found: dict[str, tuple[LogicalTensor, str, torch.dtype]] = {}
    rows = saved.manifest.rows
    for tensor in saved.record.logical_tensors():
        if not tensor.numel:
            continue
        kind = MASTER if dtype is None and (tensor.name, MASTER) in rows else WEIGHT
        found[f"model.{tensor.name}"] = tensor, kind, dtype or named(rows[tensor.name, kind][0].dtype)
        for moment in saved.record.kinds:
            held = rows.get((tensor.name, moment))
            if moment not in (WEIGHT, MASTER, STALE_GRAD, HOST_GRAD) and held:
                found[f"optim.state.{tensor.name}.{moment}"] = tensor, moment, named(held[0].dtype)
    return found


def _plain(saved: Saved, carry: Mapping[str, Any]) -> dict[str, Any]:
    """Scalars of each tensor, and hyper-parameters by tensor, as torch flattens them."""
    found: dict[str, Any] = {"step": saved.record.step}
    tensors = saved.record.logical_tensors()
    for name, table in carry["scalars"].items():
        for number, value in table.items():
            found[f"optim.state.{tensors[int(number)].name}.{name}"] = torch.tensor(value)
    for tensor in tensors:
        for key, value in carry["groups"][tensor.group].items() if tensor.trainable else ():
            found[f"optim.param_groups.{tensor.name}.{key}"] = value
    return found
