"""Safe access to untrusted files: only regular files are opened, and the number of bytes read is limited.

A pipe could block forever, and a link to a device has no end. Names of tensors and state kinds come from untrusted
files as well, and are checked before they become paths. A tensor has the name of a parameter of a torch module,
possibly with slashes. A state kind is a single word.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

Progress = Callable[[int], object]
"""Function that is called with the number of bytes of each tensor written."""
WHERE_DAMAGED = "copy the checkpoint again, or take another one"
"""Advice in error messages about damaged files."""
MOST_BYTES = 1 << 30
"""Maximum size in bytes of a file that is read whole into memory."""
MOST_VALUES = 1 << 24
"""Maximum number of values in a file that is parsed into Python objects, which need many times the file's memory."""
MOST_OF_NOTE = 4096
"""Maximum size in bytes of a file such as `latest`, which contains the name of another file."""
MOST_OF_NAME = 200
"""Maximum length in bytes of a name that becomes a file name. With a suffix it stays below file systems' limit."""


def silent(nbytes: int) -> None:
    """Do nothing. This is the default progress function."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that adds the checkpoint's path to each CheckpointError, and advice to errors about damage."""
    try:
        yield
    except CheckpointError as error:
        said = str(error) if str(path) in str(error) else f"{path}: {error}"
        if isinstance(error, CheckpointDamaged) and WHERE_DAMAGED not in said:
            said = f"{said}; {WHERE_DAMAGED}"
        raise type(error)(said) from error


def open_regular(path: Path, links: bool = False) -> int:
    """Open a file for reading and return its descriptor. Raises CheckpointDamaged if it is not a regular file.

    links: whether to follow a symbolic link to a regular file.
    """
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
    """Return the content of a regular file. Raises CheckpointDamaged if the file is larger than `most` bytes."""
    with open(open_regular(path, links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointDamaged(
                f"{path.name} has {size} bytes, and at most {most} are read: it was changed after it was saved"
            )
        return file.read(size)


def read_note(path: Path) -> str:
    """Return the name in a small text file such as `latest`. Raises CheckpointDamaged if the file is not text."""
    try:
        return read_small(path, MOST_OF_NOTE, links=True).decode().strip()
    except UnicodeDecodeError as error:
        raise CheckpointDamaged(f"{path.name} names nothing: {error}") from None


def dumped(content: object) -> bytes:
    """Return `content` as JSON. Raises CheckpointError if it has more values than `parsed` accepts."""
    data = json.dumps(content).encode()
    if _values(data) > MOST_VALUES:
        raise CheckpointError(
            f"{_values(data)} values in one file, and at most {MOST_VALUES} can be read; carry them as a tensor"
        )
    return data


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointDamaged for any other content."""
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
    """Return an upper bound for the number of values in JSON, without parsing it."""
    return sum(map(data.count, (b",", b"[", b"{")))


def is_component(name: object) -> bool:
    """Return whether a name is safe as a file name: it does not lead out of its folder and is not hidden."""
    if not isinstance(name, str) or not name.isprintable() or "/" in name or "\\" in name:
        return False
    return not name.startswith(".") and 0 < len(name.encode()) <= MOST_OF_NAME


def check_names(tensors: Iterable[str], kinds: Iterable[str]) -> None:
    """Raise CheckpointDamaged for a name that, used as a path, would lead out of its folder."""
    for name in tensors:
        parts = name.split("/")
        if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
            raise CheckpointDamaged(
                f"a tensor is named {name!r}, which is a path and no name: nothing is written; rename it in the model"
            )
    for kind in kinds:
        if not is_component(kind):
            raise CheckpointDamaged(f"a state kind is named {kind!r}, which is no name: nothing is written")


def check_file_names(names: Iterable[str], taken: Iterable[str]) -> None:
    """Raise CheckpointError for a name that cannot be a file name, or is already `taken`."""
    reserved = {*taken}
    for name in names:
        if not is_component(name) or name in reserved:
            raise CheckpointError(
                f"{name!r} would be the name of a file in this format; rename it in the model, without '/', '\\' and "
                f"a '.' in front, up to {MOST_OF_NAME} bytes, and not {' or '.join(map(repr, sorted(reserved)))}"
            )


@contextmanager
def appearing(path: Path, parents: bool = False) -> Iterator[Path]:
    """Context manager that makes a file or folder appear at `path` only when it is complete.

    Yields a hidden path in the same folder, to which the caller writes. The hidden path is renamed to `path` at the
    end, or removed on error.

    parents: whether to create missing parent folders. On error, folders created this way are removed again.

    Raises CheckpointError if `path` exists.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} is there already; give another name, or remove it")
    made = [each for each in path.parents if not each.exists()] if parents else []
    hidden = path.with_name(f".converting-{path.name}-{secrets.token_hex(4)}")
    try:
        for each in reversed(made):
            each.mkdir(exist_ok=True)
        yield hidden
        os.rename(hidden, path)
        made.clear()
    finally:
        if hidden.is_dir():
            shutil.rmtree(hidden, ignore_errors=True)
        hidden.unlink(missing_ok=True)
        for each in made:
            with suppress(OSError):  # another process has put something there meanwhile
                each.rmdir()
