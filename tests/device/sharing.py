"""The device's memory read by other processes, as CUDA IPC does it: here the kernel copies it for them."""

from __future__ import annotations

import os
import struct

import torch

from ds_dynatrain.transfer.device_memory import HANDLE_BYTES, Shared
from ds_dynatrain.transfer.neighbors import read_memory
from ds_dynatrain.transfer.series import Matrix

HANDLE = struct.Struct("=QQ")
"""The process, and where its allocation begins there."""


FAR = 1 << 48
"""Between the places of two opened allocations, more bytes than either has."""


class LabMemory:
    """See `DeviceMemory`. An allocation that is opened twice is an error, as on a card."""

    def __init__(self) -> None:
        self._opened: dict[int, tuple[int, int]] = {}
        self._count = 0

    def share(self, tensor: torch.Tensor) -> Shared:
        base = tensor.untyped_storage().data_ptr()
        return Shared(HANDLE.pack(os.getpid(), base).ljust(HANDLE_BYTES, b"\0"), tensor.data_ptr() - base)

    def open(self, handle: bytes) -> int:
        process, begin = HANDLE.unpack(handle[: HANDLE.size])
        if (process, begin) in self._opened.values():
            raise RuntimeError(f"{begin:#x} of process {process} is open already")
        self._count += 1
        self._opened[self._count] = process, begin
        return self._count * FAR

    def close(self, opened: int) -> None:
        del self._opened[opened // FAR]

    def read(self, address: int, matrix: Matrix, into: torch.Tensor, place: Matrix) -> None:
        number, offset = divmod(address, FAR)
        process, begin = self._opened[number]
        for row in range(matrix.number):
            staged = torch.empty(matrix.length, dtype=torch.uint8, device="cpu")
            read_memory(process, begin + offset + matrix.begin + row * matrix.step, staged)
            into[place.begin + row * place.step :][: place.length].copy_(staged)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()
