"""Names of tensors and of state kinds. They come from files that a stranger may have written, and are never paths.

A tensor is named as torch's modules name it, with slashes if somebody likes them; a state kind goes by one word.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

MOST_BYTES = 200
"""Of a name that becomes the name of a file: with a suffix it stays below what file systems take."""


def is_component(name: object) -> bool:
    """Whether it may stand as the name of a file in a folder: it leads nowhere else, and hides nothing."""
    if not isinstance(name, str) or not name.isprintable() or "/" in name or "\\" in name:
        return False
    return not name.startswith(".") and 0 < len(name.encode()) <= MOST_BYTES


def check_names(tensors: Iterable[str], kinds: Iterable[str]) -> None:
    """CheckpointDamaged for a name that would lead out of a folder if anybody took it for a path."""
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
    """CheckpointError for a name that cannot be the one of a file or folder, or is `taken` by another one there."""
    reserved = {*taken}
    for name in names:
        if not is_component(name) or name in reserved:
            raise CheckpointError(
                f"{name!r} would be the name of a file in this format; rename it in the model, without '/', '\\' and "
                f"a '.' in front, up to {MOST_BYTES} bytes, and not {' or '.join(map(repr, sorted(reserved)))}"
            )
