"""The calls of CUDA's driver, on one that only takes them down: which, in which order, with which numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.device_memory import (
    HANDLE_BYTES,
    MOST_PITCH,
    UNIFIED,
    DeviceMemory,
    MemoryProbe,
    device_memory,
)
from ds_dynatrain.transfer.series import Matrix

BASE, STREAM, OPENED = 0x7000_0000, 77, 0x9000_0000


class Driver:
    """Functions by name. `fails`: one that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name == "cuGetErrorName":
                given[1]._obj.value = b"CUDA_ERROR_INVALID_VALUE"
                return 0
            self.calls.append((name, *self._taken(name, *given)))
            return 1 if name == self._fails else 0

        return call

    def _taken(self, name: str, *given: Any) -> tuple[Any, ...]:
        match name:
            case "cuMemGetAddressRange_v2":
                given[0]._obj.value = BASE
                return (given[2].value,)
            case "cuIpcGetMemHandle":
                ctypes.memmove(ctypes.addressof(given[0]._obj), b"h" * HANDLE_BYTES, HANDLE_BYTES)
                return (given[1].value,)
            case "cuIpcOpenMemHandle_v2":
                given[0]._obj.value = OPENED
                return (bytes(given[1]),)
            case "cuMemcpy2DAsync_v2":
                copy = given[0]._obj
                sides = [(copy.from_device, copy.from_pitch), (copy.into_device, copy.into_pitch)]
                assert copy.from_type == copy.into_type == UNIFIED
                return (*sides, copy.width, copy.height, given[1].value)
        return tuple(each.value for each in given)


@pytest.fixture(autouse=True)
def stream() -> Iterator[None]:
    present = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    with patch.object(torch.cuda, "current_stream", lambda: present):
        yield


def test_a_tensor_is_known_by_its_allocation_and_its_place_there() -> None:
    driver = Driver()
    held = SimpleNamespace(data_ptr=lambda: BASE + 4096, device=torch.device("cpu"))
    with patch.object(torch.cuda, "device", lambda _: patch.dict({})):
        shared = DeviceMemory(driver).share(held)  # type: ignore[arg-type]
    assert shared == (b"h" * HANDLE_BYTES, 4096)
    assert driver.calls == [("cuMemGetAddressRange_v2", BASE + 4096), ("cuIpcGetMemHandle", BASE)]


def test_what_is_opened_is_closed() -> None:
    driver = Driver()
    memory = DeviceMemory(driver)  # type: ignore[arg-type]
    memory.close(memory.open(b"x" * HANDLE_BYTES))
    assert driver.calls == [("cuIpcOpenMemHandle_v2", b"x" * HANDLE_BYTES), ("cuIpcCloseMemHandle", OPENED)]


@pytest.mark.parametrize(
    ("theirs", "mine", "copies"),
    [
        (Matrix(0, 8, 100, 3, 40), Matrix(0, 16, 40, 3, 40), 1),
        (Matrix(0, 8, 0, 1, 40), Matrix(0, 16, 0, 1, 40), 1),
        (Matrix(0, 800, -100, 3, 40), Matrix(0, 16, 40, 3, 40), 3),
        (Matrix(0, 8, MOST_PITCH + 1, 2, 40), Matrix(0, 16, 40, 2, 40), 2),
        (Matrix(0, 8, 20, 3, 40), Matrix(0, 16, 40, 3, 40), 3),
    ],
    ids=["rows", "one run", "steps back", "steps too long", "rows that overlap"],
)
def test_a_matrix_is_one_copy_where_the_driver_has_one_for_it(theirs: Matrix, mine: Matrix, copies: int) -> None:
    driver, into = Driver(), torch.zeros(1000, dtype=torch.uint8)
    DeviceMemory(driver).read(OPENED, theirs, into, mine)  # type: ignore[arg-type]
    first, second = OPENED + theirs.begin, into.data_ptr() + mine.begin
    if copies == 1 and theirs.number > 1:
        expected: list[Any] = [("cuMemcpy2DAsync_v2", (first, 100), (second, 40), 40, 3, STREAM)]
    else:
        rows = range(theirs.number)
        expected = [
            ("cuMemcpyAsync", second + row * mine.step, first + row * theirs.step, theirs.length, STREAM)
            for row in rows
        ]
    assert driver.calls == expected and len(expected) == copies


def test_an_error_says_which_call_failed() -> None:
    with pytest.raises(TransferError, match=r"cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        DeviceMemory(Driver("cuIpcOpenMemHandle_v2")).open(b"x" * HANDLE_BYTES)  # type: ignore[arg-type]


def test_a_cpu_has_no_such_memory() -> None:
    assert device_memory(torch.device("cpu")) is None
    for probe in (MemoryProbe(None), MemoryProbe(torch.device("cpu"))):
        assert probe.record is None and not probe.can_read(["00" * HANDLE_BYTES, 0, [1]])
