"""`checkpoint.json`: the description of a checkpoint, its state outside tensors, and checksums of its small files.

A version has two numbers. Readers refuse a checkpoint whose first number differs from their own. They accept a higher
second number, and ignore unknown keys, files, and columns after the known ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict, ValidationError
from pydantic.dataclasses import dataclass as validated

from ds_dynatrain.checkpoint.files import WHERE_DAMAGED, dumped, naming, parsed, read_small
from ds_dynatrain.checkpoint.manifest import MOST_ELEMENTS, Manifest, sizes_of
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, LayoutError
from ds_dynatrain.space import WEIGHT, Layout, LogicalTensor
from ds_dynatrain.space.tensor import CoordinateLine
from ds_dynatrain.version import __version__

FORMAT, VERSION = "ds_dynatrain universal checkpoint", (1, 1)
RECORD, MANIFEST = "checkpoint.json", "manifest.arrow"
WRITER = f"ds_dynatrain {__version__}"
"""Name and version of the writer, for readers that cannot read the checkpoint."""

Size = Annotated[int, Field(ge=0, lt=1 << 63)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=MOST_ELEMENTS)]], Field(max_length=64)]
Group = Annotated[int, Field(ge=-1, lt=1 << 31)]
Tensor = Annotated[tuple[str, Shape, Group, bool], Strict(False)]
"""A tensor's name, shape and group, and whether it belongs to an expert."""


@validated(frozen=True, config=ConfigDict(strict=True))
class TrainingRecord:
    """The state of a whole job except its tensors, in JSON types with validated ranges.

    step: number of optimizer steps done.
    layout: the layout in which the checkpoint was saved, keyed by axis name.
    generation: the number of the world that saved the checkpoint, from which new ranks derive random streams.
    seed: the seed of the job that saved the checkpoint, from which new ranks derive random streams.
    kinds: the state kinds in the checkpoint.
    tensors: the logical tensors in registration order.
    carry: the encoded extra state that all ranks share.
    rests: for each rank, the rank whose file contains its extra state ("rest").
    sums: checksums of the small files, keyed by file name.
    sizes: sizes of the data files in bytes, keyed by file name.
    written_by: name and version of the writer.
    converted_from: the original format of a converted checkpoint, or "".

    A converted checkpoint may lack some extra state and the random streams; a job that loads it then keeps its own. The
    groups of the tensors are valid only if the checkpoint has hyper-parameters of groups.
    """

    step: Size
    layout: dict[str, Any]
    generation: Size
    seed: int
    kinds: list[str]
    tensors: list[Tensor]
    carry: dict[str, Any]
    rests: list[Size]
    sums: dict[str, str]
    sizes: dict[str, Size]
    written_by: str = ""
    converted_from: str = ""

    @property
    def world(self) -> Layout:
        """The layout in which the checkpoint was saved."""
        return Layout.from_dict(self.layout)

    def logical_tensors(self) -> tuple[LogicalTensor, ...]:
        """Return all logical tensors, trainable and frozen, in registration order."""
        return tuple(LogicalTensor(name, tuple(shape), group, expert) for name, shape, group, expert in self.tensors)


def rank_file(rank: int) -> str:
    """Return the name of the file with one rank's own state, such as its random streams."""
    return f"{rank:05d}.json"


