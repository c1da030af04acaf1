"""Arrow IPC files as far as a checkpoint needs them: columns without nulls, uncompressed, at offsets known beforehand.

A file is a schema, record batches, and a footer that lists them; the metadata of each is a flatbuffer. All bodies begin
at multiples of 64 bytes. The header of a batch has one size for one schema, so where a batch will lie is known before
anything is written, and tensors are written and read in place. Any Arrow implementation reads the result.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ds_dynatrain.checkpoint.flatbuffer import FormatError, Scalar, Structs, Table, View, encode

ALIGN = 64
MAGIC = b"ARROW1"
_CONTINUES = b"\xff\xff\xff\xff"
_VERSION = Scalar("h", 4)
"""V5 of the metadata, since Arrow 1.0."""
_SCHEMA, _RECORD_BATCH = 1, 3
"""Numbers of a message's headers."""
_INT, _FLOAT, _UTF8, _LIST, _BYTES = 2, 3, 5, 12, 15
"""Numbers of types."""
_BLOCK, _NODE, _BUFFER = "qi4xq", "qq", "qq"
MOST_ROWS = 1 << 22
"""Of a table, which takes a hundred times the memory once it is taken apart."""


@dataclass(frozen=True)
class Type:
    """Of a column's values. family: "int", "uint", "float", "bytes" (of `width` each), "text" or "ints" (lists)."""

    family: str
    width: int = 8

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values in numpy."""
        if self.family == "bytes":
            return np.dtype(f"V{self.width}")
        return np.dtype({"int": "<i", "uint": "<u", "float": "<f"}[self.family] + str(self.width))

    @property
    def buffers(self) -> int:
        """Number of buffers in a batch, the unused ones for nulls among them."""
        return {"text": 3, "ints": 4}.get(self.family, 2)

    @property
    def nodes(self) -> int:
        """Number of nodes in a batch."""
        return 2 if self.family == "ints" else 1


INT64, UINT64, TEXT, INTS = Type("int"), Type("uint"), Type("text"), Type("ints")


@dataclass(frozen=True)
class Column:
    """A column by name. metadata: what Arrow has no type for, in words."""

    name: str
    type: Type
    metadata: Mapping[str, str] = field(default_factory=dict)


Schema = Sequence[Column]


# ---- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Where a batch lies: its header at `offset`, and the body right behind it."""

    offset: int
    header: int
    body: int


def opening(schema: Schema) -> bytes:
    """The first bytes of a file, up to the first batch."""
    message = Table({0: _VERSION, 1: Scalar("B", _SCHEMA), 2: _schema(schema), 3: Scalar("q", 0)})
    return MAGIC + b"\0\0" + _framed(encode(message), 8)


def batch_header(schema: Schema, rows: int, lengths: Sequence[int], nodes: Sequence[int] | None = None) -> bytes:
    """What stands before the body of a batch; of a multiple of 64 bytes, to be put at one.

    lengths: bytes of the buffers, 0 for those that mark nulls; each begins at a multiple of 64. nodes: lengths of the
    columns and, after that of a list, of its values; `rows` each if not given.
    """
    counts = [rows] * sum(column.type.nodes for column in schema) if nodes is None else nodes
    at, buffers = 0, []
    for length in lengths:
        buffers.append((at, length))
        at += padded(length)
    batch = Table({0: Scalar("q", rows), 1: Structs(_NODE, [(n, 0) for n in counts]), 2: Structs(_BUFFER, buffers)})
    message = Table({0: _VERSION, 1: Scalar("B", _RECORD_BATCH), 2: batch, 3: Scalar("q", at)})
    return _framed(encode(message), 0)


def closing(schema: Schema, blocks: Sequence[Block]) -> bytes:
    """The last bytes of a file."""
    rows = [(block.offset, block.header, block.body) for block in blocks]
    footer = encode(Table({0: _VERSION, 1: _schema(schema), 2: Structs(_BLOCK, []), 3: Structs(_BLOCK, rows)}))
    return _CONTINUES + bytes(4) + footer + struct.pack("<i", len(footer)) + MAGIC


