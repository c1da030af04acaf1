"""What is in a checkpoint of a job, read by the command `ds-dynatrain` into other tools' formats."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

State = Mapping[str, object]
"""Weights by their names, masters, moments and steps by the names that torch's DCP has for them."""


@dataclass(frozen=True)
class Answer:
    """What the command printed, and its exit code."""

    code: int
    out: str


def command(*arguments: str) -> Answer:
    """Run `ds-dynatrain` as a shell would, in this process."""
    out = io.StringIO()
    with patch.object(sys, "argv", ["ds-dynatrain", *arguments]), contextlib.redirect_stdout(out):
        with contextlib.redirect_stderr(out):
            try:
                code: Any = _entry_point()() or 0
            except SystemExit as end:
                code = end.code or 0
    return Answer(int(code), out.getvalue())


@cache
def _entry_point() -> Callable[[], int | None]:
    (found,) = entry_points(group="console_scripts", name="ds-dynatrain")
    main: Callable[[], int | None] = found.load()
    return main


def read(folder: Path) -> State:
    """Return all state of a checkpoint's tensors: weights as they are held, masters, moments, steps, rates."""
    converted = folder.with_name(f"{folder.name}.dcp"), folder.with_name(f"{folder.name}.safetensors")
    if not converted[0].exists():
        for into, kind in zip(converted, ("dcp", "safetensors"), strict=True):
            answer = command("checkpoint", "convert", str(folder), str(into), "--to", kind)
            assert not answer.code, answer.out
    return {**read_dcp(converted[0]), **{f"weight.{key}": value for key, value in load_file(converted[1]).items()}}


def read_dcp(folder: Path) -> dict[str, object]:
    """Return everything in a checkpoint of torch's DCP."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, object] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in entries.items()
    }
    load(state, checkpoint_id=folder, no_dist=True)
    return state


def differences(one: State, other: State) -> Sequence[str]:
    """Return in words what is not bit-equal in two states."""
    found = [f"{key} is in one state only" for key in one.keys() ^ other.keys()]
    for key in one.keys() & other.keys():
        mine, theirs = one[key], other[key]
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            if mine.dtype != theirs.dtype or not torch.equal(_bits(mine), _bits(theirs)):
                furthest = (mine.double() - theirs.double()).abs().max().item()
                found.append(f"{key} differs by {furthest:.1e}")
        elif mine != theirs:
            found.append(f"{key}: {mine} and {theirs}")
    return sorted(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
