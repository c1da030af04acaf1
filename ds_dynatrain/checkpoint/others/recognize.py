"""Recognition of the format of another tool's checkpoint by its file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ds_dynatrain.checkpoint.files import WHERE_DAMAGED, naming, read_note
from ds_dynatrain.checkpoint.others.dcp_folder import METADATA, is_dcp, read_dcp
from ds_dynatrain.checkpoint.others.foreign import Foreign
from ds_dynatrain.checkpoint.others.safetensors import INDEX, is_safetensors, read_safetensors
from ds_dynatrain.checkpoint.others.universal_folder import OPTIMIZER, ZERO, is_universal, read_universal
from ds_dynatrain.checkpoint.others.zero_files import is_zero_folder
from ds_dynatrain.checkpoint.others.zero_folder import read_zero
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError, LayoutError

NOTES = ("latest", "latest_universal")
"""Files whose text is the name of a checkpoint in the same folder."""
UNEXPECTED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, LayoutError)
"""Exceptions that the readers may raise for content of unexpected types or values."""


def _is_zero(path: Path) -> bool:
    return is_zero_folder(path) and not is_universal(path)


SORTS: Mapping[str, tuple[Callable[[Path], bool], Callable[[Path, bool], Foreign]]] = {
    "a folder of DeepSpeed's save_checkpoint (mp_rank_00_model_states.pt and the like)": (_is_zero, read_zero),
    f"a folder of torch's distributed checkpoint ({METADATA})": (is_dcp, read_dcp),
    f"a folder of DeepSpeed's universal format ({ZERO}/{OPTIMIZER})": (is_universal, read_universal),
    f"a safetensors file, or a folder with {INDEX} or one such file": (is_safetensors, read_safetensors),
}
"""The known formats: a map from a description to (function that tests whether a path has the format, reader)."""


def told_at(path: Path, trust_pickle: bool = False) -> Foreign:
    """Return a description of another tool's checkpoint at a path. The format is recognized from the files.

    If the path is a folder in which a file such as `latest` names a checkpoint, that checkpoint is described.

    Raises CheckpointError if there is no checkpoint, if this package wrote it, or if its format is ambiguous. Raises
    CheckpointDamaged if the checkpoint cannot be read. Errors of the format's reader pass through.
    """
    if (path / RECORD).is_file():
        raise CheckpointError(f"{path} is a checkpoint of ds_dynatrain already; load it as it is, or give another --to")
    named = {name: path / read_note(path / name) for name in NOTES if (path / name).is_file()}
    inside = {name: each for name, each in named.items() if each.parent == path}
    there = sorted({each for each in inside.values() if each.is_dir()})
    if len(there) > 1:
        raise CheckpointError(
            f"{path} is not clear: {' and '.join(named)} name {' and '.join(map(str, there))}; give one of these paths"
        )
    if there:
        return told_at(there[0], trust_pickle)
    found = [(what, read) for what, (is_there, read) in SORTS.items() if is_there(path)]
    if found and inside:
        note, gone = next(iter(inside.items()))
        raise CheckpointError(
            f"{path} is not clear: {note} in it names {gone.name!r}, which is not there, and it is {found[0][0]}; "
            f"bring {gone.name!r} back, or move the other files into a folder of their own and give that"
        )
    if len(found) == 1:
        (what, read) = found[0]
        try:
            with naming(path):
                return read(path, trust_pickle)
        except UNEXPECTED as error:  # untrusted files may have any content, of any type
            raise CheckpointDamaged(
                f"{path} was taken for {what} and cannot be read: {type(error).__name__}: {error}; {WHERE_DAMAGED}"
            ) from None
    if found:
        raise CheckpointError(
            f"{path} is not clear: it is {' and '.join(what for what, _ in found)}; move the files of one of them "
            "into a folder of their own"
        )
    looked = "; ".join([*SORTS, f"one that {' or '.join(NOTES)} in a folder names"])
    raise CheckpointError(f"there is no checkpoint at {path}; give the path of one of these: {looked}")
