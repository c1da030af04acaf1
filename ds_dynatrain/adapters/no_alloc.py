"""Build a DeepSpeed optimizer without its memory and without its messages.

DeepSpeed's constructors allocate, fill and broadcast whole models. In a switch the memory exists already (allocated and
touched while training went on) and every byte is moved by the plan, so the constructors run *without memory*: large
tensors are reserved but never written, collectives do nothing, and the basic optimizer takes no step. The adapter puts
the real buffers in afterwards; the census checks that none was missed.
"""

from __future__ import annotations

import gc
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed.comm.comm as ds_comm
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero.partition_parameters import Init
from torch.utils._python_dispatch import TorchDispatchMode

from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.adapters.versions import collector

LARGE = 1 << 14
"""Number of elements from which on tensors are not written while building."""

_aten = torch.ops.aten
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_IN_PLACE = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}
_FRESH = {_aten.full.default, _aten.cat.default, _aten.clone.default, _aten._to_copy.default}
_EMPTY = _aten.empty.memory_format
_NO_ALLOC = frozenset(_ZEROS | _IN_PLACE | _FRESH)


class NoAllocMode(TorchDispatchMode):
    """A mode in which large new tensors are reserved but not written, and large copies into existing ones are skipped.

    On the host zeros stay zeros (the operating system hands out zeroed memory). A device has no memory that is reserved
    only, so a large tensor there is a stand-in: one element with the full shape. This also holds for a part that ZeRO-3
    cuts from a parameter. A stand-in that is never replaced would be written to in training, which torch refuses.
    keeps_zeros: whether the optimizer keeps tensors that it makes of zeros; these are real then. Small tensors behave
    as always.
    """

    def __init__(self, keeps_zeros: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps_zeros = keeps_zeros
        self._cuts = False

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Note that a parameter is cut inside the block: an empty tensor made on a device is then its part, and a
        stand-in.
        """
        self._cuts = True
        try:
            yield
        finally:
            self._cuts = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_PLACE:
            is_skipped = args[0].numel() >= LARGE or is_stand_in(args[0])
            return args[0] if is_skipped else func(*args, **kwargs)
        if func is _aten.view.dtype and is_stand_in(args[0]):  # which torch refuses: its one element is of its type
            *rows, last = args[0].shape
            return stand_in((*rows, last * args[0].element_size() // args[1].itemsize), args[1], args[0].device)
        if func is _EMPTY and self._cuts:
            part = _outline(func, args, kwargs)
            if part is not None and part.numel >= LARGE and part.device.type not in ("cpu", "meta"):
                return stand_in(part.shape, part.dtype, part.device)
        if func not in _NO_ALLOC:
            return func(*args, **kwargs)
        made = _outline(func, args, kwargs)
        if made is None or made.numel < LARGE or made.device.type == "meta":
            return func(*args, **kwargs)
        is_zero = func in _ZEROS or func is _aten.full.default
        if made.device.type == "cpu":
            return _zeros(made) if is_zero else torch.empty(made.shape, dtype=made.dtype)
        return func(*args, **kwargs) if is_zero and self.keeps_zeros else stand_in(made.shape, made.dtype, made.device)


@dataclass(frozen=True)
class _Outline:
    """Shape, type and device of the tensor that a call would make."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _outline(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outline | None:
    """Return the outline of the result of a call of one of `_NO_ALLOC` or `empty`.

    None for calls that are let through: a fill with a value other than zero, or a concatenation of more than one
    dimension.
    """
    if func is _aten.full.default:
        if args[1] != 0:
            return None
        like, shape = None, args[0]
    elif func is _aten.cat.default:
        if any(part.dim() != 1 for part in args[0]):
            return None
        like, shape = args[0][0], (sum(part.numel() for part in args[0]),)
    elif func in (_aten.zeros.default, _EMPTY):
        like, shape = None, args[0]
    else:
        like, shape = args[0], args[1] if func is _aten.new_zeros.default else args[0].shape
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = kwargs.get("device") or ("cpu" if like is None else like.device)
    return _Outline(tuple(shape), dtype, torch.device(device))


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of one element with the full shape, which can be cut and described but must not be read."""
    return torch.empty(1, dtype=dtype, device=device).expand(tuple(shape))


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has less memory than elements."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _zeros(made: _Outline) -> torch.Tensor:
    area = mmap.mmap(-1, made.numel * made.dtype.itemsize)  # an allocator may zero memory that it has had before
    return torch.frombuffer(area, dtype=made.dtype).view(made.shape)


class _Done:
    """The handle of a collective that had nothing to do."""

    def wait(self, *_: Any) -> None:
        """Return at once: the work was never begun."""

    def is_completed(self) -> bool:
        """Return True: no work was begun."""
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
    """Make DeepSpeed's collectives do nothing inside the block."""
    with replaced(ds_comm, "cdb", _SilentBackend(ds_comm.cdb)):
        yield


class _NoCollection:
    """Substitute for the `gc` module where DeepSpeed looks it up."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: 0) if name == "collect" else getattr(gc, name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep constructors from collecting garbage inside the block, which takes 0.2 to 0.5 s in a large process.

    ZeRO-3's constructor collects by itself, BF16_Optimizer's does wherever it reports its memory.
    """
    with replaced(collector(), "gc", _NoCollection()), replaced(bf16_optimizer, "see_memory_usage", _nothing):
        yield


@contextmanager
def no_alloc(optimizer: torch.optim.Optimizer, keeps_zeros: bool = True) -> Iterator[None]:
    """Build one ZeRO optimizer around `optimizer` inside the block without memory, messages or garbage collection.

    keeps_zeros: as `NoAllocMode`. The optimizer takes no step (FP16_UnfusedOptimizer's constructor steps on zeros).
    Tensors print as one word: ZeRO-3's constructor formats all of its arguments, every parameter among them, for a
    message that is then not shown, which takes 0.1 s and more.
    """
    mode, cut = NoAllocMode(keeps_zeros), Init._partition_param

    def partition(*given: Any, **named: Any) -> Any:
        with mode.cutting():
            return cut(*given, **named)

    with ExitStack() as stack:
        stack.enter_context(no_collection())
        stack.enter_context(replaced(torch.Tensor, "__repr__", lambda self, **_: "tensor"))
        stack.enter_context(silent_communication())
        stack.enter_context(replaced(optimizer, "step", _nothing))
        stack.enter_context(replaced(Init, "_partition_param", partition))
        stack.enter_context(mode)
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Accept any arguments and do nothing."""
