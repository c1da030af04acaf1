"""What is asked of an accelerator, by what its driver and torch's module for it can say."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from ds_dynatrain.adapters.groups.device import device_error, free_bytes, is_capturing, synchronize, take_own, warm

TOTAL, RESERVED, ALLOCATED = 1000, 300, 200


class Accelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no types
    """One with memory of its own."""

    synchronized = 0

    def device_name(self, device_index: int | None = None) -> str:
        return "xpu"

    def current_device(self) -> int:
        return 0

    def total_memory(self, device_index: int | None = None) -> int:
        return TOTAL

    def memory_reserved(self, device_index: int | None = None) -> int:
        return RESERVED

    def memory_allocated(self, device_index: int | None = None) -> int:
        return ALLOCATED

    def synchronize(self, device_index: int | None = None) -> None:
        self.synchronized += 1


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    made = Accelerator()
    monkeypatch.setattr(real_accelerator, "ds_accelerator", made)
    return made


def test_free_is_what_the_driver_says_and_what_the_allocator_does_not_use(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds 400 of it."""
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda: (TOTAL - RESERVED - 400, TOTAL), raising=False)
    assert free_bytes() == TOTAL - 400 - ALLOCATED


def test_a_driver_that_cannot_be_asked(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator holds is counted once."""
    monkeypatch.delattr(torch.xpu, "mem_get_info", raising=False)
    assert free_bytes() == TOTAL - ALLOCATED


def test_a_capture_is_not_broken_off(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.xpu, "is_current_stream_capturing", raising=False)
    assert not is_capturing(), "torch cannot say it of this one"
    synchronize()
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True, raising=False)
    assert is_capturing()
    synchronize()
    assert accelerator.synchronized == 1


def test_a_cpu_captures_nothing() -> None:
    assert not is_capturing()


def test_the_device_is_that_of_the_process_on_its_machine(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first group of torch.distributed is made. Where there are fewer, DeepSpeed has the word for it."""
    taken = list[int]()
    monkeypatch.setattr(accelerator, "set_device", taken.append, raising=False)
    monkeypatch.setattr(accelerator, "device_count", lambda: 2, raising=False)
    take_own(1)
    take_own(2)
    assert taken == [1]


def test_a_device_that_takes_nothing_any_more(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.xpu, "is_current_stream_capturing", raising=False)
    assert device_error() == ""

    def fails(device_index: int | None = None) -> None:
        raise RuntimeError("an illegal memory access was encountered\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(accelerator, "synchronize", fails)
    assert device_error() == "an illegal memory access was encountered"


def test_a_cpu_needs_no_warmth() -> None:
    warm()
    take_own(3)
    assert device_error() == ""
