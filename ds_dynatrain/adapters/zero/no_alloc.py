"""Building a DeepSpeed optimizer without allocating its memory and without sending its messages.

DeepSpeed's constructors allocate, fill and broadcast whole models. In a switch the memory already exists (it was
allocated and touched during training), and the plan moves every byte, so the constructors run *without storage*: large
tensors are reserved but never written, collectives do nothing, and the basic optimizer takes no step. Afterwards the
adapter puts the real buffers in, and the census checks that none was missed.
"""

from __future__ import annotations

import copy
import gc
import importlib
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import deepspeed.comm.comm as ds_comm
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero.partition_parameters import Init
from torch.utils._python_dispatch import TorchDispatchMode

from ds_dynatrain.adapters.groups.process_groups import CompletedWork
from ds_dynatrain.adapters.versions.deepspeed_versions import present
from ds_dynatrain.adapters.versions.replaced import replaced

LARGE = 1 << 14
"""Smallest number of elements of a tensor that is left unwritten while an optimizer is built."""

_aten = torch.ops.aten
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_IN_PLACE = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}
_FRESH = {_aten.full.default, _aten.cat.default, _aten.clone.default, _aten._to_copy.default}
_EMPTY = _aten.empty.memory_format
_NO_ALLOC = frozenset(_ZEROS | _IN_PLACE | _FRESH)


class NoAllocMode(TorchDispatchMode):
    """A mode in which large new tensors are reserved but not written, and large copies into existing ones are skipped.

    Zeros on the host are still zeros, because the operating system hands out zeroed memory. A device cannot reserve
    memory without allocating it, so a large tensor on a device is a stand-in: one element with the full shape. The part
    that ZeRO-3 cuts from a parameter is also a stand-in. If a stand-in is never replaced, training fails, because torch
    refuses to write to it. Small tensors behave as always.

    keeps_zeros: whether the optimizer keeps the tensors of zeros that it makes. On a device these are then allocated.
    cuts: whether ZeRO-3 is cutting a parameter; large empty tensors on a device are then stand-ins.
    """

    keeps_zeros, cuts = True, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_PLACE:
            is_skipped = args[0].numel() >= LARGE or is_stand_in(args[0])
            return args[0] if is_skipped else func(*args, **kwargs)
        if func is _aten.view.dtype and is_stand_in(args[0]):  # torch cannot view one element as another type
            *rows, last = args[0].shape
            return stand_in((*rows, last * args[0].element_size() // args[1].itemsize), args[1], args[0].device)
        is_part = func is _EMPTY and self.cuts
        made = _outline(func, args, kwargs) if is_part or func in _NO_ALLOC else None
        if made is None or math.prod(made[0]) < LARGE or made[2].type == "meta":
            return func(*args, **kwargs)
        shape, dtype, device = made
        is_zero = func in _ZEROS or func is _aten.full.default
        if device.type != "cpu":
            return func(*args, **kwargs) if is_zero and self.keeps_zeros else stand_in(shape, dtype, device)
        if is_zero:  # reused memory would have to be overwritten
            return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
        return func(*args, **kwargs) if is_part else torch.empty(shape, dtype=dtype)


def _outline(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    """Return the shape, type and device of the result of a call of `empty` or of a function in `_NO_ALLOC`.

    Returns None for calls that run as usual: a fill with a value other than zero, and a concatenation of tensors that
    do not all have one dimension.
    """
    like, shape = None, args[0]
    if func is _aten.full.default:
        if args[1] != 0:
            return None
    elif func is _aten.cat.default:
        if {*map(torch.Tensor.dim, args[0])} != {1}:
            return None
        like, shape = args[0][0], (sum(map(torch.Tensor.numel, args[0])),)
    elif func not in (_aten.zeros.default, _EMPTY):
        like, shape = args[0], args[1] if func is _aten.new_zeros.default else args[0].shape
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = kwargs.get("device") or ("cpu" if like is None else like.device)
    return tuple(shape), dtype, torch.device(device)


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of one element with the given shape. It can be cut and described but must not be read."""
    return torch.empty(1, dtype=dtype, device=device).expand(tuple(shape))


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a stand-in, which has too little memory for its elements."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


_COLLECTIVES = """
    barrier broadcast all_gather all_gather_into_tensor all_gather_coalesced all_reduce reduce reduce_scatter_tensor
    all_to_all_single
""".split()
"""Methods of DeepSpeed's communication back-end that send messages. Methods that return ranks and sizes still work."""


@contextmanager
def silent_communication() -> Iterator[None]:
    """Context manager in which DeepSpeed's collectives do nothing."""
    silent = SimpleNamespace() if ds_comm.cdb is None else copy.copy(ds_comm.cdb)
    vars(silent).update(dict.fromkeys(_COLLECTIVES, lambda *_, **__: CompletedWork()))
    with replaced(ds_comm, cdb=silent):
        yield


@contextmanager
def no_alloc(optimizer: torch.optim.Optimizer, keeps_zeros: bool = True) -> Iterator[None]:
    """Context manager in which one ZeRO optimizer is built without storage, messages or garbage collection.

    The basic optimizer, `optimizer`, takes no step (FP16_UnfusedOptimizer's constructor steps on zeros). Garbage
    collection would take 0.2 to 0.5 s in a large process: ZeRO-3's constructor collects explicitly, and
    BF16_Optimizer's whenever it reports its memory. Tensors are printed as one word: ZeRO-3's constructor formats all
    of its arguments, including every parameter, for a message that is not shown, which would take 0.1 s or more.

    keeps_zeros: see `NoAllocMode`.
    """
    mode = NoAllocMode()  # type: ignore[no-untyped-call]
    mode.keeps_zeros = keeps_zeros
    cut, collector = Init._partition_param, importlib.import_module(present().collector)

    def partition(*given: Any, **named: Any) -> Any:
        with replaced(mode, cuts=True):
            return cut(*given, **named)

    with (
        replaced(collector, gc=SimpleNamespace(**{**vars(gc), "collect": lambda *_: 0})),
        replaced(bf16_optimizer, see_memory_usage=_nothing),
        replaced(torch.Tensor, __repr__=lambda self, **_: "tensor"),
        silent_communication(),
        replaced(optimizer, step=_nothing),
        replaced(Init, _partition_param=partition),
        mode,
    ):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Accept any arguments and do nothing."""
