"""Build a DeepSpeed optimizer without its memory and without its messages.

DeepSpeed's constructors allocate, fill and broadcast whole models. In a switch the memory exists already (allocated and
touched while training went on) and every byte is moved by the plan, so the constructors run *without memory*: large
tensors are reserved but never written, collectives do nothing, and the basic optimizer takes no step. The adapter puts
the real buffers in afterwards; the census checks that none was missed.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed.comm.comm as ds_comm
import numpy as np
import torch
from deepspeed.runtime import bf16_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.adapters.versions import collector

LARGE = 1 << 14
"""Tensors of this many elements and more are not written while building."""

_aten = torch.ops.aten
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_IN_PLACE = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}
_FRESH = {_aten.full.default, _aten.cat.default, _aten.clone.default, _aten._to_copy.default}
_NO_ALLOC = frozenset(_ZEROS | _IN_PLACE | _FRESH)


class NoAllocMode(TorchDispatchMode):
    """Large fresh tensors are reserved, not written; large copies into existing ones are skipped.

    Zeros stay zeros (memory that the operating system hands out zeroed). Small tensors behave as always.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _NO_ALLOC:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        if func in _IN_PLACE and args[0].numel() >= LARGE and args[0].device.type == "cpu":
            return args[0]
        if func in _ZEROS:
            shape = args[0].shape if func is _aten.zeros_like.default else args[-1]
            if int(np.prod(shape)) >= LARGE:
                return _zeros(tuple(shape), func, args, kwargs)
        if func is _aten.full.default and args[1] == 0 and int(np.prod(args[0])) >= LARGE:
            return _zeros(tuple(args[0]), _aten.zeros.default, args, kwargs)
        if func is _aten.cat.default:
            total = sum(part.numel() for part in args[0])
            if total >= LARGE and all(part.dim() == 1 for part in args[0]):
                return args[0][0].new_empty(total)
        if func in (_aten.clone.default, _aten._to_copy.default) and args[0].numel() >= LARGE:
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.empty(args[0].shape, dtype=dtype, device=kwargs.get("device") or args[0].device)
        return func(*args, **kwargs)


def _zeros(shape: tuple[int, ...], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    like = args[0] if func is not _aten.zeros.default else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    area = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize)  # an allocator may zero memory that it has had before
    return torch.frombuffer(area, dtype=dtype).view(shape)


class _Done:
    """The handle of a collective that had nothing to do."""

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        """Always."""
        return True


class _SilentBackend:
    """DeepSpeed's communication backend with every collective taken out; questions of rank and size still answer."""

    _SILENT = frozenset(
        {
            "barrier",
            "broadcast",
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_coalesced",
            "all_reduce",
            "reduce",
            "reduce_scatter_tensor",
            "all_to_all_single",
        }
    )

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name in self._SILENT:
            return lambda *_, **__: _Done()
        return getattr(self._backend, name)


@contextmanager
def silent_communication() -> Iterator[None]:
    """DeepSpeed's collectives do nothing inside the block."""
    with replaced(ds_comm, "cdb", _SilentBackend(ds_comm.cdb)):
        yield


class _NoCollection:
    """Stands in for the `gc` module where DeepSpeed looks it up."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: 0) if name == "collect" else getattr(gc, name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Constructors do not collect garbage inside the block: that takes 0.2 to 0.5 s of a large process.

    ZeRO-3's does so itself, BF16_Optimizer's wherever it reports its memory.
    """
    with replaced(collector(), "gc", _NoCollection()), replaced(bf16_optimizer, "see_memory_usage", _nothing):
        yield


@contextmanager
def no_alloc(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """All of the above: for building one ZeRO optimizer around `optimizer`.

    It takes no step (FP16_UnfusedOptimizer's constructor steps on zeros). Tensors print as one word: ZeRO-3's formats
    all of its arguments, every parameter among them, for a message that is then not shown, which takes 0.1 s and more.
    """
    with ExitStack() as stack:
        stack.enter_context(no_collection())
        stack.enter_context(replaced(torch.Tensor, "__repr__", lambda self, **_: "tensor"))
        stack.enter_context(silent_communication())
        stack.enter_context(replaced(optimizer, "step", _nothing))
        stack.enter_context(NoAllocMode())  # type: ignore[no-untyped-call]
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Whatever is asked for, it is not done."""
