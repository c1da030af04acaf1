"""Files of `torch.save`, read as plain Python values in which a `Stored` represents each tensor.

Such a file is an uncompressed zip of a pickle and of tensor values. torch's own reader for untrusted files
(`weights_only`) reads the pickle, and builds only plain values, tensors, and `Opaque` objects for a short list of
DeepSpeed's classes. Anything else is refused or, if the caller trusts the file, unpickled. Tensor values are not read;
only their positions are recorded. `zipfile` checks the CRC32 of each zip member, which torch never does. A CRC32 of 0
means that none was computed (`torch.serialization.set_crc32_options`).

The values that a pickle would make are counted before the pickle is read, because a short pickle can make far too many.
Sixty tuples, each of which contains the previous one twice, take 200 bytes but are 2^60 values for a reader that
follows them, and hashing such a key, as `weights_only` does, never ends. A shared value is therefore counted each time
it is used.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ds_dynatrain.checkpoint.files import MOST_VALUES, WHERE_DAMAGED, open_regular
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError

MOST_BYTES = 1 << 28
"""Maximum accepted size in bytes of a pickle, and of a small tensor that is read by value, such as a step count."""
MOST_DEPTH = 200
MOST_BITS = 4096
"""Maximum number of bits of an integer. Python refuses to print larger ones."""
PER_VALUE = 16
"""Number of characters or bytes of a string that count as one additional value."""
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""Pickle operations that add to an existing value."""


class Opaque:
    """A replacement for an instance of a class that is not imported.

    args: the arguments of the instance's constructor.
    fields: the attributes set on the instance.
    """

    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> Opaque:
        """Make an instance the way pickle does."""
        made = super().__new__(cls)
        made.args, made.fields = args, {}
        return made

    def __setstate__(self, state: Any) -> None:
        """Set the fields the way pickle does."""
        if isinstance(state, Mapping):
            self.fields.update(state)


@dataclass
class _Made:
    """A value that a pickle operation makes.

    values: number of values that it contains, including itself.
    depth: nesting depth.
    is_shared: whether it was fetched from the pickle's memo.
    """

    values: int
    depth: int = 0
    is_shared: bool = False


def check_pickle(data: bytes) -> None:
    """Raise ValueError if a pickle has too many values, is nested too deeply, or has a value that contains itself."""
    stack: list[_Made | None] = []  # None stands for pickle's mark
    memo: dict[int, _Made] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):
        if opcode.name in _PUTS:
            top, index = stack[-1], len(memo) if opcode.name == "MEMOIZE" else int(argument or 0)
            if top is None or index > count:  # a large index makes Python's unpickler allocate a large table
                raise ValueError(f"value {index} is noted by operation {count}")
            memo[index] = top
        elif opcode.name in _GETS:
            made = memo[int(argument or 0)]
            made.is_shared = True
            stack.append(made)
        elif opcode.name == "DUP":
            raise ValueError("it doubles a value")
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            taken = _taken(stack, opcode)
            made = taken.pop(0) if opcode.name in _FILLS else _Made(1 + _weight(argument))
            if made.is_shared and opcode.name in _FILLS:
                raise ValueError("a value is changed after it was used: it is in itself")
            made.values += sum(each.values for each in taken)
            made.depth = max([made.depth, *(1 + each.depth for each in taken)])
            if max(count, made.values) > MOST_VALUES:
                raise ValueError(f"it stands for more than {MOST_VALUES} values")
            if made.depth > MOST_DEPTH:
                raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
            stack += [made] * len(opcode.stack_after)


def _taken(stack: list[_Made | None], opcode: pickletools.OpcodeInfo) -> list[_Made]:
    """Pop the operands of a pickle operation from the stack, and return them in the order in which they were pushed."""
    before, found = opcode.stack_before, list[_Made | None]()
    if pickletools.markobject in before:
        while (top := stack.pop()) is not None:
            found.append(top)
        before = before[: before.index(pickletools.markobject)]
    found += [stack.pop() for _ in before]
    return [each for each in reversed(found) if each is not None]


def _weight(value: Any) -> int:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"an integer of {value.bit_length()} bits")
    return len(value) // PER_VALUE if isinstance(value, str | bytes | bytearray) else 0


BEGIN = b"PK\x03\x04"
READ_BYTES = 1 << 20
Archive = tuple[str, tuple[int, int] | None]
"""A file name, and (first byte, length) of the zip in the file; None instead if the whole file is the zip."""


class FilePart(io.RawIOBase):
    """A part of an open file, as a separate file object.

    place: the first byte and the length of the part.

    Raises ValueError if the part exceeds the file.
    """

    def __init__(self, file: io.BufferedReader, place: tuple[int, int]) -> None:
        self.first, self.length = place
        if min(place) < 0 or sum(place) > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{self.length} bytes from byte {self.first} leave the file")
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, (0, self._at, self.length)[whence] + offset)
        return self._at

    def readinto(self, room: Any) -> int:
        view = memoryview(room).cast("B")[: max(0, self.length - self._at)]
        self._file.seek(self.first + self._at)
        done = self._file.readinto(view)
        self._at += done
        return done


