"""Conversion between this package's checkpoints and other tools' formats, with a progress bar on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress

from ds_dynatrain.checkpoint.extents import named
from ds_dynatrain.checkpoint.files import naming
from ds_dynatrain.checkpoint.others.dcp_folder import to_dcp
from ds_dynatrain.checkpoint.others.foreign import bytes_of
from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.others.safetensors import to_safetensors
from ds_dynatrain.checkpoint.others.universal_folder import to_universal
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.cli.checkpoints import COLUMNS, found
from ds_dynatrain.cli.choices import Format, WeightType
from ds_dynatrain.errors import CheckpointError

MOST_NAMED = 10
"""Maximum number of left-out parts to name."""


def convert(path: Path, out: Path, to: Format, dtype: WeightType | None, trust_pickle: bool) -> Iterator[str]:
    """Convert the checkpoint at `path`, and yield lines of text that say what was written.

    dtype: the type to which weights are converted; None to keep their types.
    trust_pickle: whether to unpickle content that is neither tensors nor plain values.

    Errors of `to_safetensors`, `to_universal`, `to_dcp`, `told_at` and `take` pass through.
    """
    with naming(path):
        if to is Format.OURS:
            yield from _to_ours(path, out, dtype, trust_pickle)
        else:
            yield _from_ours(found(path), out, to, None if dtype is None else named(dtype.value))


def _to_ours(path: Path, out: Path, dtype: WeightType | None, trust_pickle: bool) -> Iterator[str]:
    from ds_dynatrain.engine.checkpoints.extra_state import convert_foreign

    if dtype is not None:
        raise CheckpointError(
            f"{path}: --dtype is for formats of weights, and what is converted to ours keeps its types; leave --dtype "
            "out"
        )
    foreign = told_at(path, trust_pickle)
    with _bar(bytes_of(foreign)) as advance:
        written = convert_foreign(foreign, out, advance)
    yield f"{written}: from {foreign.format}"
    if foreign.left_out:
        more = f" and {len(foreign.left_out) - MOST_NAMED} more" if len(foreign.left_out) > MOST_NAMED else ""
        yield f"left out: {', '.join(foreign.left_out[:MOST_NAMED])}{more}"


def _from_ours(saved: Saved, out: Path, to: Format, dtype: torch.dtype | None) -> str:
    with _bar(_bytes_of(saved, to, dtype)) as advance:
        if to is Format.SAFETENSORS:
            out = out / "model.safetensors" if out.is_dir() else out
            return f"{out}: {to_safetensors(saved, out, dtype, advance):,} bytes"
        from ds_dynatrain.engine.checkpoints.extra_state import rest_for, shared_of  # imports DeepSpeed

        with Reader(saved.path, saved.manifest) as reader:
            buffers = rest_for(saved, reader, saved.record.world, 0)["buffers"]
        if to is Format.DEEPSPEED:
            if dtype is not None:
                raise CheckpointError(
                    f"{saved.path}: --dtype is for weights, and DeepSpeed's universal format has masters and states; "
                    "leave --dtype out"
                )
            return str(to_universal(saved, shared_of(saved), buffers, out, advance))
        return str(to_dcp(saved, shared_of(saved), out, dtype, advance))


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Context manager that shows a progress bar. Yields a function that advances the bar by a number of bytes.

    total: total number of bytes; None if unknown.
    """
    with Progress(*COLUMNS, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("writing", total=total))


def _bytes_of(saved: Saved, to: Format, dtype: torch.dtype | None) -> int | None:
    """Return an estimate of how many bytes the conversion will write; None if unknown."""
    tensors = saved.record.logical_tensors()
    if to is Format.SAFETENSORS:
        return None if dtype is None else sum(tensor.numel for tensor in tensors) * dtype.itemsize
    return sum(row.nbytes for row in saved.manifest if row.file or to is Format.DEEPSPEED)
