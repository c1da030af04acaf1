"""Folders of torch's distributed checkpoint (DCP): reads them, and converts this package's checkpoints to them.

The file `.metadata` describes the content. It is a pickle, but is never executed: reading it yields only plain values
and `Opaque` objects that represent torch's records. A data file contains many small files of `torch.save`, one per
piece of a tensor.

| key | what is read from it |
|---|---|
| `model.NAME`, or all tensors without `model` | weights; masters are made from the trained ones |
| `optim.state.NAME.exp_avg` `.step` | moments and steps |
| `optim.param_groups.NAME.lr` | hyper-parameters of each tensor, from which the groups are rebuilt |
| `optim.param_groups.0.lr` `.params` | a group's hyper-parameters, and the names of its tensors |

`optim` may also be called `optimizer`. Its levels are separate (`optim`, `state`, NAME, `exp_avg`), or joined into one
name below `optim`, as in torch with `flatten_optimizer_state_dict=True`.

A folder that this package writes has the names of torch's `get_state_dict`. The values of `model` are the masters,
unless another type is requested.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.files import (
    WHERE_DAMAGED,
    Progress,
    appearing,
    check_names,
    is_component,
    read_small,
    silent,
)
from ds_dynatrain.checkpoint.folder import write
from ds_dynatrain.checkpoint.manifest import ManifestRow
from ds_dynatrain.checkpoint.others.foreign import (
    Foreign,
    hyper_parameters,
    number_of,
    stored_row,
)
from ds_dynatrain.checkpoint.others.torch_files import (
    MOST_BYTES,
    Opaque,
    Stored,
    check_pickle,
    read_tree,
    with_values,
)
from ds_dynatrain.checkpoint.reading import Reader, proven
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import FROZEN, MASTER, WEIGHT, Box, LogicalTensor, Placed, row_major, row_of
from ds_dynatrain.space.tiling import rows as rows_of_pieces
from ds_dynatrain.transfer.series import series

FORMAT = "a torch distributed checkpoint"
METADATA, MODEL, OPTIM = ".metadata", "model", "optim"
OF_OPTIMIZER = re.compile(r"(?:optim|optimizer)\.(state|param_groups)\.(.+)\.([^.]+)", re.DOTALL)
SAVE_WITH = "torch.distributed.checkpoint.state_dict.get_state_dict"
DATA = "__0_0.distcp"
"""torch's name for the first data file of rank 0."""
Keys = tuple[str, ...]
"""A key of the nested state dictionary, split into its levels, outermost first."""


STAND_INS = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
    "pathlib",
    "pathlib._local",
)
"""Modules whose classes may occur in the metadata. Their objects become `Opaque`."""
PLAIN: Mapping[str, Any] = {
    "torch.Size": tuple,
    "torch.serialization._get_layout": Opaque,
    "collections.OrderedDict": dict,
}
"""A map from other classes that may occur in the metadata, besides torch's element types, to their replacements."""


def is_dcp(path: Path) -> bool:
    """Return whether a folder looks like a torch distributed checkpoint."""
    return (path / METADATA).is_file()


def read_dcp(path: Path, trust_pickle: bool = False) -> Foreign:
    """Return a description of a torch distributed checkpoint. Tensor values are not read.

    trust_pickle: whether to unpickle values that are neither tensors nor plain. The metadata is never executed.

    Raises CheckpointError for refused content, and CheckpointDamaged if a part is missing or invalid.
    """
    return _Folder.open(path, trust_pickle).foreign()