@contextmanager
def opened(folder: Path, archive: Archive) -> Iterator[IO[bytes]]:
    """Context manager that opens a file of `torch.save`, or the part of a file that contains one."""
    name, place = archive
    with open(open_regular(folder / name, links=True), "rb") as file:
        yield cast(IO[bytes], FilePart(file, place) if place else file)


def directory(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip and read its directory of members. Raises ValueError if `torch.save` cannot have written it."""
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
        raise ValueError("it is compressed, as torch.save never writes it")
    if sum(each.file_size for each in entries) > file.seek(0, io.SEEK_END):
        raise ValueError("two of its members are in one place")
    if len({each.filename.lower() for each in entries}) < len(entries):
        raise ValueError("two of its members have one name")
    return archive


def check_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raise BadZipFile if the content of a zip member does not match its CRC32. Accepts a member without a CRC32."""
    if entry.CRC:
        with archive.open(entry) as member:
            while member.read(READ_BYTES):
                pass


def check_crcs(folder: Path, archives: Iterable[Archive], place: int = 0, places: int = 1) -> None:
    """Compare the members of `torch.save` files with their CRC32s.

    place, places: check only every `places`-th member, from number `place` on. Other processes check the rest.

    Raises CheckpointDamaged, naming file and member, if a member does not match.
    """
    count = 0
    for name, part in archives:
        entry = None
        try:
            with opened(folder, (name, part)) as file:
                if file.read(len(BEGIN)) != BEGIN:  # a file of torch before 1.6, which only `trust_pickle` reads
                    continue
                archive = directory(file)
                for entry in archive.infolist():
                    if count % places == place:
                        check_member(archive, entry)
                    count += 1
        except CheckpointDamaged:
            raise
        except Exception as error:  # zipfile raises many errors for bytes that are not a zip
            where = f"{entry.filename} in it, " if entry else ""
            raise CheckpointDamaged(f"{name} is not what was saved: {where}{error}") from None


ALLOWED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.utils.fragment_address",
)
"""Classes of DeepSpeed 0.14 to 0.19 that occur in every checkpoint: plain records, read as `Opaque`."""


@dataclass(frozen=True)
class Stored:
    """The position of a tensor's values in a file.

    file: the path of the file, relative to the checkpoint's folder.
    offset: the position of the values' first byte in the file.
    dtype: the element type.
    shape: the shape of the tensor.
    is_dense: whether the values are in row-major order without gaps.
    """

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_dense: bool = True

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.numel * self.dtype.itemsize


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an `Opaque` or of an unpickled object, keyed by name."""
    return value.fields if isinstance(value, Opaque) else dict(getattr(value, "__dict__", {}))


def read_tree(folder: Path, name: str, trust_pickle: bool = False, part: tuple[int, int] | None = None) -> Any:
    """Return the content of a file of `torch.save`, with a `Stored` instead of each tensor. Values are not read.

    trust_pickle: whether to run the pickle if `weights_only` refuses it. Only for files that you wrote yourself.
    part: (first byte, length) if the content lies inside another file.

    Raises CheckpointError if the content is refused. Raises CheckpointDamaged if the file has another format, is cut
    off, or would unpickle to more values than are accepted.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import
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
    except Exception as error:  # torch raises many errors for other files
        raise CheckpointDamaged(f"{path} is no file of torch.save, or cut off: {_first_line(error)}") from None


def _pickle_in(file: IO[bytes]) -> bytes:
    """Return the pickle that torch would read, after checking its CRC32.

    Raises ValueError or BadZipFile if the file is damaged or is not a zip that torch wrote.
    """
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
    """Return the position of a tensor that was loaded without values.

    name: the file.
    first: the position of the zip's first byte in the file.
    size: the length of the zip.

    Raises CheckpointError if torch did not report the position, and CheckpointDamaged if the tensor exceeds the zip.
    """
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
    """Return a copy of nested containers in which each instance of `kind` is replaced with the result of `change`.

    An object that occurs several times is changed once, and stays shared.
    """
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
    """Return the values of one small tensor.

    Raises CheckpointError if the tensor is too large or not in row-major order, and CheckpointDamaged if its file is
    cut off.
    """
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
    """Return a copy of nested containers in which each `Stored` is replaced with its tensor, which must be small."""
    return mapped(tree, lambda stored: value_of(folder, stored), Stored)


def _first_line(error: BaseException) -> str:
    lines: Iterable[str] = str(error).splitlines()
    wanted = [line.strip() for line in lines if "GLOBAL" in line or "class" in line] or str(error).splitlines() or [""]
    return wanted[0][:300]
