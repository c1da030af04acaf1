"""Files of `torch.save` as plain Python values, with a note of where it lies in place of each tensor.

They are pickles. torch's own reader for files of strangers (`weights_only`) takes them apart, which builds nothing but
plain values, tensors, and `Opaque` stand-ins for a short list of classes of DeepSpeed's. Anything else is refused, or,
if the caller says that he trusts the file, unpickled. Values are not read: only where they are.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ds_dynatrain.checkpoint.files import WHERE_DAMAGED, open_regular
from ds_dynatrain.checkpoint.others.archives import BEGIN, check_member, directory, opened
from ds_dynatrain.checkpoint.others.pickles import Opaque, check_pickle
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

ALLOWED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.utils.fragment_address",
)
"""Classes of DeepSpeed 0.14 to 0.19 that are in each checkpoint: plain records, read as `Opaque`."""
MOST_BYTES = 1 << 28
"""Of a tensor that is read into memory with the rest: steps, buffers, a user's own."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. file: relative to the folder. offset: of its first value, in bytes. is_dense: row-major."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_dense: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.numel * self.dtype.itemsize


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of an instance, whether it is a stand-in or was unpickled."""
    return value.fields if isinstance(value, Opaque) else dict(getattr(value, "__dict__", {}))


def read_tree(folder: Path, name: str, trust_pickle: bool = False, part: tuple[int, int] | None = None) -> Any:
    """What is in a file of `torch.save`, a `Stored` in place of each tensor; values are not read.

    part: (first byte, length) of one such file inside of another one.
    trust_pickle: run what the file says where `weights_only` refuses it; for files that you wrote yourself.
    CheckpointError for content that is refused, CheckpointDamaged for what is no such file, is cut off, or stands for
    more values than any checkpoint has.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second of imports, for those who need it
    from torch.serialization import safe_globals

    path = folder / name
    try:
        with opened(folder, (name, part)) as file:
            if not trust_pickle:
                check_pickle(_pickle_in(file))
            with safe_globals([(Opaque, each) for each in ALLOWED]), FakeTensorMode():
                tree = _loaded(file, trust_pickle)
            first, size = part[0] if part else 0, file.seek(0, os.SEEK_END)
            return mapped(tree, lambda tensor: _stored(tensor, name, first, size))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and reading it would run what it says "
            f"({_first_line(error)}); if you wrote it yourself, give trust_pickle=True, or --trust-pickle"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # torch has many ways to say that bytes are no such file
        raise CheckpointDamaged(f"{path} is no file of torch.save, or cut off: {_first_line(error)}") from None


def _pickle_in(file: IO[bytes]) -> bytes:
    """The pickle that torch would read; ValueError or BadZipFile if the file is no zip of torch.save, or damaged."""
    if file.read(len(BEGIN)) != BEGIN:
        raise ValueError("it is no zip (one of torch before 1.6 is none: save it anew)")
    archive = directory(file)
    for entry in archive.infolist():
        if entry.filename.endswith("/data.pkl"):
            check_member(archive, entry)
    file.seek(0)
    return torch._C.PyTorchFileReader(file).get_record("data.pkl")


def _loaded(file: IO[bytes], trust_pickle: bool) -> Any:
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not trust_pickle:
            raise
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)


def _stored(tensor: torch.Tensor, name: str, first: int, size: int) -> Stored:
    """Where a tensor lies. first, size: of the zip in the file."""
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not tensor.numel():
        return Stored(name, 0, dtype, shape)
    if start is None:
        raise CheckpointError(f"{name}: where a tensor of shape {shape} lies is not known; save it anew with torch 2")
    offset = start + tensor.storage_offset() * dtype.itemsize
    found = Stored(name, first + offset, dtype, shape, tensor.is_contiguous())
    if offset < 0 or (found.is_dense and offset + found.nbytes > size):
        raise CheckpointDamaged(f"{name} says that it holds {found.nbytes} bytes from byte {offset}, of {size}")
    return found


def mapped(tree: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """A tree of plain containers with each instance of `kind` changed; what is there twice stays one."""
    known: dict[int, Any] = {}

    def follow(part: Any) -> Any:
        if id(part) not in known:
            known[id(part)] = visit(part)
        return known[id(part)]

    def visit(part: Any) -> Any:
        if isinstance(part, kind):
            return change(part)
        if isinstance(part, torch.Size):
            return tuple(part)
        if isinstance(part, Mapping):
            return {key: follow(each) for key, each in part.items()}
        if isinstance(part, list | tuple) and type(part) in (list, tuple):
            return type(part)(follow(each) for each in part)
        return part

    return follow(tree)


def value_of(folder: Path, stored: Stored) -> torch.Tensor:
    """The values of one small tensor; CheckpointError for one that is too large to be read so."""
    if not stored.is_dense or stored.nbytes > MOST_BYTES:
        raise CheckpointError(
            f"{folder / stored.file} has a tensor of shape {stored.shape} where a small one is expected; "
            f"{WHERE_DAMAGED}"
        )
    held = torch.empty(stored.nbytes, dtype=torch.uint8)
    if stored.nbytes:
        with open(open_regular(folder / stored.file, links=True), "rb") as file:
            data = os.pread(file.fileno(), stored.nbytes, stored.offset)
        if len(data) != stored.nbytes:
            raise CheckpointDamaged(
                f"{folder / stored.file} ends before byte {stored.offset + stored.nbytes}: it is cut off; "
                f"{WHERE_DAMAGED}"
            )
        held.numpy()[:] = memoryview(data)
    return held.view(stored.dtype).view(stored.shape)


def with_values(folder: Path, tree: Any) -> Any:
    """The tree with the values of its tensors, which must be small."""
    return mapped(tree, lambda stored: value_of(folder, stored), Stored)


def _first_line(error: BaseException) -> str:
    lines: Iterable[str] = str(error).splitlines()
    wanted = [line.strip() for line in lines if "GLOBAL" in line or "class" in line] or str(error).splitlines() or [""]
    return wanted[0][:300]
