"""Arrow IPC files, made and read with pyarrow: tables, and data files.

No other module imports pyarrow, and this module is imported only when a checkpoint is read or written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, BinaryIO

import pyarrow as pa
import torch
from pyarrow import ipc

from ds_dynatrain.checkpoint.extents import ALIGN, name_of
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

MOST_ROWS = 1 << 22
"""Maximum number of rows in a table. A parsed table takes a hundred times the memory of its file."""
_ARROWS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
"""Element types that Arrow has under the same names. Elements of other types are stored as fixed-size binary."""
_TYPES = {
    "text": pa.utf8(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "ints": pa.list_(pa.field("item", pa.int64(), nullable=False)),
}
_OPENING = 8
"""Number of bytes in a file before its first message."""


# ---- data files -----------------------------------------------------------------------------------------------------


class ArrowValues:
    """Writer of an Arrow file with a single column. Each batch is written directly from the memory of its values."""

    def __init__(self, file: BinaryIO, dtype: torch.dtype) -> None:
        name = name_of(dtype)
        self.type = getattr(pa, name)() if name in _ARROWS else pa.binary(dtype.itemsize)
        self.schema = pa.schema([pa.field("values", self.type, nullable=False, metadata={"dtype": name})])
        self._file, self._writer = file, ipc.new_file(file, self.schema, options=ipc.IpcWriteOptions())

    def write(self, values: torch.Tensor) -> int:
        """Append flat values on the host as a batch. Return the position in the file at which they begin."""
        column = pa.Array.from_buffers(self.type, len(values), [None, pa.py_buffer(values.view(torch.uint8).numpy())])
        self._writer.write_batch(pa.RecordBatch.from_arrays([column], schema=self.schema))
        return self._file.tell() - -(-values.nbytes // ALIGN) * ALIGN

    def close(self) -> None:
        """Complete the file after the last batch."""
        self._writer.close()


# ---- tables ---------------------------------------------------------------------------------------------------------


def table_bytes(columns: Mapping[str, str], values: Mapping[str, Sequence[Any]]) -> bytes:
    """Return an Arrow file with a table in one batch.

    columns: a map from each column's name to its type: "text", "int64", "uint64" or "ints" (lists of int64).
    values: the values of each column, keyed by name.

    Raises CheckpointError if the table has more rows than a reader accepts.
    """
    rows = len(values[next(iter(columns))])
    if rows > MOST_ROWS:
        raise CheckpointError(f"{rows} rows in one table, and at most {MOST_ROWS} can be read; save with fewer ranks")
    schema = pa.schema([pa.field(name, _TYPES[kind], nullable=False) for name, kind in columns.items()])
    batch = pa.record_batch([pa.array(values[each.name], each.type) for each in schema], schema=schema)
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, schema, options=ipc.IpcWriteOptions()) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def read_table(data: bytes, columns: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the values of a table that `table_bytes` wrote, as Python objects, keyed by column.

    Additional columns after those in `columns` are ignored, because later versions may add some. Raises
    CheckpointDamaged for any other content.
    """
    try:
        batch = _batch(pa.py_buffer(data), columns)
    except Exception as error:  # pyarrow raises many errors for damaged bytes, without a common base class
        raise CheckpointDamaged(f"it is no table that can be read: {error}") from None
    return {name: _values(batch.column(number), columns[name]) for number, name in enumerate(columns)}


def _batch(data: pa.Buffer, columns: Mapping[str, str]) -> Any:
    """Return the columns of a table, validated and without nulls. The result refers to `data` without copying it."""
    file = ipc.open_file(data)
    found = [(each.name, each.type) for each in file.schema]
    if found[: len(columns)] != [(name, _TYPES[kind]) for name, kind in columns.items()]:
        raise ValueError(f"its columns are not {', '.join(columns)}")
    if file.num_record_batches != 1:
        raise ValueError(f"it has {file.num_record_batches} batches, and 1 is expected")
    _, message = islice(ipc.MessageReader.open_stream(data.slice(_OPENING)), 2)
    if message.type != "record batch" or _is_compressed(message.metadata):
        raise ValueError("its batch is none, or compressed")
    batch = ipc.read_record_batch(message, file.schema).select(range(len(columns)))
    if batch.num_rows > MOST_ROWS:
        raise ValueError(f"{batch.num_rows} rows, and at most {MOST_ROWS} can be read")
    batch.validate(full=True)
    if any(each.null_count or (pa.types.is_list(each.type) and each.values.null_count) for each in batch):
        raise ValueError("a value is null")
    return batch


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return whether a batch is compressed. A compressed batch could expand to any size.

    pyarrow has already validated the metadata, but does not expose this field.
    """
    data = memoryview(metadata)

    def place(table: int, number: int) -> int:
        """Return the position of a field of a flatbuffer table; 0 if the field is absent."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        within = 4 + 2 * number < struct.unpack_from("<H", data, vtable)[0]
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0] if within else 0
        return table + offset if offset else 0

    header = place(struct.unpack_from("<I", data, 0)[0], 2)
    return place(header + struct.unpack_from("<I", data, header)[0], 3) != 0


def _values(column: Any, kind: str) -> list[Any]:
    """Return a column as a list of Python values. Equal strings are the same object, to save memory.

    kind: the type of the column, as in `table_bytes`.
    """
    if kind == "text":
        coded = column.dictionary_encode()
        texts = coded.dictionary.to_pylist()
        return [texts[index] for index in coded.indices.to_numpy().tolist()]
    if kind == "ints":
        flat, ends = column.values.to_numpy().tolist(), column.offsets.to_numpy().tolist()
        return [tuple(flat[low:high]) for low, high in pairwise(ends)]
    return list(column.to_numpy().tolist())
