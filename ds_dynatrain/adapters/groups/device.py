"""The device on which this process computes, as reported by DeepSpeed's accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from deepspeed.accelerator import get_accelerator

T = TypeVar("T")
HOST = torch.device("cpu")


def compute_device() -> torch.device:
    """Return the device of parameters and of the forward pass: the CPU, or the accelerator with its current index."""
    accelerator = get_accelerator()
    if accelerator.device_name() == HOST.type:
        return HOST
    return torch.device(accelerator.device_name(), accelerator.current_device())


def is_accelerated() -> bool:
    """Return whether the compute device is an accelerator, which has its own memory, streams and random generator."""
    return bool(get_accelerator().device_name() != HOST.type)


def devices() -> tuple[torch.device, ...]:
    """Return the devices on which tensors may lie: the CPU, and `compute_device` if it is an accelerator."""
    return (HOST, compute_device()) if is_accelerated() else (HOST,)


def device_backend() -> str:
    """Return torch's name for the accelerator's communication back-end, such as "nccl", "xccl" or "hccl"."""
    return str(get_accelerator().communication_backend_name())


def synchronize() -> None:
    """Wait until the device has finished all queued work.

    Does nothing on a CPU, or while a graph is being captured, because waiting would abort the capture. No switch
    happens during a capture.
    """
    if is_accelerated() and not is_capturing():
        get_accelerator().synchronize()


def is_capturing() -> bool:
    """Return whether the current stream records a graph (`torch.cuda.graph`) instead of running."""
    if not is_accelerated():
        return False
    asked = getattr(getattr(torch, compute_device().type, None), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def take_own(local_rank: int) -> None:
    """Make this process compute on the device that DeepSpeed would choose for `local_rank` on its machine.

    DeepSpeed chooses the device in an engine's constructor, but process groups, and the memory they use, exist earlier.
    """
    if is_accelerated() and local_rank < get_accelerator().device_count():
        get_accelerator().set_device(local_rank)


def warm() -> None:
    """Make an accelerator create now what it creates at first use: context, operator libraries, autograd thread."""
    if not is_accelerated():
        return
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(64, 64, dtype=dtype, device=compute_device(), requires_grad=True)
        torch.nn.functional.layer_norm(weight @ weight, (64,)).softmax(-1).sum().backward()
    synchronize()


def device_error() -> str:
    """Return the first line of the accelerator's error if it no longer accepts work; "" if it works."""
    try:
        synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def free_bytes() -> int:
    """Return the number of bytes that this process can still allocate on its accelerator.

    It is the memory that the driver reports as free, plus the memory that torch's allocator holds but does not use. If
    torch cannot ask the driver, memory used by other processes is not taken into account.
    """
    accelerator = get_accelerator()
    asked = getattr(getattr(torch, compute_device().type, None), "mem_get_info", None)
    if asked is None:
        return int(accelerator.total_memory() - accelerator.memory_allocated())
    return int(asked()[0] + accelerator.memory_reserved() - accelerator.memory_allocated())


def training_bytes() -> int:
    """Return the number of bytes by which peak accelerator memory exceeds the memory now in use; 0 on a CPU.

    The peak is counted since torch's counter was last reset.
    """
    if not is_accelerated():
        return 0
    accelerator = get_accelerator()
    return max(0, int(accelerator.max_memory_allocated() - accelerator.memory_allocated()))


def used_bytes() -> int:
    """Return the bytes that tensors occupy on the accelerator or, without one, those that the process occupies."""
    return int(get_accelerator().memory_allocated())


def busy_percent() -> float | None:
    """Return the utilization of this process's GPU in the last moments, in percent; None if it is unknown.

    NVIDIA's cards report it if `nvidia-ml-py` is installed.
    """
    asked = getattr(getattr(torch, compute_device().type, None), "utilization", None)
    try:
        return None if asked is None else float(asked())
    except Exception:  # of NVML's own classes, for example where a card is shared
        return None


def total_bytes() -> int:
    """Return the total memory, in bytes, of this process's accelerator, or of the host if there is no accelerator."""
    return int(get_accelerator().total_memory())


@contextmanager
def on_separate_stream() -> Iterator[None]:
    """Context manager that queues the block's device work on a separate stream, and waits for it at the end."""
    if not is_accelerated():
        yield
        return
    queue = get_accelerator().Stream()
    try:
        with get_accelerator().stream(queue):
            yield
    finally:
        queue.synchronize()


def start_thread(target: Callable[[], object], name: str, device: torch.device | None = None) -> threading.Thread:
    """Start a daemon thread that computes on `device`, by default the current thread's device.

    Without this, a new thread's current device is the machine's first one. If the thread used that device, it would
    open a context there, in memory that belongs to another rank.
    """
    thread = threading.Thread(target=on_device(target, device), name=name, daemon=True)
    thread.start()
    return thread


def on_device(call: Callable[[], T], device: torch.device | None = None) -> Callable[[], T]:
    """Return a function that calls `call` on `device`, in whatever thread it runs.

    device: the device; None for the current thread's device at this moment.
    """
    there = compute_device() if device is None else device

    def run() -> T:
        if there != HOST:
            get_accelerator().set_device(there.index)
        return call()

    return run