def padded(length: int) -> int:
    """Bytes that a buffer takes up."""
    return -(-length // ALIGN) * ALIGN


def table_bytes(schema: Schema, columns: Mapping[str, Any]) -> bytes:
    """A whole file with one batch. columns: by name a numpy array, a list of texts, or a list of lists of integers.

    FormatError for more rows than could be read again.
    """
    rows = len(columns[schema[0].name])
    if rows > MOST_ROWS:
        raise FormatError(f"{rows} rows, and at most {MOST_ROWS} can be read")
    buffers: list[bytes] = []
    nodes: list[int] = []
    for column in schema:
        values = columns[column.name]
        nodes.append(rows)
        if column.type == TEXT:
            parts = [str(value).encode() for value in values]
            buffers += [b"", _ends([len(part) for part in parts]), b"".join(parts)]
        elif column.type == INTS:
            flat = [number for value in values for number in value]
            buffers += [b"", _ends([len(value) for value in values]), b"", np.array(flat, "<i8").tobytes()]
            nodes.append(len(flat))
        else:
            buffers += [b"", np.asarray(values, column.type.dtype).tobytes()]
    first = opening(schema)
    head = batch_header(schema, rows, [len(each) for each in buffers], nodes)
    body = b"".join(each + bytes(padded(len(each)) - len(each)) for each in buffers)
    return first + head + body + closing(schema, [Block(len(first), len(head), len(body))])


def _ends(lengths: list[int]) -> bytes:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i4").tobytes()


def _framed(metadata: bytes, before: int) -> bytes:
    """A message with its length before it, and padded so that what follows begins at a multiple of 64."""
    room = padded(before + 8 + len(metadata)) - before
    return _CONTINUES + struct.pack("<i", room - 8) + metadata + bytes(room - 8 - len(metadata))


def _schema(schema: Schema) -> Table:
    return Table({0: Scalar("h", 0), 1: [_field(column.name, column.type, column.metadata) for column in schema]})


def _field(name: str, type_: Type, metadata: Mapping[str, str]) -> Table:
    number, described = _described(type_)
    children = [_field("item", INT64, {})] if type_ == INTS else []
    pairs = [Table({0: key, 1: value}) for key, value in metadata.items()]
    return Table(
        {0: name, 1: Scalar("B", 0), 2: Scalar("B", number), 3: described, 5: children, **({6: pairs} if pairs else {})}
    )


def _described(type_: Type) -> tuple[int, Table]:
    if type_.family in ("int", "uint"):
        return _INT, Table({0: Scalar("i", 8 * type_.width), 1: Scalar("B", type_.family == "int")})
    if type_.family == "float":
        return _FLOAT, Table({0: Scalar("h", {2: 0, 4: 1, 8: 2}[type_.width])})
    if type_.family == "bytes":
        return _BYTES, Table({0: Scalar("i", type_.width)})
    return (_UTF8, Table({})) if type_ == TEXT else (_LIST, Table({}))


# ---- reading --------------------------------------------------------------------------------------------------------


def read_table(data: bytes, schema: Schema) -> dict[str, Any]:
    """The columns of a file of one batch, as `table_bytes` takes them.

    Columns after those of `schema` are left out: later versions may add some. FormatError for anything else.
    """
    whole = memoryview(data)
    footer = _footer(whole)
    found = footer.table(1)
    fields = [] if found is None else found.tables(1)
    if len(fields) < len(schema) or any(_differs(one, column) for one, column in zip(fields, schema, strict=False)):
        raise FormatError(f"its columns are not {', '.join(column.name for column in schema)}")
    blocks = footer.structs(3, _BLOCK)
    if len(blocks) != 1:
        raise FormatError(f"it has {len(blocks)} batches, and 1 is expected")
    offset, header, body = blocks[0]
    if min(offset, header - 8, body) < 0 or offset + header + body > len(whole):
        raise FormatError(f"a batch of {header} and {body} bytes at {offset} of {len(whole)}")
    message = View.root(whole[offset + 8 : offset + header])
    batch = message.table(2)
    if message.scalar(1, "B") != _RECORD_BATCH or batch is None or batch.table(3) is not None:
        raise FormatError("its batch is none, or compressed")
    return _columns(schema, batch, whole[offset + header : offset + header + body])


def _footer(whole: memoryview) -> View:
    size = len(MAGIC)
    if len(whole) < 2 * size + 12 or whole[:size] != MAGIC or whole[-size:] != MAGIC:
        raise FormatError("it does not begin and end as an Arrow file does: it is cut off, or no such file")
    length = struct.unpack_from("<i", whole, len(whole) - size - 4)[0]
    if not 0 < length <= len(whole) - 2 * size - 4:
        raise FormatError(f"a footer of {length} bytes in a file of {len(whole)}")
    return View.root(whole[len(whole) - size - 4 - length : len(whole) - size - 4])


def _differs(found: View, column: Column) -> bool:
    number, described = _described(column.type)
    if found.text(0) != column.name or found.scalar(2, "B") != number:
        return True
    held = found.table(3)
    wanted = {key: value for key, value in described.fields.items() if isinstance(value, Scalar)}
    return held is None or any(held.scalar(key, value.code) != value.value for key, value in wanted.items())


def _columns(schema: Schema, batch: View, body: memoryview) -> dict[str, Any]:
    rows, places, end = batch.scalar(0, "q"), iter(batch.structs(2, _BUFFER)), 0
    if rows > MOST_ROWS:
        raise FormatError(f"{rows} rows, and at most {MOST_ROWS} can be read")

    def take() -> memoryview:
        nonlocal end
        begin, length = next(places, (0, -1))
        if begin < end or length < 0 or begin + length > len(body):
            raise FormatError(f"a buffer of {length} bytes at {begin} of {len(body)}, behind one that ends at {end}")
        end = begin + length
        return body[begin:end]

    def numbers(raw: memoryview, dtype: Any, count: int) -> Any:
        if count < 0 or count * np.dtype(dtype).itemsize > len(raw):
            raise FormatError(f"{count} values in a buffer of {len(raw)} bytes")
        return np.frombuffer(raw, dtype, count)

    found: dict[str, Any] = {}
    for column in schema:
        take()
        if column.type not in (TEXT, INTS):
            found[column.name] = numbers(take(), column.type.dtype, rows)
            continue
        ends = numbers(take(), "<i4", rows + 1).astype(np.int64)
        if (np.diff(ends) < 0).any() or ends[0] < 0:
            raise FormatError(f"column {column.name!r} has values of negative length")
        if column.type == INTS:
            take()
            flat = numbers(take(), "<i8", int(ends[-1])).tolist()
            found[column.name] = [flat[low:high] for low, high in pairwise(ends.tolist())]
        else:
            raw = bytes(numbers(take(), "u1", int(ends[-1])))
            try:
                found[column.name] = [raw[low:high].decode() for low, high in pairwise(ends.tolist())]
            except UnicodeDecodeError as error:
                raise FormatError(f"column {column.name!r}: a text is not UTF-8 ({error})") from None
    return found
