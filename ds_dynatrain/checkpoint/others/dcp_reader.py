"""What a folder of torch's distributed checkpoint (DCP) tells, by its `.metadata`, a pickle that is not run.

Nothing but plain values and `Opaque` stand-ins for torch's own records comes of it. The values lie in files of many
small files of `torch.save`, one for each piece of a tensor.

| key | what is taken of it |
|---|---|
| `model.NAME`, else all tensors | weights; masters are made of those that are trained |
| `optim.state.NAME.exp_avg` `.step` | moments and steps |
| `optim.param_groups.NAME.lr` | hyper-parameters by tensor, from which groups are made again |
| `optim.param_groups.0.lr` `.params` | a group's hyper-parameters, and the names of its tensors |

`optim` may be called `optimizer`. Its levels are apart (`optim`, `state`, NAME, `exp_avg`), or in one name below
`optim`, as torch has them with `flatten_optimizer_state_dict=True`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.files import WHERE_DAMAGED, read_small
from ds_dynatrain.checkpoint.manifest import Manifest, Row
from ds_dynatrain.checkpoint.names import is_component
from ds_dynatrain.checkpoint.others.foreign import Foreign, hyper_parameters, in_order, number_of
from ds_dynatrain.checkpoint.others.pickles import MOST_BYTES, Opaque, check_pickle
from ds_dynatrain.checkpoint.others.torch_files import Stored, read_tree, with_values
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, LayoutError
from ds_dynatrain.space import FROZEN, WEIGHT, Box, LogicalTensor, runs_of_box

FORMAT = "a torch distributed checkpoint"
METADATA, MODEL, OPTIM = ".metadata", "model", "optim"
OPTIMS = (OPTIM, "optimizer")
STATE, GROUPS = (OPTIM, "state"), (OPTIM, "param_groups")


def _layout(name: object) -> str:
    """The name of a memory layout. It is all that may be made of it: the text of a nested value could be endless."""
    if not isinstance(name, str):
        raise CheckpointError(
            f"{METADATA} holds a memory layout that is a {type(name).__name__} and no name; write the checkpoint anew "
            "with torch.distributed.checkpoint"
        )
    return name


_RECORDS = "torch.distributed.checkpoint.metadata"
ALLOWED: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *(f"{_RECORDS}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
            *(f"{_RECORDS}.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
            f"{_RECORDS}.TensorProperties",
            "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
            "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
        ),
        Opaque,
    ),
    "torch.Size": tuple,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": dict,
}
"""What may stand in the metadata, and what is made of it; beside these torch's element types."""


def is_dcp(path: Path) -> bool:
    """Whether a folder looks like such a checkpoint."""
    return (path / METADATA).is_file()


def read_dcp(path: Path, trust_pickle: bool = False) -> Foreign:
    """Describe a checkpoint; CheckpointError for content that is refused, CheckpointDamaged if a part of it is missing
    or it cannot be true. trust_pickle: of values that are neither tensors nor plain, never of the metadata.
    """
    return _Folder.open(path, trust_pickle).foreign()