class _Reader(pickle.Unpickler):
    """An unpickler that makes only plain values and `Opaque` objects, and never imports a class named in the file."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        made = Opaque if module in STAND_INS else PLAIN.get(full)
        found = getattr(torch, name, None) if module == "torch" and made is None else made
        if made is not None or isinstance(found, torch.dtype):
            return found
        raise CheckpointError(
            f"{METADATA} holds a {full}, which is no record of a checkpoint, and is not read; write the checkpoint "
            "anew with torch.distributed.checkpoint"
        )


@dataclass(frozen=True, eq=False)
class _Folder:
    """A checkpoint as described by its metadata.

    shapes: the shape of each key's tensor; None if its value is not a tensor.
    places: the pieces of each key's value, as (offset in the tensor, file, first byte, length in bytes).
    weights: the key of each parameter's weight.
    states, settings: the keys of the optimizer's states, and of its hyper-parameters, by tensor or group and by name.
    """

    path: Path
    trust_pickle: bool
    shapes: Mapping[str, tuple[int, ...] | None]
    places: Mapping[str, list[tuple[Any, str, int, int]]]
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)

    @staticmethod
    def open(path: Path, trust_pickle: bool) -> _Folder:
        said = _metadata(path / METADATA)
        held: Mapping[str, Opaque] = said["state_dict_metadata"]
        places: dict[str, list[tuple[Any, str, int, int]]] = {}
        for index, info in said["storage_data"].items():
            if info.fields.get("transform_descriptors"):
                raise CheckpointError(
                    f"{path}: its values are transformed (compressed, say); write it anew without `_extensions=` of "
                    "FileSystemWriter"
                )
            name = info.fields["relative_path"]
            if not is_component(name) or not (path / name).is_file():
                raise CheckpointDamaged(f"{path}: there is no file {name!r}")
            place = index.fields.get("offset"), name, int(info.fields["offset"]), int(info.fields["length"])
            places.setdefault(index.fields["fqn"], []).append(place)
        sizes = {key: each.fields.get("size") for key, each in held.items()}
        shapes = {key: None if size is None else tuple(map(int, size)) for key, size in sizes.items()}
        found = _Folder(path, trust_pickle, shapes, places)
        found._sort(said.get("planner_data") or {})
        return found

    def _sort(self, nested: Mapping[str, Any]) -> None:
        """Sort the keys into weights, states and hyper-parameters.

        nested: a map from each key to its levels, outermost first. A key without an entry is its own only level.
        """
        levels = {key: [str(each) for each in nested.get(key) or (key,)] for key in self.shapes}
        if not any(len(each) > 1 or key.startswith(f"{OPTIM}.") for key, each in levels.items()):
            self.weights.update({key: key for key, shape in self.shapes.items() if shape is not None})
            return
        for key, each in levels.items():
            name = ".".join(each)
            if of_optimizer := OF_OPTIMIZER.fullmatch(name):
                part, owner, last = of_optimizer.groups()
                if part == "param_groups":
                    self.settings.setdefault(owner, {})[last] = key
                elif self.shapes[key] is not None:
                    self.states.setdefault(owner, {})[last] = key
            elif name.startswith(f"{MODEL}."):
                self.weights[name.removeprefix(f"{MODEL}.")] = key
        if not self.weights:
            tops = sorted({each[0].partition(".")[0] for each in levels.values()})
            raise CheckpointError(
                f"{self.path} has {', '.join(tops)}, and no {MODEL!r} to take weights from; save it as "
                f"{{{MODEL!r}: ...}}"
            )

    def foreign(self) -> Foreign:
        strange = next((name for name in self.states if name not in self.weights), None)
        if strange is not None:
            raise CheckpointError(
                f"{self.path} has optimizer states of {strange!r}, and no weight of that name; save both with "
                f"{SAVE_WITH}, or the model alone to go on without them"
            )
        groups, number_in = self._groups()
        if self.states and not groups:
            raise CheckpointError(
                f"{self.path} has optimizer states and no '{OPTIM}.param_groups' that names their tensors; save "
                f"it with {SAVE_WITH}"
            )
        frozen = FROZEN if groups else 0
        rows, scalars = list[ManifestRow](), defaultdict[str, dict[str, float]](dict)
        tensors = [
            LogicalTensor(name, self._shape(key), number_in.get(name, frozen)) for name, key in self.weights.items()
        ]
        for tensor in tensors:
            rows += self._rows(tensor, WEIGHT, self.weights[tensor.name])
            for kind, key in self.states.get(tensor.name, {}).items():
                if kind == "step" or (self._shape(key) == () and tensor.shape != ()):
                    scalars[kind][tensor.name] = number_of(self.path, self._value(key))
                else:
                    rows += self._rows(tensor, kind, key)
        read = {"step", *self.weights.values()}
        for table in (*self.states.values(), *(self.settings.values() if groups else ())):
            read.update(table.values())
        step = int(max(scalars.get("step", {}).values(), default=0))
        if "step" in self.shapes:
            step = int(number_of(self.path, self._value("step")))
        carry = {"groups": groups, "counters": {"global_steps": step}, "windows": step} if groups else {}
        places = (place for key, held in self.places.items() if key in read for place in held)
        archives = tuple((file, (first, length)) for _, file, first, length in places)
        left_out = tuple(sorted(self.shapes.keys() - read))
        return Foreign.of(self.path, FORMAT, tensors, rows, step, carry, scalars, left_out=left_out, archives=archives)

    def _groups(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return (hyper-parameters of each optimizer group, map from each tensor to its group's number).

        If the checkpoint has hyper-parameters per tensor, tensors with equal ones form a group. Otherwise the
        checkpoint itself lists the groups. Raises CheckpointError if a group lists something that is not a weight, or
        that is in two groups.
        """
        said = {name: {key: self._plain(at) for key, at in table.items()} for name, table in self.settings.items()}
        groups: list[dict[str, Any]] = []
        found: dict[str, int] = {}
        if not any("params" in group for group in said.values()):
            for name in filter(said.__contains__, self.weights):
                groups += [] if said[name] in groups else [said[name]]
                found[name] = groups.index(said[name])
            return groups, found
        for number in sorted(said, key=int):
            for name in said[number].get("params", ()):
                if name not in self.weights or name in found:
                    raise CheckpointError(
                        f"{self.path}: group {len(groups)} of its optimizer has {name!r}, which is no weight's name or "
                        f"in two groups; save it with {SAVE_WITH}"
                    )
                found[name] = len(groups)
            groups.append(hyper_parameters(said[number]))
        return groups, found

    # ---- values ------------------------------------------------------------------------------------------------------

    def _shape(self, key: str) -> tuple[int, ...]:
        shape = self.shapes[key]
        if shape is None:
            raise CheckpointError(f"{self.path}: {key!r} is no tensor; {WHERE_DAMAGED}")
        return shape

    def _value(self, key: str) -> Any:
        """Return the value of a key that is stored as one piece."""
        _, file, first, length = self.places[key][0]
        return read_tree(self.path, file, self.trust_pickle, (first, length))

    def _plain(self, key: str) -> Any:
        value = with_values(self.path, self._value(key))
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    def _rows(self, tensor: LogicalTensor, kind: str, key: str) -> Iterator[ManifestRow]:
        """Yield the manifest rows for the pieces of a tensor. A piece is a rectangular block in row-major order."""
        shape = self._shape(key)
        if shape != tensor.shape:
            raise CheckpointError(
                f"{self.path}: {key!r} is of shape {shape}, and its weight of {tensor.shape}; {WHERE_DAMAGED}"
            )
        for start, file, *place in self.places.get(key, ()) if tensor.numel else ():
            held = read_tree(self.path, file, False, (place[0], place[1]))
            if not isinstance(held, Stored) or not held.is_dense or not held.numel or len(held.shape) != len(shape):
                raise CheckpointError(
                    f"{self.path}: {key!r} is not stored row by row in {file}; save contiguous tensors"
                )
            begin = tuple(map(int, start or (0,) * len(shape)))
            end = tuple(map(int.__add__, begin, held.shape))
            if len(begin) != len(shape) or min((0, *begin)) < 0 or any(map(int.__gt__, end, shape)):
                raise CheckpointDamaged(
                    f"{self.path}: {key!r}: box {begin} to {end} is not in a tensor of shape {shape}; {WHERE_DAMAGED}"
                )
            found = rows_of_pieces(shape, [Placed(Box(begin, end), 0, row_major(held.shape))])
            starts, length = found.start, int(found.stop[0] - found.start[0])
            for number, count in zip(*series(np.zeros_like(starts), starts), strict=True):
                step = int(starts[number + 1] - starts[number]) if count > 1 else 0
                extent = Extent(int(starts[number]), length, step, int(count))
                yield stored_row(tensor, kind, held, extent, int(number) * length)


