"""The device's memory read by other processes, as CUDA IPC does it: here the kernel copies it for them."""

from __future__ import annotations

import os
import struct

import torch

from ds_dynatrain.transfer.cross_memory import read_memory
from ds_dynatrain.transfer.device_memory import HANDLE_BYTES, Shared
from ds_dynatrain.transfer.series import Matrix

HANDLE = struct.Struct("=QQ")
"""The process, and where its allocation begins there."""


class LabMemory:
    """See `DeviceMemory`. It counts what it has opened: an allocation that is open twice is an error, as on a card."""

    def __init__(self) -> None:
        self._opened: dict[int, int] = {}

    def share(self, tensor: torch.Tensor) -> Shared:
        base = tensor.untyped_storage().data_ptr()
        return Shared(HANDLE.pack(os.getpid(), base).ljust(HANDLE_BYTES, b"\0"), tensor.data_ptr() - base)

    def open(self, handle: bytes) -> int:
        process, begin = HANDLE.unpack(handle[: HANDLE.size])
        if begin in self._opened:
            raise RuntimeError(f"{begin:#x} of process {process} is open already")
        self._opened[begin] = process
        return int(begin)

    def close(self, opened: int) -> None:
        del self._opened[opened]

    def read(self, address: int, matrix: Matrix, into: torch.Tensor, place: Matrix) -> None:
        process = next(process for begin, process in sorted(self._opened.items(), reverse=True) if begin <= address)
        for row in range(matrix.number):
            staged = torch.empty(matrix.length, dtype=torch.uint8, device="cpu")
            read_memory(process, address + matrix.begin + row * matrix.step, staged)
            into[place.begin + row * place.step :][: place.length].copy_(staged)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()
