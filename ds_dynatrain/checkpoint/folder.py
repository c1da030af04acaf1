"""A folder of checkpoints, in which every visible checkpoint is complete and `latest` names one of them.

A checkpoint is written to a hidden folder and flushed to disk. The folder is then renamed, and `latest` is replaced. If
the machine stops at any time, the previous checkpoint remains, and `latest` names a complete one. Only one job can
write at a time; others get an error.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ds_dynatrain.checkpoint.files import read_note
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow, sizes_of
from ds_dynatrain.checkpoint.record import MANIFEST, RECORD, Saved, TrainingRecord, sum_of, to_bytes
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

LATEST, LOCK = "latest", ".lock"
_HIDDEN, _NOTE = (".saving-", ".removing-"), f".{LATEST}-"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def check_tag(tag: str) -> None:
    """Raise CheckpointError if a tag cannot name the folder of a checkpoint."""
    if not _TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(
            f"tag {tag!r} is no name for a checkpoint; give one of letters, digits, '.', '_' and '-', at most 201 of "
            f"them, and not {LATEST!r}"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that holds the lock of a folder of checkpoints. Creates the folder if needed.

    Raises CheckpointError if another job holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"another job saves into {folder} now; give each job a folder of its own") from None
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: loader processes forked meanwhile have it open
        os.close(file)


def begin(folder: Path, tag: str) -> Path:
    """Create and return a hidden folder for checkpoint `tag`, and remove the remains of failed attempts.

    The caller must hold the lock. Raises CheckpointError if the tag is taken.
    """
    check_tag(tag)
    for left in folder.iterdir():
        if left.name.startswith(_HIDDEN):
            shutil.rmtree(left, ignore_errors=True)
        elif left.name.startswith(_NOTE):
            left.unlink()
    if (folder / tag).exists():
        raise CheckpointError(f"there is a {tag!r} in {folder} already; give another tag, or remove it")
    path = folder / f"{_HIDDEN[0]}{tag}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def seal(path: Path, record: TrainingRecord, rows: Iterable[ManifestRow], sums: Mapping[str, str]) -> None:
    """Write a checkpoint's manifest and record into its hidden folder, which already has all other files.

    rows: the rows of the manifest.
    sums: checksums of the small files, keyed by file name.

    Raises CheckpointDamaged if rows do not cover each element of their tensors exactly once, or do not match the files
    in the folder.
    """
    manifest = Manifest.of(rows)
    manifest.check(path)
    for tensor, kind in manifest.rows:
        manifest.runs(tensor, kind)
    data = manifest.to_bytes()
    write(path / MANIFEST, data)
    whole = replace(record, sums={**sums, MANIFEST: sum_of(data)}, sizes=sizes_of(path))
    write(path / RECORD, to_bytes(whole))


def free_tag(folder: Path, wanted: str) -> str:
    """Return a tag that is not taken: `wanted`, or `wanted` with a number appended."""
    taken, number = wanted, 1
    while (folder / taken).exists():
        number += 1
        taken = f"{wanted}-{number}"
    return taken


def finish(path: Path, tag: str, keep: int | None = None) -> Path:
    """Rename a complete hidden folder to its tag, make it the latest checkpoint, and return its path.

    keep: number of newest checkpoints to keep; older ones are removed. None keeps all.
    """
    folder = path.parent
    sync(path)
    os.rename(path, folder / tag)
    sync(folder)
    note = folder / f"{_NOTE}{secrets.token_hex(4)}"
    write(note, tag.encode())
    os.rename(note, folder / LATEST)
    sync(folder)
    if keep is not None:
        for old in [each for each in tags(folder) if each != tag][max(keep - 1, 0) :]:
            remove(folder, old)
    return folder / tag


def remove(folder: Path, tag: str) -> None:
    """Remove a checkpoint. An interrupted call leaves nothing behind that looks like a checkpoint."""
    hidden = folder / f"{_HIDDEN[1]}{tag}-{secrets.token_hex(4)}"
    os.rename(folder / tag, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def tags(folder: Path) -> list[str]:
    """Return the tags of the checkpoints in a folder, newest first. Other tools' checkpoints are ignored."""
    if not folder.is_dir():
        return []
    found = [each for each in folder.iterdir() if not each.name.startswith(".") and (each / RECORD).is_file()]
    return [name for _, name in sorted(((each / RECORD).stat().st_mtime_ns, each.name) for each in found)][::-1]


def latest(folder: Path) -> str:
    """Return the tag that the file `latest` names. Raises CheckpointError if the file is missing or invalid."""
    try:
        tag = read_note(folder / LATEST)
    except CheckpointDamaged as error:
        raise CheckpointError(f"{folder} has no file {LATEST!r} ({error}); give a tag") from None
    check_tag(tag)
    return tag


def newest(folder: Path) -> Iterator[Saved]:
    """Yield all checkpoints that look complete: first the one that `latest` names, then the others, newest first.

    Tensors are not read.
    """
    try:
        first = [latest(folder)]
    except CheckpointError:
        first = []
    for tag in dict.fromkeys([*first, *tags(folder)]):
        try:
            yield Saved.open(folder / tag)
        except CheckpointError:
            continue


def write(path: Path, data: bytes) -> None:
    """Write a small new file and flush it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
