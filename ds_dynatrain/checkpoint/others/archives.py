"""The zips that torch.save writes: nothing in them is compressed, and `zipfile` checks the CRC32 of each member.

torch itself never compares it. A CRC32 of 0 says that none was taken (`torch.serialization.set_crc32_options`).
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from ds_dynatrain.checkpoint.files import open_regular
from ds_dynatrain.errors import CheckpointDamaged

BEGIN = b"PK\x03\x04"
READ_BYTES = 1 << 20
Archive = tuple[str, tuple[int, int] | None]
"""A file, and (first byte, length) of the zip in it if it is a part of it."""


class Part(io.RawIOBase):
    """A part of an open file, as a file of its own; ValueError for one that leaves it."""

    def __init__(self, file: io.BufferedReader, place: tuple[int, int] | None) -> None:
        size = os.fstat(file.fileno()).st_size
        self.first, self.length = place or (0, size)
        if min(self.first, self.length) < 0 or self.first + self.length > size:
            raise ValueError(f"{self.length} bytes from byte {self.first} leave the file")
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, (0, self._at, self.length)[whence] + offset)
        return self._at

    def readinto(self, room: Any) -> int:
        view = memoryview(room).cast("B")[: max(0, self.length - self._at)]
        self._file.seek(self.first + self._at)
        done = self._file.readinto(view)
        self._at += done
        return done


@contextmanager
def opened(folder: Path, archive: Archive) -> Iterator[IO[bytes]]:
    """A file of torch.save, open at its beginning."""
    name, place = archive
    with open(open_regular(folder / name, links=True), "rb") as file:
        yield cast(IO[bytes], Part(file, place) if place else file)


def directory(file: IO[bytes]) -> zipfile.ZipFile:
    """Read what a zip says of its members; ValueError for one that torch.save does not write."""
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
        raise ValueError("it is compressed, as torch.save never writes it")
    if sum(each.file_size for each in entries) > file.seek(0, io.SEEK_END):
        raise ValueError("two of its members are in one place")
    if len({each.filename.lower() for each in entries}) < len(entries):
        raise ValueError("two of its members have one name")
    return archive


def check_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """BadZipFile unless a member has the CRC32 that it was written with."""
    if entry.CRC:
        with archive.open(entry) as member:
            while member.read(READ_BYTES):
                pass


def check_crcs(folder: Path, archives: Iterable[Archive], place: int = 0, places: int = 1) -> None:
    """CheckpointDamaged, naming file and member, unless all in the files of torch.save is what was written.

    place, places: check only every so many-th member, beside others who check the rest.
    """
    count = 0
    for name, part in archives:
        entry = None
        try:
            with opened(folder, (name, part)) as file:
                if file.read(len(BEGIN)) != BEGIN:  # torch before 1.6: it takes `trust_pickle` to read one
                    continue
                archive = directory(file)
                for entry in archive.infolist():
                    if count % places == place:
                        check_member(archive, entry)
                    count += 1
        except CheckpointDamaged:
            raise
        except Exception as error:  # zipfile has many ways to say that bytes are no zip
            where = f"{entry.filename} in it, " if entry else ""
            raise CheckpointDamaged(f"{name} is not what was saved: {where}{error}") from None
