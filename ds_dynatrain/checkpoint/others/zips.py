"""Zip files as torch.save writes them: nothing in them is compressed, and each member has a CRC32.

torch itself never compares it. A CRC32 of 0 says that none was taken (`torch.serialization.set_crc32_options`).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from ds_dynatrain.checkpoint.crcs import Member
from ds_dynatrain.checkpoint.files import open_regular
from ds_dynatrain.errors import CheckpointDamaged

MOST_BYTES = 1 << 28
"""That are read at once: the pickle, but no tensor."""
MOST_OF_DIRECTORY = 1 << 25
"""Its bytes: once it is taken apart it takes fifteen times the memory."""
BEGIN, DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
"""What a member begins with, and what follows its bytes."""
_LOCAL, _ENTRY = 30, 46
"""Bytes of the head of a member, and of what the directory says of it, without names."""
Archive = tuple[str, tuple[int, int] | None]
"""A file, and (first byte, length) of the zip in it if it is a part of it."""


class Window(io.RawIOBase):
    """A part of an open file, as a file of its own; ValueError for one that leaves it, and for too much at once."""

    def __init__(self, file: io.BufferedReader | io.BufferedRandom, part: tuple[int, int] | None = None) -> None:
        self.first, self.length = part or (0, os.fstat(file.fileno()).st_size)
        if min(self.first, self.length) < 0 or self.first + self.length > file.seek(0, io.SEEK_END):
            raise ValueError(f"{self.length} bytes from byte {self.first} leave the file")
        self.file, self.at, self.most = file, 0, MOST_BYTES

    def read(self, size: int = -1) -> bytes | None:
        """As of any file; what is read in one go is no tensor, but what describes them."""
        left = self.length - self.at
        if (left if size < 0 else min(size, left)) > self.most:
            raise ValueError(f"{size} bytes at once")
        return super().read(size)

    def readable(self) -> bool:
        """As it says."""
        return True

    def seekable(self) -> bool:
        """As it says."""
        return True

    def tell(self) -> int:
        """Bytes from the beginning of the part."""
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self.at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence] + offset)
        return self.at

    def readinto(self, room: Any) -> int:
        """As of any file."""
        view = memoryview(room).cast("B")
        view = view[: max(0, min(len(view), self.length - self.at))]
        self.file.seek(self.first + self.at)
        done = self.file.readinto(view)
        self.at += done
        return done


def pickle_in(window: Window) -> bytes:
    """`data.pkl` of what torch.save wrote; ValueError if it is no such zip, or the pickle is not what was saved."""
    window.seek(0)
    if window.read(len(BEGIN)) != BEGIN:
        raise ValueError("it is no zip (one of torch before 1.6 is none: save it anew)")
    archive = _directory(window)
    entries = archive.infolist()
    names = {each.filename.lower() for each in entries}
    root = min(names).partition("/")[0]
    is_ours = all(name.startswith(f"{root}/") for name in names) and len(names) == len(entries)
    if archive.comment or not is_ours or min(each.header_offset for each in entries):
        raise ValueError("its zip is not as torch.save writes it")
    places = _places(window, entries)
    found = [place for place, each in zip(places, entries, strict=True) if each.filename.lower() == f"{root}/data.pkl"]
    if len(found) != 1 or len(found[0]) > MOST_BYTES:
        raise ValueError(f"its data.pkl is not there, or has more than {MOST_BYTES} bytes")
    window.seek(found[0].start)
    data = window.read(len(found[0])) or b""
    crc = entries[places.index(found[0])].CRC
    if crc and zlib.crc32(data) != crc:
        raise ValueError("data.pkl in it has another CRC32 than it was written with")
    return data


def members_of(folder: Path, archive: Archive) -> list[Member]:
    """The members of a file of torch.save that have a CRC32; CheckpointDamaged for what is none."""
    name, part = archive
    try:
        with open(open_regular(folder / name, links=True), "rb") as file:
            window = Window(file, part)
            if window.read(len(BEGIN)) != BEGIN:  # torch before 1.6: it takes `trust_pickle` to read one
                return []
            entries = _directory(window).infolist()
            places = [(each, place) for each, place in zip(entries, _places(window, entries), strict=True) if each.CRC]
    except CheckpointDamaged:
        raise
    except Exception as error:  # zipfile has many ways to say that bytes are no zip
        raise CheckpointDamaged(f"{folder / name} is no file of torch.save, or cut off: {error}") from None
    at = window.first
    return [Member(name, each.filename, at + place.start, at + place.stop, each.CRC) for each, place in places]


def _directory(window: Window) -> zipfile.ZipFile:
    """What a zip says of its members; it is closed."""
    window.most = MOST_OF_DIRECTORY
    try:
        with zipfile.ZipFile(cast(BinaryIO, window)) as archive:
            return archive
    finally:
        window.most = MOST_BYTES


def _places(window: Window, entries: list[zipfile.ZipInfo]) -> list[range]:
    """The bytes of each member; ValueError unless all are there as they are, each byte once."""
    found = list[range]()
    for each in entries:
        if each.compress_type != zipfile.ZIP_STORED or each.file_size != each.compress_size:
            raise ValueError("it is compressed, as torch.save never writes it")
        window.seek(each.header_offset)
        head = window.read(_LOCAL) or b""
        if len(head) != _LOCAL or not head.startswith(BEGIN):
            raise ValueError(f"{each.filename!r} does not begin where its directory says")
        begin = each.header_offset + _LOCAL + sum(struct.unpack_from("<HH", head, 26))
        if begin + each.file_size > window.length:
            raise ValueError(f"{each.filename!r} leaves it")
        found.append(range(begin, begin + each.file_size))
    ordered = sorted(found, key=lambda place: (place.start, place.stop))
    if any(one.stop > other.start for one, other in pairwise(ordered)):
        raise ValueError("two of its members are in one place")
    return found


def note_crcs(file: io.BufferedRandom, crcs: Mapping[int, int]) -> None:
    """Write CRC32s of members whose bytes were put in after torch.save had left room for them, by their first byte."""
    window = Window(file)
    archive = _directory(window)
    entries, at = archive.infolist(), archive.start_dir
    for place in _places(window, entries):
        if len(place) and place.start in crcs:
            crc = crcs[place.start].to_bytes(4, "little")
            os.pwrite(file.fileno(), crc, at + 16)
            if os.pread(file.fileno(), 4, place.stop) == DESCRIPTOR:
                os.pwrite(file.fileno(), crc, place.stop + 4)
        at += _ENTRY + sum(struct.unpack("<HHH", os.pread(file.fileno(), 6, at + 28)))
