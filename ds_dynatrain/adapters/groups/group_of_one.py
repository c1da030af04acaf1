"""A group of one rank whose collectives copy inputs to outputs, on every device and with every version of torch.

torch's own group without peers (the `fake` back-end) leaves some outputs unwritten before torch 2.13, so ZeRO-3 on one
rank would train on uninitialized memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as td
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import GroupName

from ds_dynatrain.adapters.groups.device import HOST, devices
from ds_dynatrain.adapters.groups.managed_process_group import PythonGroup
from ds_dynatrain.adapters.versions.torch_versions import failing_backend, tested_torches

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")


class GroupOfOne(PythonGroup):
    """A group whose only member is this process. It has no connection, no thread and no file descriptor.

    It wraps no other group, so it needs no `ManagedProcessGroup`.

    Its collectives raise RuntimeError, before anything is written, if a tensor differs in type, size or device from the
    tensor to which it is copied, or if a list does not have exactly one tensor for the one rank. `send` and `recv`
    always raise.
    """

    def __init__(self, name: str) -> None:
        super().__init__(0, 1, td.ProcessGroup.BackendType.CUSTOM)
        backend = failing_backend(0, 1)  # calls that bypass the methods below must fail
        for device in devices():
            self._register_backend(device, td.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_group_name(GroupName(name))

    def collective(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Do what the collective means for one rank.

        Raises RuntimeError for a collective that this package does not know.
        """
        if name not in MEANINGS:
            raise _wrong(f"{name} of torch {torch.__version__} is not known (tested with torch {tested_torches()})")
        return MEANINGS[name](*arguments, **named)


class CompletedWork(Work):
    """The work handle of a collective of one rank.

    On a device, the collective is done when its stream reaches it. `wait` makes the current stream wait for the
    collective, and the host continues at once, as with torch's own collectives.
    """

    def __init__(self, outputs: Tensors = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._devices = list({tensor.device: None for tensor in self._outputs if tensor.device.type != HOST.type})
        self._event: Any = None
        if self._devices:
            self._event = get_accelerator().Event()
            self._event.record(get_accelerator().current_stream())

    def wait(self, *_: Any, **__: Any) -> bool:
        """Make the current stream wait for the collective. Return True."""
        if self._event is not None:
            get_accelerator().current_stream().wait_event(self._event)
        return True

    def synchronize(self) -> None:
        """Do what `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the device has completed the collective."""
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """Return True: wrong arguments raise in the call of the collective itself."""
        return True

    def exception(self) -> None:
        """Return None: a collective of one rank does not fail."""

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that already holds `result`."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[*self._devices])
        future.set_result(self._outputs)
        return future


def _keep(tensors: Tensors, opts: Any = None, *_: Any, **__: Any) -> Work:
    """Leave the tensors as they are: with one rank, they already are the sum and the values of all ranks."""
    _check(opts)
    return CompletedWork(tensors)


def _copy(
    outputs: Any, inputs: Any, opts: Any = None, *_: Any, to_ranks: bool = False, from_ranks: bool = False, **__: Any
) -> Work:
    """Copy each input to its output. All pairs are compared before the first output is written.

    outputs: a tensor, or a list of tensors.
    inputs: a tensor, or a list of tensors.
    to_ranks: whether `outputs` lists what each rank gets.
    from_ranks: whether `inputs` lists what each rank gives. (On the root of a `gather`, `outputs` has a list for each
        input, which amounts to the same with one rank.)
    """
    _check(opts)
    outputs, inputs = _only(outputs) if to_ranks else outputs, _only(inputs) if from_ranks else inputs
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    if len(outputs) != len(inputs):
        raise _wrong(f"{len(inputs)} input tensors for {len(outputs)} output tensors")
    for output, given in zip(outputs, inputs, strict=True):
        if (output.numel(), output.dtype, output.device) != (given.numel(), given.dtype, given.device):
            raise _wrong(f"output {_described(output)} for input {_described(given)}")
    # Hidden from autograd like a message: the output may be a view, and the input may require a gradient.
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(given.reshape(output.shape))
    return CompletedWork(outputs)


def _exchange_rows(
    output: torch.Tensor,
    given: torch.Tensor,
    output_sizes: Sequence[int] = (),
    input_sizes: Sequence[int] = (),
    *_: Any,
    **__: Any,
) -> Work:
    """Copy the rows of `given` to `output`.

    output_sizes: number of rows for each rank; () means all rows.
    input_sizes: number of rows from each rank; () means all rows.
    """
    for sizes, tensor in ((output_sizes, output), (input_sizes, given)):
        if sizes and list(sizes) != [tensor.shape[0]]:
            raise _wrong(f"split sizes {list(sizes)} for {tensor.shape[0]} rows and one rank")
    return _copy(output, given)


def _meet(*_: Any, **__: Any) -> Work:
    return CompletedWork()


def _meet_here(*_: Any, **__: Any) -> None:
    """Return at once, because all ranks are here."""


def _talk(*_: Any, **__: Any) -> Work:
    raise _wrong("there is no other rank to send to, or to receive from")


def _check(opts: Any) -> None:
    """Raise RuntimeError if the root is not the only rank, or if the operation would change the value of one rank."""
    root = getattr(opts, "rootRank", 0)
    if root != 0:
        raise _wrong(f"invalid root rank {root}")
    if getattr(opts, "reduceOp", None) == td.ReduceOp.PREMUL_SUM:
        raise _wrong("ReduceOp.PREMUL_SUM, which multiplies before it adds, is not supported")


def _only(of_ranks: Sequence[T]) -> T:
    if len(of_ranks) != 1:
        raise _wrong(f"a list of {len(of_ranks)}, where it takes one for each rank")
    return of_ranks[0]


def _described(tensor: torch.Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} ({tensor.dtype} on {tensor.device})"


def _wrong(what: str) -> RuntimeError:
    return RuntimeError(f"a collective of a group of one rank: {what}")


MEANINGS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), _keep),
    **dict.fromkeys(("_allgather_base", "all_gather_single", "gather_into_tensor", "gather_single"), _copy),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _copy),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"), _copy),
    **dict.fromkeys(("all_gather_single_coalesced", "reduce_scatter_single_coalesced"), _copy),
    **dict.fromkeys(("allgather", "allgather_coalesced", "gather"), partial(_copy, to_ranks=True)),
    **dict.fromkeys(("scatter", "reduce_scatter", "alltoall"), partial(_copy, to_ranks=True, from_ranks=True)),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _exchange_rows),
    **dict.fromkeys(("barrier", "_start_coalescing", "_end_coalescing"), _meet),
    "monitored_barrier": _meet_here,
    **dict.fromkeys(("send", "recv", "recv_anysource"), _talk),
}
"""A map from the name of each `ProcessGroup` method, in any version of torch, to its function for one rank."""
