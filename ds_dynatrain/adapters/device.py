"""The device that this process computes on, by DeepSpeed's accelerator: nobody else asks which one it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

HOST = torch.device("cpu")


def compute_device() -> torch.device:
    """Return the device of parameters and of the forward pass: the CPU, or the accelerator's present device with its
    index.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == HOST.type:
        return HOST
    return torch.device(accelerator.device_name(), accelerator.current_device())


def is_accelerated() -> bool:
    """Whether it is another device than the CPU: with memory, streams and a random generator of its own."""
    return bool(get_accelerator().device_name() != HOST.type)


def devices() -> tuple[torch.device, ...]:
    """Return the devices that tensors may lie on: the CPU, and `compute_device` if that is another one."""
    return (HOST, compute_device()) if is_accelerated() else (HOST,)


def device_backend() -> str:
    """The name by which torch knows how the accelerator communicates: "nccl", "xccl", "hccl"."""
    return str(get_accelerator().communication_backend_name())


def synchronize() -> None:
    """Wait until the device has done all that was queued; nothing on a CPU, and while a graph is captured, which that
    would break off: there nothing is switched.
    """
    if is_accelerated() and not is_capturing():
        get_accelerator().synchronize()


def is_capturing() -> bool:
    """Whether the present stream records a graph (`torch.cuda.graph`) instead of running."""
    asked = _of_torch("is_current_stream_capturing")
    return asked is not None and bool(asked())


def take_own(local_rank: int) -> None:
    """Compute on the device that DeepSpeed takes for this process of its machine, from the first use of one on.

    DeepSpeed does so in an engine's constructor, and before that there are groups, and memory of theirs.
    """
    if is_accelerated() and local_rank < get_accelerator().device_count():
        get_accelerator().set_device(local_rank)


def warm() -> None:
    """Let an accelerator make now what its first uses make: a context, libraries of operators, autograd's thread."""
    if not is_accelerated():
        return
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(64, 64, dtype=dtype, device=compute_device(), requires_grad=True)
        torch.nn.functional.layer_norm(weight @ weight, (64,)).softmax(-1).sum().backward()
    synchronize()


def complaint() -> str:
    """Return the first line of the accelerator's error if it takes no more work; "" while it works."""
    try:
        synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def free_bytes() -> int:
    """Memory that this process may still take on its accelerator: what the driver has free, and what torch's allocator
    holds and does not use. Where torch cannot ask the driver, memory of other processes is not known.
    """
    accelerator, asked = get_accelerator(), _of_torch("mem_get_info")
    if asked is None:
        return int(accelerator.total_memory() - accelerator.memory_allocated())
    return int(asked()[0] + accelerator.memory_reserved() - accelerator.memory_allocated())


def training_bytes() -> int:
    """Memory on the accelerator that training took beyond what is there now, at most so far, as torch has counted since
    its counter was last set back; 0 on a CPU.
    """
    if not is_accelerated():
        return 0
    accelerator = get_accelerator()
    return max(0, int(accelerator.max_memory_allocated() - accelerator.memory_allocated()))


def total_bytes() -> int:
    """Memory of this process's accelerator, or of the host where there is none."""
    return int(get_accelerator().total_memory())


def _of_torch(name: str) -> Callable[[], Any] | None:
    """A function of torch's module for the accelerator, which not every one has; None on a CPU."""
    module = getattr(torch, compute_device().type, None) if is_accelerated() else None
    return getattr(module, name, None)


@contextmanager
def beside() -> Iterator[None]:
    """A block whose work on the device has a queue of its own, beside what training queues; at its end it is done."""
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
    """Start a daemon thread that computes on a device; by default on that of this thread.

    Each thread has a present device of its own, which is the first one of the machine at the beginning: a thread that
    touched it would open a context there, in memory that belongs to another rank.
    """
    there = compute_device() if device is None else device

    def run() -> None:
        if there != HOST:
            get_accelerator().set_device(there.index)
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
