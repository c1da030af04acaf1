"""Checkpoints of `engine.save` in place of another library's: recognizing them, and replacing an older one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ds_dynatrain.checkpoint import record


def is_ours(folder: str | Path) -> bool:
    """Return whether a folder is a checkpoint of `engine.save`. Such a checkpoint is either complete or absent."""
    return (Path(folder) / record.RECORD).is_file()


def save(engine: Any, folder: str | Path) -> None:
    """Save all state into this folder, replacing one left by an earlier run. A collective."""
    folder = Path(folder)
    earlier = folder.with_name(f".{folder.name}.{os.getpid()}")
    if engine.rank == 0 and folder.exists():  # rank 0 also names the new folder, once all ranks save
        os.rename(folder, earlier)
    try:
        engine.save(folder.parent, folder.name)
    except BaseException:
        if earlier.exists() and not folder.exists():
            os.rename(earlier, folder)
        raise
    shutil.rmtree(earlier, ignore_errors=True)
