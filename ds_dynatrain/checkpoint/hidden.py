"""A file or folder that has its name only when it is whole."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ds_dynatrain.errors import CheckpointError


@contextmanager
def appearing(path: Path, parents: bool = False) -> Iterator[Path]:
    """A hidden place beside `path` to write at: it gets the name if the block ends well, else nothing of it is left.

    parents: make the folders above if need be; they go again, too. CheckpointError if there is one by that name.
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
            with suppress(OSError):  # somebody else has put something there meanwhile
                each.rmdir()
