"""`torch.lab`: the device of lab.cpp as a module of torch's, with the functions that torch and DeepSpeed look for.

`load` compiles what is not compiled yet and makes the device known to torch; the rest needs that first. Its name is the
only one that this process can give to such a device, and it stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as td
from torch.utils import cpp_extension

from ds_dynatrain.elastic.abort import new_sockets, open_sockets

NAME = "lab"
BACKEND = "staged"
"""What torch.distributed calls its collectives."""
Begun = list[list[str]]
_GROUP = "lab group"
"""Where the members of a group read its name."""
_initialized = True
"""As `torch.cuda._initialized`: else torch.utils.checkpoint would not keep the device's random numbers."""
SOURCE = Path(__file__).with_name("lab.cpp")


def build() -> Any:
    """The compiled half; about a minute the first time, into the folder that DeepSpeed's operators go to."""
    return cpp_extension.load(NAME, [str(SOURCE)], extra_cflags=["-O1", "-g0"], verbose=False)


@cache
def load() -> Any:
    """Make the device and its collectives known to torch; the compiled half."""
    compiled = build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    td.Backend.register_backend(BACKEND, partial(_staged, compiled), devices=[NAME])
    return compiled


def _staged(compiled: Any, store: td.Store, rank: int, size: int, timeout: timedelta) -> td.Backend:
    before = open_sockets()
    gloo = td.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if rank == 0:
        store.set(_GROUP, uuid4().hex[:8])
    return compiled.staged(gloo, new_sockets(before, open_sockets()), store.get(_GROUP).decode())


def begun() -> Begun:
    """The collectives of the device that this process has begun since the last call, by names that all members have.

    In order; those of one group call stand together.
    """
    found: Begun = load().begun()
    return found


# ---- the device -----------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    """Whether it was used."""
    return bool(load().is_used())


def _lazy_init() -> None:
    """Nothing is made before it is used."""


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had used the device: it cannot use it."""
    return bool(load().is_forked())


def _lazy_call(callback: Callable[[], Any]) -> None:
    callback()


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """ValueError: there is one."""
    index = device.index if isinstance(device, torch.device) else device
    if index not in (0, None):
        raise ValueError(f"there is one device of {NAME}, and no {index}")


def device(index: Any = 0) -> AbstractContextManager[None]:
    """As `torch.cuda.device`: a block in which a device is the present one."""
    set_device(index)
    return nullcontext()


def synchronize(device: Any = None) -> None:
    """Until all that is queued on all streams is done."""
    load().synchronize()


def break_down() -> None:
    """From here on all that is asked of the device raises, as after an illegal access to memory on a card."""
    load().break_down()


def waiting() -> int:
    """How many pieces of work are queued: for tests, as no card would say it."""
    return int(load().waiting())


def device_memory() -> Any:
    """How other processes read it."""
    from tests.device.sharing import LabMemory

    return LabMemory()


# ---- streams --------------------------------------------------------------------------------------------------------


class Stream:
    """As `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Any:
        return torch.Stream(f"{NAME}:0", priority=priority, **ids)


class Event:
    """As `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event(f"{NAME}:0", enable_timing=enable_timing)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """A block in which a stream is the present one; None changes nothing."""
    return nullcontext() if stream is None else stream


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=0, device_type=int(torch._C._autograd.DeviceType.PrivateUse1))


# ---- memory, in bytes -----------------------------------------------------------------------------------------------


def memory() -> dict[str, int]:
    """used, peak, allocations (how many there were), pinned (of the host's), capacity."""
    return dict(load().memory())


def memory_allocated(device: Any = None) -> int:
    return memory()["used"]


def max_memory_allocated(device: Any = None) -> int:
    return memory()["peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """The peak is what is used now."""
    load().reset_peak()


def set_capacity(nbytes: int) -> None:
    """What more than `nbytes` are asked for fails, as on a card that has no more."""
    load().set_capacity(nbytes)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """What is free, and all there is."""
    now = memory()
    return now["capacity"] - now["used"], now["capacity"]


def memory_stats(device: Any = None) -> dict[str, int]:
    """Under names of `torch.cuda.memory_stats`."""
    now = memory()
    return {
        "allocated_bytes.all.current": now["used"],
        "allocated_bytes.all.peak": now["peak"],
        "reserved_bytes.all.current": now["used"],
        "reserved_bytes.all.peak": now["peak"],
        "allocation.all.allocated": now["allocations"],
    }


def empty_cache() -> None:
    """It keeps nothing that is free."""


# ---- random numbers -------------------------------------------------------------------------------------------------


def default_generator() -> torch.Generator:
    generator: torch.Generator = load().default_generator()
    return generator


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def initial_seed() -> int:
    return default_generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generator().get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    default_generator().set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What `torch.autocast` may compute in."""
    return [torch.bfloat16, torch.float16]
