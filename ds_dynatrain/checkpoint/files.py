"""Files that a stranger may have put there: only regular ones are opened, and no more is read of them than is allowed.

A pipe would wait for a writer that never comes, and a link to a device has no end.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

WHERE_DAMAGED = "copy the checkpoint again, or take another one"
"""What to do with files that are not what was saved."""
MOST_BYTES = 1 << 30
"""Of a small file."""
MOST_VALUES = 1 << 24
"""In a file that is taken apart into Python's values, which are many times larger than what stands in the file."""
MOST_OF_NOTE = 4096
"""Bytes of a file that names another one."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors inside the block name the checkpoint, and those of damage what to do."""
    try:
        yield
    except CheckpointError as error:
        said = str(error) if str(path) in str(error) else f"{path}: {error}"
        if isinstance(error, CheckpointDamaged) and WHERE_DAMAGED not in said:
            said = f"{said}; {WHERE_DAMAGED}"
        raise type(error)(said) from error


def open_regular(path: Path, links: bool = False) -> int:
    """A descriptor to read a file by; CheckpointDamaged if it is none. links: one that a link leads to will do."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}; {WHERE_DAMAGED}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointDamaged(f"{path} cannot be read: it is no regular file; {WHERE_DAMAGED}")
    return file


def read_small(path: Path, most: int = MOST_BYTES, links: bool = False) -> bytes:
    """The whole of a file; CheckpointDamaged for one of more than `most` bytes, and as `open_regular`."""
    with open(open_regular(path, links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointDamaged(
                f"{path.name} has {size} bytes, and at most {most} are read: it was changed after it was saved"
            )
        return file.read(size)


def read_note(path: Path) -> str:
    """What a file that names another one says; CheckpointError if it says nothing that is a name."""
    try:
        return read_small(path, MOST_OF_NOTE, links=True).decode().strip()
    except UnicodeDecodeError as error:
        raise CheckpointDamaged(f"{path.name} names nothing: {error}") from None


def dumped(content: object) -> bytes:
    """A small file of JSON; CheckpointError for one that could not be read again."""
    data = json.dumps(content).encode()
    if _values(data) > MOST_VALUES:
        raise CheckpointError(
            f"{_values(data)} values in one file, and at most {MOST_VALUES} can be read; carry them as a tensor"
        )
    return data


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """JSON of one object; CheckpointDamaged for anything else."""
    if _values(data) > MOST_VALUES:
        raise CheckpointDamaged(
            f"{name} has {_values(data)} values, and at most {MOST_VALUES} are read: it was changed"
        )
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{name} is no JSON ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{name} is no JSON object")
    return found


def _values(data: bytes) -> int:
    """As many values as there can be in JSON, found without taking it apart."""
    return sum(map(data.count, (b",", b"[", b"{")))
