"""Writing of a `dynatrain` block into a DeepSpeed configuration file, for `ds-dynatrain init`."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from ds_dynatrain.config import BLOCK, split_config
from ds_dynatrain.config_file import read_config
from ds_dynatrain.errors import ConfigError

EVERY_SECONDS = 1800
"""Time between automatic checkpoints, unless the block says something else."""


def lacks(config: Mapping[str, Any], key: str) -> bool:
    """Return whether the `dynatrain` block of a configuration has nothing under a key."""
    block = config.get(BLOCK)
    return not isinstance(block, Mapping) or key not in block


def additions(checkpoints: str, report: str, exact: bool) -> dict[str, Any]:
    """Return a `dynatrain` block for the user's answers. Answers of "" and False add nothing.

    checkpoints: a folder for automatic checkpoints, from which the next start continues.
    report: a file that gets a line of JSON for each switch.
    exact: whether all worlds must compute the same bits.
    """
    found: dict[str, Any] = {}
    if checkpoints:
        found["fallback"] = {"path": checkpoints, "every_seconds": EVERY_SECONDS, "on_sigterm": True}
        found["resume"] = {"path": checkpoints}
    if report:
        found["report"] = {"jsonl": report}
    return {**found, "exact": True} if exact else found


def complete(path: Path, added: Mapping[str, Any]) -> dict[str, Any]:
    """Add keys to the `dynatrain` block of a file, and return the block. Keys that the block already has are kept.

    The file is replaced atomically, and only with one that reads as the old configuration plus these keys. Raises
    ConfigError, with the file unchanged, if the block would be invalid, or if the file has comments that would be lost.
    """
    config = read_config(path)
    whole = deepcopy(config)
    block = whole.setdefault(BLOCK, {})
    if isinstance(block, dict):
        block.update((key, value) for key, value in added.items() if key not in block)
    split_config(whole)
    by_hand = f'add the block by hand: "{BLOCK}": {json.dumps(block)}'
    text = _text(path.read_text(encoding="utf-8"), config, whole)
    if text is None:
        raise ConfigError(f"configuration {str(path)!r}: its comments would be lost; {by_hand}")
    new = path.resolve().with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    try:
        if read_config(new) != whole:
            raise ConfigError(f"configuration {str(path)!r}: the rest would not stay as it is; {by_hand}")
        shutil.copymode(path, new)
        os.replace(new, path.resolve())
    finally:
        new.unlink(missing_ok=True)
    return dict(block)


def _text(old: str, config: Mapping[str, Any], whole: Mapping[str, Any]) -> str | None:
    """Return the text of the completed file; None if the file already has a block and contains comments.

    A new block is inserted before the last brace, and the rest of the text is unchanged.
    """
    found = re.search(r"^([ \t]+)\S", old, re.MULTILINE)
    indent = found[1] if found else "  "
    if BLOCK in config:
        try:
            json.loads(old)
        except ValueError:
            return None
        return json.dumps(whole, indent=indent, ensure_ascii=False) + "\n"
    block = json.dumps({BLOCK: whole[BLOCK]}, indent=indent, ensure_ascii=False)
    head = old.rstrip().removesuffix("}").rstrip()
    return head + ("," if config else "") + block.removeprefix("{").removesuffix("}") + "}\n"