def sum_of(data: bytes) -> str:
    """Return the checksum of a small file's content, with which damage is detected."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def to_bytes(record: TrainingRecord) -> bytes:
    """Return the content of `checkpoint.json` for a record, including a checksum of that content."""
    content = {"format": FORMAT, "version": list(VERSION), **asdict(record)}
    return dumped({**content, "sum": sum_of(_canonical(content))})


def from_bytes(data: bytes) -> TrainingRecord:
    """Parse the content of `checkpoint.json`, which `to_bytes` made.

    Raises CheckpointError for an unsupported version, and CheckpointDamaged for invalid or changed content.
    """
    content = parsed(data, RECORD)
    if content.get("format") != FORMAT:
        raise CheckpointDamaged(f"{RECORD} does not say that it is a {FORMAT}")
    version = content.get("version")
    if not (isinstance(version, list) and len(version) == 2 and all(isinstance(each, int) for each in version)):
        raise CheckpointDamaged(f"{RECORD}: its version is {version!r}, and two whole numbers are expected")
    if version[0] != VERSION[0]:
        raise CheckpointError(
            f"the checkpoint is of version {version[0]}.{version[1]}, and this reads {VERSION[0]}.x; read it with the "
            f"ds_dynatrain that wrote it ({content.get('written_by') or 'unknown'}) or a later one"
        )
    if content.pop("sum", None) != sum_of(_canonical(content)):
        raise CheckpointDamaged(f"{RECORD} is not what was saved: its checksum is another")
    try:
        record = TrainingRecord(
            **{each.name: content[each.name] for each in fields(TrainingRecord) if each.name in content}
        )
        check_tensors(record.logical_tensors())
        ranks = record.world.world_size
    except ValidationError as error:
        raise CheckpointDamaged(f"{RECORD}: {what_is_wrong(error)}") from None
    except LayoutError as error:
        raise CheckpointDamaged(f"{RECORD}: {error}; {WHERE_DAMAGED}") from None
    if len(record.rests) != ranks or not all(rank < ranks for rank in record.rests):
        raise CheckpointDamaged(f"{RECORD}: a rest for each of {ranks} ranks is expected, not {record.rests!r}")
    return record


def what_is_wrong(error: ValidationError) -> str:
    """Return the location of the first invalid value, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def check_tensors(tensors: Sequence[LogicalTensor]) -> None:
    """Raise CheckpointDamaged if tensors are too large in total, share a name, or are not ordered by group."""
    numel = 0
    for tensor in tensors:
        numel += math.prod(dim for dim in tensor.shape if dim)  # strides need these, even if a dim is 0
        if numel > MOST_ELEMENTS:
            raise CheckpointDamaged(
                f"{tensor.name!r} of shape {tensor.shape} makes {numel} elements, and at most {MOST_ELEMENTS} are read"
            )
    twice = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    if twice:
        raise CheckpointDamaged(f"two of {len(tensors)} tensors have one name, {twice[0]!r}")
    try:
        CoordinateLine(tuple(tensors))
    except LayoutError as error:
        raise CheckpointDamaged(f"its tensors: {error}") from None


def check_agreement(tensors: Sequence[LogicalTensor], kinds: Collection[str], manifest: Manifest) -> None:
    """Raise CheckpointDamaged unless the manifest has exactly these tensors and shapes, and weights for each tensor."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for (name, kind), rows in manifest.rows.items():
        if kind in kinds and shapes.get(name) != rows[0].shape:
            mine = f"{RECORD} has {shapes[name]}" if name in shapes else f"{RECORD} has no such tensor"
            raise CheckpointDamaged(f"the manifest has {kind} of {name!r} in shape {rows[0].shape}, and {mine}")
    for tensor in tensors:
        if tensor.numel and (tensor.name, WEIGHT) not in manifest.rows:
            raise CheckpointDamaged(f"{RECORD} has {tensor.name!r}, and the manifest has no weights of it")


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


@dataclass(frozen=True, eq=False)
class Saved:
    """An opened checkpoint: its folder, its record and its manifest. Its tensors have not been read."""

    path: Path
    record: TrainingRecord
    manifest: Manifest

    @staticmethod
    def open(path: Path) -> Saved:
        """Read and check the record and the manifest of a checkpoint.

        Raises CheckpointError if there is no checkpoint or its version is not supported, and CheckpointDamaged, naming
        the file, if the checkpoint is incomplete or damaged.
        """
        if not (path / RECORD).is_file():
            raise CheckpointError(
                f"{path} is no checkpoint of ds_dynatrain: it has no {RECORD}; give the folder of a tag, or first "
                "convert another tool's: `ds-dynatrain checkpoint convert PATH FOLDER --to universal`"
            )
        with naming(path):
            record = from_bytes(read_small(path / RECORD))
            saved = Saved(path, record, Manifest.from_bytes(_checked(path, record, MANIFEST)))
            saved._check()
        return saved

    def _check(self) -> None:
        """Raise CheckpointDamaged if files, manifest and tensors are inconsistent."""
        found = sizes_of(self.path)
        for name, size in self.record.sizes.items():
            if found.get(name) != size:
                raise CheckpointDamaged(
                    f"{name} has {found.get(name, 0)} bytes, and {size} were saved: a part is missing; {WHERE_DAMAGED}"
                )
        self.manifest.check(self.path)
        check_agreement(self.record.logical_tensors(), {*self.record.kinds, WEIGHT}, self.manifest)

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return the content of the file with a rank's own state, such as its random streams.

        rank: a rank of the world that saved the checkpoint.

        Raises CheckpointDamaged if the file has changed since it was saved.
        """
        name = rank_file(rank)
        return parsed(_checked(self.path, self.record, name), name)


def _checked(path: Path, record: TrainingRecord, name: str) -> bytes:
    data = read_small(path / name)
    if sum_of(data) != record.sums.get(name):
        raise CheckpointDamaged(f"{path / name} is not what was saved: its checksum is another; {WHERE_DAMAGED}")
    return data