class _Reader(pickle.Unpickler):
    """Makes nothing but what `ALLOWED` says: no class or function of the file's choice is ever looked up."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        found = getattr(torch, name, None) if module == "torch" else None
        if full in ALLOWED or isinstance(found, torch.dtype):
            return ALLOWED.get(full, found)
        raise CheckpointError(
            f"{METADATA} holds a {full}, which is no record of a checkpoint, and is not read; write the checkpoint "
            "anew with torch.distributed.checkpoint"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(
            f"{METADATA} refers to something outside of it ({pid!r:.80}); write the checkpoint anew with "
            "torch.distributed.checkpoint"
        )


@dataclass(frozen=True, eq=False)
class _Folder:
    """shapes: of tensors by key. places: (offset in the tensor, file, first byte, length) of the pieces of a key."""

    path: Path
    trust_pickle: bool
    keys: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...] | None]
    places: Mapping[str, list[tuple[Any, str, int, int]]]

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
        nested = said.get("planner_data") or {}
        keys = {key: _levels(tuple(map(str, nested.get(key) or _split(key, held)))) for key in held}
        sizes = {key: each.fields.get("size") for key, each in held.items()}
        shapes = {key: None if size is None else tuple(map(int, size)) for key, size in sizes.items()}
        return _Folder(path, trust_pickle, keys, shapes, places)

    def foreign(self) -> Foreign:
        weights = self._weights()
        strange = next((name for name in self._states if name not in weights), None)
        if strange is not None:
            raise CheckpointError(
                f"{self.path} has optimizer states of {strange!r}, and no weight of that name; save both with "
                "torch.distributed.checkpoint.state_dict.get_state_dict, or the model alone to go on without them"
            )
        groups, number_in = self._groups(weights)
        if self._states and not groups:
            raise CheckpointError(
                f"{self.path} has optimizer states and no '{OPTIM}.param_groups' that names their tensors; save "
                "it with torch.distributed.checkpoint.state_dict.get_state_dict"
            )
        frozen = FROZEN if groups else 0
        found = [LogicalTensor(name, self._shape(key), number_in.get(name, frozen)) for name, key in weights.items()]
        tensors = in_order(found)
        rows, scalars = list[Row](), dict[str, dict[str, float]]()
        for number, tensor in enumerate(tensors):
            rows += self._rows(tensor, WEIGHT, weights[tensor.name])
            for kind, key in self._states.get(tensor.name, {}).items():
                shape = self._shape(key)
                if kind == "step" or (shape == () and tensor.shape != ()):
                    scalars.setdefault(kind, {})[str(number)] = number_of(self.path, self._value(key))
                else:
                    rows += self._rows(tensor, kind, key)
        taken = {*weights.values(), *(key for each in tensors for key in self._states.get(each.name, {}).values())}
        of_groups = [key for key, each in self.keys.items() if groups and each[:2] == GROUPS]
        left_out = sorted({*self.keys} - taken - {*of_groups, "step"})
        step = int(max(scalars.get("step", {}).values(), default=0))
        if self.keys.get("step") == ("step",):
            step = int(number_of(self.path, self._value("step")))
        carry: dict[str, Any] = {}
        if groups:
            carry = {"groups": groups, "scalars": scalars, "counters": {"global_steps": step}, "windows": step}
        read = [place for key, held in self.places.items() if key not in left_out for place in held]
        archives = tuple((file, (first, length)) for _, file, first, length in read)
        manifest = Manifest.of(rows)
        return Foreign(self.path, FORMAT, manifest, tensors, step, carry, left_out=tuple(left_out), archives=archives)

    def _weights(self) -> dict[str, str]:
        """Name of each weight -> its key."""
        tops = {each[0] for each in self.keys.values() if len(each) > 1}
        if MODEL in tops:
            return {".".join(each[1:]): key for key, each in self.keys.items() if each[0] == MODEL and len(each) > 1}
        if tops:
            raise CheckpointError(
                f"{self.path} has {', '.join(sorted(tops))}, and no {MODEL!r} to take weights from; save it as "
                "{{MODEL!r}: ...}"
            )
        return {key: key for key, shape in self.shapes.items() if shape is not None}

    @cached_property
    def _states(self) -> dict[str, dict[str, str]]:
        """Tensor -> state of its optimizer -> key."""
        found: dict[str, dict[str, str]] = {}
        for key, each in self.keys.items():
            if each[:2] == STATE and len(each) > 3 and self.shapes[key] is not None:
                found.setdefault(".".join(each[2:-1]), {})[each[-1]] = key
        return found

    def _groups(self, weights: Iterable[str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """(hyper-parameters of the groups, group of each tensor).

        Where they are noted by tensor, those with equal ones are a group; else groups are as they were.
        """
        said: dict[str, dict[str, Any]] = {}
        for key, each in self.keys.items():
            if each[:2] == GROUPS and len(each) > 3:
                said.setdefault(".".join(each[2:-1]), {})[each[-1]] = self._plain(key)
        if any("params" in group for group in said.values()):
            return self._listed_groups([said[number] for number in sorted(said, key=int)], {*weights})
        groups: list[dict[str, Any]] = []
        found: dict[str, int] = {}
        for name in weights:
            if name in said:
                if said[name] not in groups:
                    groups.append(said[name])
                found[name] = groups.index(said[name])
        return groups, found

    def _listed_groups(
        self, said: list[dict[str, Any]], weights: Collection[str]
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The same for groups that list their tensors; CheckpointError for a list of anything but weights' names."""
        found: dict[str, int] = {}
        for number, group in enumerate(said):
            for name in group.get("params", ()):
                if name not in weights or name in found:
                    raise CheckpointError(
                        f"{self.path}: group {number} of its optimizer has {name!r}, which is no weight's name or in "
                        "two groups; save it with torch.distributed.checkpoint.state_dict.get_state_dict"
                    )
                found[name] = number
        return [hyper_parameters(group) for group in said], found

    # ---- values ------------------------------------------------------------------------------------------------------

    def _shape(self, key: str) -> tuple[int, ...]:
        shape = self.shapes[key]
        if shape is None:
            raise CheckpointError(f"{self.path}: {key!r} is no tensor; {WHERE_DAMAGED}")
        return shape

    def _value(self, key: str) -> Any:
        """What is stored as one value."""
        _, file, first, length = self.places[key][0]
        return read_tree(self.path, file, self.trust_pickle, (first, length))

    def _plain(self, key: str) -> Any:
        value = with_values(self.path, self._value(key))
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    def _rows(self, tensor: LogicalTensor, kind: str, key: str) -> list[Row]:
        """The pieces of a tensor; each is a box of it, stored row by row."""
        shape, rows = self._shape(key), list[Row]()
        if shape != tensor.shape:
            raise CheckpointError(
                f"{self.path}: {key!r} is of shape {shape}, and its weight of {tensor.shape}; {WHERE_DAMAGED}"
            )
        for start, file, first, length in self.places.get(key, ()) if tensor.numel else ():
            held = read_tree(self.path, file, False, (first, length))
            if not isinstance(held, Stored) or not held.is_dense or not held.numel or len(held.shape) != len(shape):
                raise CheckpointError(
                    f"{self.path}: {key!r} is not stored row by row in {file}; save contiguous tensors"
                )
            begin = tuple(map(int, start or (0,) * len(shape)))
            try:
                box = Box(begin, tuple(low + size for low, size in zip(begin, held.shape, strict=True)))
                starts, stops = runs_of_box(shape, box)
            except LayoutError as error:
                raise CheckpointDamaged(f"{self.path}: {key!r}: {error}") from None
            rows += _rows_of(tensor, kind, held, starts, stops)
        return rows


