"""The manifest: a table with one row per extent, which gives its tensor, its state kind, and its position in a file.

A row without a file describes weights that equal their masters cast to another type. Such weights are not stored, and
the digest is that of the cast. Before it is used, a manifest is checked for consistency, both by itself and with the
files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ds_dynatrain.checkpoint.extents import ALIGN, WORD, Extent, named, runs_of
from ds_dynatrain.errors import CheckpointDamaged
from ds_dynatrain.space import MASTER, WEIGHT
from ds_dynatrain.space.interval import Ints

COLUMNS = {
    "tensor": "text",
    "kind": "text",
    "dtype": "text",
    "shape": "ints",
    "start": "int64",
    "length": "int64",
    "step": "int64",
    "count": "int64",
    "file": "text",
    "offset": "int64",
    "digest": "uint64",
}
"""The columns of the table, in order, with their types as named in `arrow`."""
FILE_NAME = re.compile(r"[0-9]{5,}\.[a-z0-9_]+\.arrow")
MOST_RUNS = 1 << 24
"""Maximum number of runs of one tensor and state kind. Runs are expanded in memory."""
MOST_ELEMENTS = 1 << 56


@dataclass(frozen=True)
class ManifestRow:
    """An extent (see `extents`) of one state kind of a tensor, and its position in a file.

    tensor: the name of the tensor.
    kind: the state kind.
    dtype: the name of the element type.
    shape: the shape of the whole tensor.
    extent: the elements of the tensor.
    file: the name of the file; "" for weights that are not stored.
    offset: the position of the first byte in the file.
    digest: the extent's contribution to the digest of the tensor.
    """

    tensor: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    file: str
    offset: int
    digest: int

    @property
    def numel(self) -> int:
        """Number of elements in the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the extent in bytes."""
        return self.extent.numel * named(self.dtype).itemsize

    def __str__(self) -> str:
        where = f", in {self.file} at byte {self.offset}" if self.file else ""
        return f"{self.kind} of {self.tensor!r}, {self.extent}{where}"


@dataclass(frozen=True, eq=False)
class ElementRuns:
    """The positions of all elements of one tensor and state kind, as consecutive runs.

    start: the first element of each run.
    stop: the end of each run.
    file: the index of each run's file in `files`; -1 if the run is not stored.
    position: the position of each run's first byte in its file.
    files: the names of the files.
    dtype: the name of the element type.
    """

    start: Ints
    stop: Ints
    file: Ints
    position: Ints
    files: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Manifest:
    """The table of a checkpoint's extents.

    rows: the rows, keyed by (tensor name, state kind).
    """

    rows: Mapping[tuple[str, str], tuple[ManifestRow, ...]]

    @staticmethod
    def of(rows: Iterable[ManifestRow]) -> Manifest:
        """Build a manifest from rows in any order."""
        found: dict[tuple[str, str], list[ManifestRow]] = {}
        for row in rows:
            found.setdefault((row.tensor, row.kind), []).append(row)
        return Manifest({key: tuple(sorted(held, key=lambda row: row.extent.start)) for key, held in found.items()})

    def __iter__(self) -> Iterator[ManifestRow]:
        for held in self.rows.values():
            yield from held

    def digest(self, tensor: str, kind: str) -> int:
        """Return the digest of one state kind of a whole tensor."""
        return sum(row.digest for row in self.rows[tensor, kind]) & WORD

    def dtype(self, tensor: str, kind: str) -> torch.dtype | None:
        """Return the element type of one state kind of a tensor; None if the manifest does not have it."""
        rows = self.rows.get((tensor, kind))
        return named(rows[0].dtype) if rows else None

    def check(self, folder: Path | None) -> None:
        """Raise CheckpointDamaged, naming tensor and kind, if rows are inconsistent or do not match the files.

        folder: the folder of the files; None to skip the check of files and positions.
        """
        for problem in self._problems(folder):
            raise CheckpointDamaged(f"the manifest is wrong: {problem}")

    def _problems(self, folder: Path | None) -> Iterator[str]:
        sizes = {} if folder is None else sizes_of(folder)
        for (tensor, kind), held in self.rows.items():
            first, what = held[0], f"{kind} of {tensor!r}"
            for row in held:
                wrong = _wrong_row(row, first) or ("" if folder is None else _wrong_place(row, sizes))
                if wrong:
                    yield f"{row}: {wrong}"
            runs, numel = sum(row.extent.count for row in held), sum(row.extent.numel for row in held)
            if numel != first.numel:
                yield f"{what} is there twice or not at all: {numel} of {first.numel} elements"
            if runs > MOST_RUNS:
                yield f"{what} in {runs} runs, and at most {MOST_RUNS} are read"
            if not all(row.file for row in held) and (tensor, MASTER) not in self.rows:
                yield f"nothing is stored of {what}, nor a master"
        stored = () if folder is None else (row for row in self if row.file)
        for row, after in pairwise(sorted(stored, key=lambda row: (row.file, row.offset))):
            # otherwise a small file could hold any number of values
            if row.file == after.file and row.offset + row.nbytes > after.offset:
                yield f"{row} and {after} are in one place"

    def runs(self, tensor: str, kind: str) -> ElementRuns:
        """Return the positions of all elements of a tensor and state kind. Call `check` first.

        Raises CheckpointDamaged unless the rows cover each element exactly once.
        """
        held = self.rows[tensor, kind]
        files = tuple(sorted({row.file for row in held if row.file}))
        number = {name: index for index, name in enumerate(files)}
        columns: list[tuple[Ints, Ints, Ints, Ints]] = []
        for row in held:
            start, place = runs_of(row.extent)
            file = np.full(len(start), number.get(row.file, -1), dtype=np.int64)
            position = row.offset + place * named(row.dtype).itemsize
            columns.append((start, start + row.extent.length, file, position))
        start, stop, file, position = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(start, kind="stable")
        start, stop = start[order], stop[order]
        ends = np.append(start, held[0].numel)
        if start[0] != 0 or (stop != ends[1:]).any():
            wrong = int(np.flatnonzero(np.append(start[0] != 0, stop != ends[1:]))[0])
            at = int(stop[wrong - 1]) if wrong else 0
            raise CheckpointDamaged(f"{kind} of {tensor!r} is there twice or not at all at element {at}")
        return ElementRuns(start, stop, file[order], position[order], files, held[0].dtype)

    def to_bytes(self) -> bytes:
        """Return the manifest as an Arrow IPC file."""
        from ds_dynatrain.checkpoint import arrow

        of_extent = {each.name for each in fields(Extent)}
        columns = {name: [getattr(row.extent if name in of_extent else row, name) for row in self] for name in COLUMNS}
        return arrow.table_bytes(COLUMNS, columns)

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Parse the result of `to_bytes`, without calling `check`. Raises CheckpointDamaged for any other content."""
        from ds_dynatrain.checkpoint import arrow

        found = arrow.read_table(data, COLUMNS)
        columns = list(found.values())
        return Manifest.of(map(ManifestRow, *columns[:4], map(Extent, *columns[4:8]), *columns[8:]))