def _metadata(path: Path) -> dict[str, Any]:
    data = read_small(path, MOST_BYTES, links=True)
    try:
        check_pickle(data)
        found = _Reader(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # pickle raises many errors for bytes that are not a pickle
        raise CheckpointDamaged(f"{path} is no metadata, or cut off ({type(error).__name__}: {error})") from None
    if not isinstance(found, Opaque) or not found.fields.get("storage_data"):
        raise CheckpointDamaged(f"{path} is no metadata of a distributed checkpoint")
    return found.fields


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_dcp(
    saved: Saved,
    carry: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
) -> Path:
    """Convert one of our checkpoints to torch's format, in the new folder `path`. Return the folder.

    The folder becomes visible when it is complete.

    carry: the checkpoint's shared extra state, decoded.
    dtype: the type of the values of `model`; None to write masters, and frozen weights in their own type.
    progress: called with the number of bytes of each tensor.

    The conversion needs memory for the largest tensor. Raises CheckpointError if the folder exists, and
    CheckpointDamaged if values are not what was saved.
    """
    from torch.distributed.checkpoint import metadata as torchs
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    check_names([each.name for each in saved.record.logical_tensors()], saved.record.kinds)
    wanted, plain = _wanted(saved, dtype), {("step",): saved.record.step, **_plain(saved, carry)}
    held, storage, nested = dict[str, Any](), dict[Any, Any](), dict[str, Any]()
    with appearing(path, parents=True) as hidden, Reader(saved.path, saved.manifest) as reader:
        hidden.mkdir()
        with (hidden / DATA).open("xb") as file:
            for keys in (*plain, *wanted):
                name, begin, value, first = ".".join(keys), file.tell(), plain.get(keys), None
                if keys in wanted:
                    value = proven(reader, *wanted[keys])
                    progress(value.nbytes)
                torch.save(value, file)
                held[name], nested[name] = torchs.BytesStorageMetadata(), keys
                if isinstance(value, torch.Tensor):
                    first, properties = torch.Size([0] * value.dim()), torchs.TensorProperties.create_from_tensor(value)
                    piece = torchs.ChunkStorageMetadata(first, value.size())
                    held[name] = torchs.TensorStorageMetadata(properties, value.size(), [piece])
                storage[torchs.MetadataIndex(name, first)] = _StorageInfo(DATA, begin, file.tell() - begin)
            file.flush()
            os.fsync(file.fileno())
        write(hidden / METADATA, pickle.dumps(torchs.Metadata(held, nested, storage)))
    return path


def _wanted(saved: Saved, dtype: torch.dtype | None) -> dict[Keys, tuple[LogicalTensor, str, torch.dtype | None]]:
    """Return a map from each key in the new checkpoint to its tensor, as (tensor, state kind, element type).

    The element type is None for values in their own type.
    """
    found: dict[Keys, tuple[LogicalTensor, str, torch.dtype | None]] = {}
    rows = saved.manifest.rows
    for tensor in saved.record.logical_tensors():
        if not tensor.numel:
            continue
        kind = MASTER if dtype is None and (tensor.name, MASTER) in rows else WEIGHT
        found["model", tensor.name] = tensor, kind, dtype
        for moment in saved.record.kinds:
            if row_of(moment).is_moment and (tensor.name, moment) in rows:
                found["optim", "state", tensor.name, moment] = tensor, moment, None
    return found


def _plain(saved: Saved, carry: Mapping[str, Any]) -> dict[Keys, Any]:
    """Return the optimizer's scalars and hyper-parameters of each tensor, keyed as in the new checkpoint."""
    found: dict[Keys, Any] = {}
    tensors = saved.record.logical_tensors()
    for name, table in carry.get("scalars", {}).items():
        for number, value in table.items():
            # torch's optimizers have scalars of 32 bits
            short, whole = torch.tensor(value), torch.tensor(value, dtype=torch.float64)
            found["optim", "state", tensors[int(number)].name, name] = short if short == whole else whole
    for tensor in tensors:
        for key, value in carry["groups"][tensor.group].items() if tensor.trainable and "groups" in carry else ():
            found["optim", "param_groups", tensor.name, key] = value
    return found
