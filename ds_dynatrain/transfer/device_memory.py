"""Access to accelerator memory of other processes by CUDA IPC through the driver API, with one copy and no message.

A handle is 64 bytes of plain data that identify an allocation of the driver. Torch's allocator keeps many tensors in
one allocation, so a reference also needs an offset. Memory that torch maps in segments (`expandable_segments`) has no
handle, and some containers do not permit IPC; `Neighbors.meet` tests whether it works before any member relies on it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.series import Matrix

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
PROBE_BYTES = 64
UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the driver infers the location of memory from its address."""
MOST_PITCH = (1 << 31) - 1
"""Longest distance between rows of a two-dimensional copy, in bytes."""


class Shared(NamedTuple):
    """A reference by which other processes can find accelerator memory.

    handle: the handle of an allocation.
    offset: the offset into the allocation, in bytes.
    """

    handle: bytes
    offset: int


END_OF_COPY = (
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """C structure `CUDA_MEMCPY2D`: the parameters of a two-dimensional copy."""

    _fields_ = (
        *((f"from_{name}", kind) for name, kind in END_OF_COPY),
        *((f"into_{name}", kind) for name, kind in END_OF_COPY),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Handle(ctypes.Structure):
    """C structure `CUipcMemHandle`: identifies an allocation to other processes."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class DeviceMemory:
    """Access to memory of other processes on the CUDA accelerators of this machine.

    Errors of the driver are raised as TransferError, with the name of the failed call. Copies run in the context of
    this process, on its current stream; torch's own IPC would open a context on every device that is read.
    """

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver

    def share(self, tensor: torch.Tensor) -> Shared:
        """Return a reference by which other processes can read a tensor. Raises TransferError if the tensor cannot be
        shared."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(tensor.data_ptr())
        with torch.cuda.device(tensor.device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Shared(bytes(handle), address.value - base.value)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; return its address in this process, valid until `close`.

        A handle must not be open twice at the same time.
        """
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return address.value

    def close(self, opened: int) -> None:
        """Unmap an allocation of another process.

        opened: the address that `open` returned.
        """
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(opened))

    def read(self, address: int, matrix: Matrix, into: torch.Tensor, place: Matrix) -> None:
        """Queue a copy from an open allocation of another process into a local uint8 tensor.

        address: an address in the allocation.
        matrix: the bytes to read, relative to `address`.
        place: the bytes of `into` to fill, in a matrix of the same shape.
        """
        source, target = address + matrix.begin, into.data_ptr() + place.begin
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pitches = (matrix.step, place.step)
        if matrix.number > 1 and matrix.length <= min(pitches) and max(pitches) <= MOST_PITCH:
            copy = _Copy2D(from_type=UNIFIED, from_device=source, from_pitch=matrix.step)
            copy.into_type, copy.into_device, copy.into_pitch = UNIFIED, target, place.step
            copy.width, copy.height = matrix.length, matrix.number
            self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)
            return
        for row in range(matrix.number):  # one row, or steps that are negative, overlapping or too long
            begin, end = source + row * matrix.step, target + row * place.step
            length = ctypes.c_size_t(matrix.length)
            self._call("cuMemcpyAsync", ctypes.c_uint64(end), ctypes.c_uint64(begin), length, stream)

    def synchronize(self) -> None:
        """Wait until all queued copies are done."""
        torch.cuda.current_stream().synchronize()

    def _call(self, name: str, *given: object) -> None:
        code = int(getattr(self._driver, name)(*given))
        if code:
            words = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(words))
            raise TransferError(f"{name} failed: {(words.value or b'unknown error').decode()} ({code})")


@cache
def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return an object that gives access to other processes' memory on devices like `device`; None if such access is
    impossible.

    Accelerators other than CUDA can provide it: the function `device_memory()` of their torch module must return an
    object with the methods of `DeviceMemory`.
    """
    if device.type == "cuda" and torch.version.hip is None:
        try:
            return DeviceMemory(ctypes.CDLL("libcuda.so.1"))
        except OSError:
            return None
    offered: Callable[[], DeviceMemory] | None = getattr(getattr(torch, device.type, None), "device_memory", None)
    return None if offered is None else offered()


class MemoryProbe:
    """A few bytes on this process's accelerator, by which other members test whether they can read its memory."""

    def __init__(self, device: torch.device | None) -> None:
        self._device, self._memory = device, None if device is None else device_memory(device)
        self.record: list[Any] | None = None
        """A reference to the probe, and the probe's values, as plain JSON for other members; None if the probe cannot
        be shared."""
        if self._memory is not None:
            values = list(os.urandom(PROBE_BYTES))  # not drawn from a random stream of training
            self._held = torch.tensor(values, dtype=torch.uint8, device=device)
            self._memory.synchronize()
            with suppress(TransferError):
                shared = self._memory.share(self._held)
                self.record = [shared.handle.hex(), shared.offset, values]

    def can_read(self, record: list[Any] | None) -> bool:
        """Return whether this process can read the probe of another process.

        record: the attribute `record` of that probe; None if the probe cannot be shared.
        """
        if self._memory is None or record is None:
            return False
        handle, offset, values = record
        into, whole = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self._device), Matrix(0, 0, 0, 1, PROBE_BYTES)
        try:
            begin = self._memory.open(bytes.fromhex(handle))
            try:
                self._memory.read(begin + offset, whole, into, whole)
                self._memory.synchronize()
            finally:
                self._memory.close(begin)
        except TransferError:
            return False
        return bool(into.tolist() == values)