def _wrong_row(row: ManifestRow, first: ManifestRow) -> str:
    """Return what is wrong with a row, regardless of files; "" if nothing is.

    first: the first row of the same tensor and kind, with which type and shape must agree.
    """
    extent, numel = row.extent, row.numel
    if (row.shape, row.dtype) != (first.shape, first.dtype):
        return f"of {row.dtype} {row.shape}, and another row says {first.dtype} {first.shape}"
    if any(dim < 0 for dim in row.shape) or not 0 < numel <= MOST_ELEMENTS:
        return f"of shape {row.shape}"
    end = extent.start + (extent.count - 1) * extent.step + extent.length
    if extent.start < 0 or min(extent.length, extent.count) < 1 or end > numel:
        return f"it leaves a tensor of {numel} elements"
    if extent.count > 1 and extent.step < extent.length:
        return "its runs overlap"
    try:
        named(row.dtype)
    except CheckpointDamaged as error:
        return str(error)
    return ""


def _wrong_place(row: ManifestRow, sizes: Mapping[str, int]) -> str:
    """Return what is wrong with the file and position of a row; "" if nothing is."""
    if not row.file:
        return "" if row.kind == WEIGHT else "no file has it"
    if row.file not in sizes:
        return "there is no such data file"
    if row.offset < 0 or row.offset % ALIGN or row.offset + row.nbytes > sizes[row.file]:
        return f"{row.nbytes} bytes from there leave a file of {sizes[row.file]} bytes"
    return ""


def sizes_of(path: Path) -> dict[str, int]:
    """Return a map from the name of each data file in a folder to its size in bytes. Links are no data files."""
    names = [each for each in path.iterdir() if FILE_NAME.fullmatch(each.name)]
    return {each.name: each.stat().st_size for each in names if each.is_file() and not each.is_symlink()}