def _rows_of(tensor: LogicalTensor, kind: str, held: Stored, starts: Any, stops: Any) -> list[Row]:
    """A row for runs that are equally far apart, else one for each run."""
    said = tensor.name, kind, name_of(held.dtype), tensor.shape
    if not len(starts):
        return []
    steps, length = np.diff(starts), int(stops[0] - starts[0])
    if (steps == steps[:1]).all() and (stops - starts == length).all():
        extent = Extent(int(starts[0]), length, int(steps[0]) if len(steps) else 0, len(starts))
        return [Row(*said, extent, held.file, held.offset, 0)]
    rows, at = [], held.offset
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        rows.append(Row(*said, Extent(start, stop - start, 0, 1), held.file, at, 0))
        at += (stop - start) * held.dtype.itemsize
    return rows


def _split(key: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Where a key of no noted path lies: as torch's `get_state_dict` names it if there is an optimizer, else plain."""
    if not any(each.startswith(f"{OPTIM}.") for each in keys):
        return (key,)
    for prefix in (f"{OPTIM}.state.", f"{OPTIM}.param_groups."):
        if key.startswith(prefix):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            return (*prefix.rstrip(".").split("."), name, last)
    return (MODEL, key.removeprefix(f"{MODEL}.")) if key.startswith(f"{MODEL}.") else (key,)


def _levels(path: tuple[str, ...]) -> tuple[str, ...]:
    """The levels of a key, each by itself, and an optimizer's below `optim`."""
    top, *rest = path
    if top not in OPTIMS or not rest:
        return path
    kind, _, below = rest[0].partition(".")
    if len(rest) == 1 and (OPTIM, kind) in (STATE, GROUPS) and below:
        name, _, last = below.rpartition(".")
        rest = [kind, name, last]
    return (OPTIM, *rest)


def _metadata(path: Path) -> dict[str, Any]:
    data = read_small(path, MOST_BYTES, links=True)
    try:
        check_pickle(data)
        found = _Reader(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # pickle has many ways to say that bytes are none
        raise CheckpointDamaged(f"{path} is no metadata, or cut off ({type(error).__name__}: {error})") from None
    if not isinstance(found, Opaque) or not found.fields.get("storage_data"):
        raise CheckpointDamaged(f"{path} is no metadata of a distributed checkpoint")
    return found.fields
