"""The few flatbuffers that Arrow's files hold as metadata: tables, texts, and vectors of tables and of structs.

`encode` lays a table out front to back: its vtable, its fields, then what they point to. `View` reads one from bytes
that nobody has vouched for: every offset is checked against the end, and a wrong one is a `FormatError`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.errors import CheckpointDamaged

_ALIGN = 8
MOST_FIELDS = 64
"""Arrow's tables have fewer than ten."""
MOST_ENTRIES = 1024
"""Of a vector of tables or structs: columns, or their buffers."""


class FormatError(CheckpointDamaged):
    """Bytes that are no such file."""


@dataclass(frozen=True)
class Scalar:
    """A number: `code` is its format in `struct`."""

    code: str
    value: int


@dataclass(frozen=True)
class Structs:
    """A vector of structs whose fields are numbers: `code` is the format of one, of a multiple of 8 bytes."""

    code: str
    rows: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Table:
    """Fields by their number in the schema."""

    fields: Mapping[int, Scalar | str | Structs | Table | Sequence[Table]]


def encode(root: Table) -> bytes:
    """The buffer of a root table, padded to a multiple of 8 bytes."""
    writer = _Writer()
    writer.data += bytes(4)
    writer.point(0, writer.put(root))
    writer.align(_ALIGN)
    return bytes(writer.data)


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()

    def align(self, to: int, ahead: int = 0) -> None:
        """Pad so that what comes `ahead` bytes later begins at a multiple of `to`."""
        self.data += bytes(-(len(self.data) + ahead) % to)

    def point(self, at: int, target: int) -> None:
        struct.pack_into("<I", self.data, at, target - at)

    def put(self, value: Any) -> int:
        """Append anything that an offset leads to; where it begins."""
        if isinstance(value, Table):
            return self._table(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Structs):
            return self._structs(value)
        self.align(4)
        begin = len(self.data)
        self.data += struct.pack("<I", len(value)) + bytes(4 * len(value))
        for number, each in enumerate(value):
            self.point(begin + 4 + 4 * number, self.put(each))
        return begin

    def _text(self, value: str) -> int:
        self.align(4)
        begin, raw = len(self.data), value.encode()
        self.data += struct.pack("<I", len(raw)) + raw + b"\0"
        return begin

    def _structs(self, value: Structs) -> int:
        self.align(_ALIGN, ahead=4)
        begin = len(self.data)
        self.data += struct.pack("<I", len(value.rows))
        for row in value.rows:
            self.data += struct.pack("<" + value.code, *row)
        return begin

    def _table(self, table: Table) -> int:
        """The largest fields come first, so that each is aligned without a gap."""
        size = {number: _size(value) for number, value in table.fields.items()}
        place, end = dict[int, int](), 4
        for number in sorted(size, key=lambda each: (-size[each], each)):
            end += -end % size[number]
            place[number] = end
            end += size[number]
        slots = 1 + max(table.fields, default=-1)
        offsets = [place.get(number, 0) for number in range(slots)]
        vtable = struct.pack(f"<HH{slots}H", 4 + 2 * slots, end, *offsets)
        self.align(_ALIGN, ahead=len(vtable))
        self.data += vtable
        begin = len(self.data)
        self.data += struct.pack("<i", len(vtable)) + bytes(end - 4)
        for number, value in table.fields.items():
            at = begin + place[number]
            if isinstance(value, Scalar):
                struct.pack_into("<" + value.code, self.data, at, value.value)
            else:
                self.point(at, self.put(value))
        return begin


def _size(value: Any) -> int:
    return struct.calcsize("<" + value.code) if isinstance(value, Scalar) else 4


@dataclass(frozen=True)
class View:
    """A table at byte `at` of a buffer."""

    data: memoryview
    at: int

    @staticmethod
    def root(data: memoryview) -> View:
        """The root table of a buffer."""
        return View(data, _follow(data, 0))

    def scalar(self, number: int, code: str, default: int = 0) -> int:
        """A field that is a number."""
        at = self._place(number)
        return default if at is None else int(_unpack(self.data, "<" + code, at)[0])

    def table(self, number: int) -> View | None:
        """A field that is a table."""
        at = self._place(number)
        return None if at is None else View(self.data, _follow(self.data, at))

    def text(self, number: int) -> str:
        """A field that is a text; empty where it is left out."""
        at = self._place(number)
        if at is None:
            return ""
        begin, count = self._vector(at, 1)
        try:
            return bytes(self.data[begin : begin + count]).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"a text is not UTF-8 ({error})") from None

    def tables(self, number: int) -> list[View]:
        """A field that is a vector of tables."""
        at = self._place(number)
        if at is None:
            return []
        begin, count = self._vector(at, 4)
        if count > MOST_ENTRIES:
            raise FormatError(f"a vector of {count} tables")
        return [View(self.data, _follow(self.data, begin + 4 * each)) for each in range(count)]

    def structs(self, number: int, code: str) -> list[tuple[int, ...]]:
        """A field that is a vector of structs."""
        at = self._place(number)
        if at is None:
            return []
        begin, count = self._vector(at, struct.calcsize("<" + code))
        size = struct.calcsize("<" + code)
        if count > MOST_ENTRIES:
            raise FormatError(f"a vector of {count} structs")
        return [_unpack(self.data, "<" + code, begin + size * each) for each in range(count)]

    def _place(self, number: int) -> int | None:
        """Where the bytes of a field lie, None if it is left out."""
        vtable = self.at - _unpack(self.data, "<i", self.at)[0]
        length, size = _unpack(self.data, "<HH", vtable)
        if length % 2 or length > 4 + 2 * MOST_FIELDS:
            raise FormatError(f"a vtable of {length} bytes")
        if 4 + 2 * number + 2 > length:
            return None
        offset = _unpack(self.data, "<H", vtable + 4 + 2 * number)[0]
        if offset >= size:
            raise FormatError(f"field {number} at {offset} of a table of {size} bytes")
        return self.at + offset if offset else None

    def _vector(self, at: int, width: int) -> tuple[int, int]:
        """(first byte, length) of the vector that a field leads to."""
        begin = _follow(self.data, at)
        count = int(_unpack(self.data, "<I", begin)[0])
        if begin + 4 + count * width > len(self.data):
            raise FormatError(f"a vector of {count} x {width} bytes at {begin} of {len(self.data)}")
        return begin + 4, count


def _follow(data: memoryview, at: int) -> int:
    """Where an offset leads."""
    target = at + int(_unpack(data, "<I", at)[0])
    if not 0 < target <= len(data) - 4:
        raise FormatError(f"an offset leads to byte {target} of {len(data)}")
    return target


def _unpack(data: memoryview, code: str, at: int) -> tuple[int, ...]:
    if not 0 <= at <= len(data) - struct.calcsize(code):
        raise FormatError(f"{struct.calcsize(code)} bytes are expected at byte {at} of {len(data)}")
    return struct.unpack_from(code, data, at)
