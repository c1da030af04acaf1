"""Process groups made the way `torch.distributed` makes them, but without its global state.

A group can be made in any thread, and is unknown to `torch.distributed` until `register` is called. Call `register` and
`unregister` on the main thread.

A group of one rank copies inputs to outputs, on every device and with every version of torch. torch's own group without
peers (the `fake` back-end) leaves some outputs unwritten before torch 2.13, so ZeRO-3 on one rank would train on
uninitialized memory.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as td
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, Store, Work, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_dynatrain.adapters.groups.communicators import Endpoint, make_backend
from ds_dynatrain.adapters.groups.device import HOST, device_backend, devices, start_thread
from ds_dynatrain.adapters.groups.managed_process_group import MESSAGES, PythonGroup
from ds_dynatrain.adapters.versions.torch_versions import (
    failing_backend,
    fake_backend,
    register_in_world,
    tested_torches,
)
from ds_dynatrain.descriptors import check_descriptors

Made = tuple[td.ProcessGroup, Store]
"""A process group, and the store over which it was made."""


OURS = "dynatrain_"


def make_group(store: Store, name: str, rank: int, size: int, seconds: float) -> Made:
    """Make a gloo group over `store`, not yet known to `torch.distributed`. Blocks until all `size` ranks have joined.

    seconds: timeout for joining. Collectives have the timeout that they have in any DeepSpeed job, because a member
        may be delayed by an evaluation or by another member's request.

    This does what `init_process_group` does for one back-end, but without its global state, so it can run in a thread.
    torch 2.14 and newer can also replace the members of an existing group. That takes several times as long, because it
    closes the old connections first; see docs/figures/jobs.md. Every rank connects to every other rank at once. With
    gloo's lazy connections (TORCH_GLOO_LAZY_INIT) a rank would connect only to those that it uses. If such a peer has
    died, a collective raises only after five times the time-out; over an open connection it raises at once (measured on
    torch 2.13).

    Raises LayoutError if this process may not open enough files.
    """
    check_descriptors(name, size)
    prefix = PrefixStore(f"{name}/", store)
    timeout = datetime.timedelta(seconds=seconds)
    backend = td.ProcessGroupGloo(PrefixStore("cpu/", prefix), rank, size, timeout=timeout)
    backend._set_default_timeout(default_pg_timeout)
    return _group_over({HOST: backend}, td.ProcessGroup.BackendType.GLOO, prefix, name, rank, size), prefix


def join_programs(store: Store, name: str, rank: int, size: int, device: torch.device, seconds: float) -> Any:
    """Return a group that connects this process with processes of other programs, which make it by `torch.distributed`.

    device: the device of the tensors. gloo serves the CPU. The library of an accelerator connects at the first
        collective, as it does in the other programs.
    seconds: the timeout for joining; see `make_group`.
    """
    if device.type == HOST.type:
        return make_group(store, name, rank, size, seconds)[0]
    prefix = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", store))
    return make_backend(device_backend(), prefix, Endpoint(name, range(size), rank, prefix))[1]


def serve_host(group: td.ProcessGroup, store: Store, seconds: float) -> None:
    """Give a group that was made by other code a gloo back-end for the CPU, if it has none.

    All ranks of the group must call this. Stock `deepspeed.init_distributed` makes a group with NCCL alone.

    seconds: the timeout for joining; see `make_group`.
    """
    if HOST in group._device_types:
        return
    name, made = group.group_name, make_group(store, f"{OURS}host", group.rank(), group.size(), seconds)[0]
    group._register_backend(HOST, td.ProcessGroup.BackendType.GLOO, made._get_backend(HOST))
    group._set_group_name(GroupName(name))  # torch may read the name from the new back-end


def make_fake_group(name: str, rank: int, size: int) -> Made:
    """Make a group without peers. It has no connection, no thread and no file descriptor.

    With one rank, its collectives do what those of a real group would do. With more ranks (torch's `fake` back-end),
    its collectives return at once without results.
    """
    if size == 1:
        return GroupOfOne(name), HashStore()
    store, kind = FakeStore(), td.ProcessGroup.BackendType.CUSTOM
    backend = fake_backend(rank, size)
    return _group_over(dict.fromkeys(devices(), backend), kind, store, name, rank, size), store


def _group_over(
    backends: Mapping[torch.device, Backend],
    kind: td.ProcessGroup.BackendType,
    store: Store,
    name: str,
    rank: int,
    size: int,
) -> td.ProcessGroup:
    group = td.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    for device, backend in backends.items():
        group._register_backend(device, kind, backend)
    group._set_group_name(GroupName(name))
    return group


def register(group: td.ProcessGroup, store: Store, ranks: Sequence[int]) -> None:
    """Make a group known to `torch.distributed`, or update the ranks of a known group.

    ranks: the group's ranks in the world, in the group's order.
    """
    mapping = {rank: place for place, rank in enumerate(ranks)}
    if group in c10d._world.pg_map:
        c10d._world.pg_group_ranks[group] = mapping
        return
    names = {HOST.type: "fake" if group.name() == "custom" else "gloo"}
    for device in group._device_types:
        names.setdefault(device.type, names[HOST.type] if group.bound_device_id is None else device_backend())
    backends = ",".join(f"{device}:{name}" for device, name in names.items())
    backend = backends if len({*names.values()}) > 1 else names[HOST.type]
    register_in_world()(group, backend, store, group.group_name, backends, rank_mapping=mapping)


def is_ours(group: td.ProcessGroup | None) -> bool:
    """Return whether this package made a group. Its groups have a common prefix in their names."""
    return group is not None and str(group.group_name).startswith(OURS)


def is_known(group: td.ProcessGroup | None) -> bool:
    """Return whether `torch.distributed` still knows a group, which a script may have destroyed."""
    return group in c10d._world.pg_map


def unregister(group: td.ProcessGroup) -> None:
    """Make `torch.distributed` forget a group. Does nothing for an unknown group."""
    world = c10d._world
    if group in world.pg_map:
        _unregister_process_group(group.group_name)
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag, world.pg_backend_config):
        table.pop(group, None)
    for tag, tagged in list(world.tags_to_pg.items()):
        world.tags_to_pg[tag] = [other for other in tagged if other is not group]
        if not world.tags_to_pg[tag]:
            del world.tags_to_pg[tag]


def tear_down(groups: list[td.ProcessGroup], first: Callable[[], None] | None = None) -> threading.Thread:
    """Shut groups down in a thread, and return the thread. Join the thread before the process ends.

    groups: a list that must hold the last references to the groups; it is emptied.
    first: called in the thread before the groups are shut down.

    Gloo takes 20 to 40 ms to shut a group down, and longer if a peer is gone. Afterwards the thread returns to the
    operating system the memory that the groups' threads have freed; glibc would otherwise keep it in growing per-thread
    arenas.
    """

    def take_down() -> None:
        try:
            if first is not None:
                first()
        finally:
            groups.clear()
            if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)

    return start_thread(take_down, "dynatrain-teardown")


# ---- a group of one rank -----------------------------------------------------------------------------------------


class GroupOfOne(PythonGroup):
    """A group whose only member is this process. It has no connection, no thread and no file descriptor.

    It wraps no other group, so it needs no `ManagedProcessGroup`. Its collectives raise RuntimeError, before anything
    is written, if a tensor differs in type, size or device from the tensor to which it is copied, or if a list does not
    have exactly one tensor for the one rank. `send` and `recv` always raise.
    """

    def __init__(self, name: str) -> None:
        super().__init__(0, 1, td.ProcessGroup.BackendType.CUSTOM)
        backend = failing_backend(0, 1)  # makes calls that bypass the methods below fail
        for device in devices():
            self._register_backend(device, td.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_group_name(GroupName(name))

    def collective(self, name: str, *arguments: Any, **named: Any) -> Work:
        """Copy each input to its output. An in-place argument already has its final value.

        All pairs of input and output are compared before the first output is written.
        """
        if name in MESSAGES:
            raise _wrong("there is no other rank to send to, or to receive from")
        if name not in KNOWN:
            raise _wrong(f"{name} of torch {torch.__version__} is not known (tested with torch {tested_torches()})")
        for options in (*arguments, *named.values()):
            if getattr(options, "rootRank", 0) != 0:
                raise _wrong(f"invalid root rank {options.rootRank}")
            if getattr(options, "reduceOp", None) == td.ReduceOp.PREMUL_SUM:
                raise _wrong("ReduceOp.PREMUL_SUM, which multiplies before it adds, is not supported")
        outputs, inputs = [*filter(None, map(_tensors, arguments)), [], []][:2]
        pairs = list(zip(outputs, inputs, strict=False)) if inputs else []
        for sizes, tensors in zip(arguments[2:4], (outputs, inputs), strict=False):
            if isinstance(sizes, list | tuple) and sizes and [*sizes] != [tensors[0].shape[0]]:
                raise _wrong(f"split sizes {[*sizes]} for {tensors[0].shape[0]} rows and one rank")
        if inputs and (len(outputs) != len(inputs) or (name == "alltoall" and len(outputs) > 1)):
            raise _wrong(f"{len(inputs)} input tensors for {len(outputs)} output tensors")
        for output, given in pairs:
            if (output.numel(), output.dtype, output.device) != (given.numel(), given.dtype, given.device):
                raise _wrong(f"output {_described(output)} for input {_described(given)}")
        # Hidden from autograd like a message: the output may be a view, and the input may require a gradient.
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for output, given in pairs:
                output.copy_(given.reshape(output.shape))
        return CompletedWork(outputs)


class CompletedWork(Work):
    """The work handle of a collective of one rank.

    On a device, the collective is done when its stream has executed it. `wait` makes the current stream wait for it
    while the host continues, as with torch's own collectives.
    """

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._devices = list({tensor.device: None for tensor in self._outputs if tensor.device.type != HOST.type})
        self._event: Any = None
        if self._devices:
            self._event = get_accelerator().Event()
            self._event.record(get_accelerator().current_stream())

    def wait(self, *_: Any, **__: Any) -> bool:
        """Make the current stream wait for the collective. Always returns True."""
        if self._event is not None:
            get_accelerator().current_stream().wait_event(self._event)
        return True

    def synchronize(self) -> None:
        """Make the current stream wait for the collective, like `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the device has completed the collective, which copies inputs to outputs."""
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """Return True, because wrong arguments already raise when the collective is called."""
        return True

    def exception(self) -> None:
        """Return None, because a collective of one rank does not fail after it was called."""

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that already has the output tensors as its result."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[*self._devices])
        future.set_result(self._outputs)
        return future


def _tensors(argument: Any) -> list[torch.Tensor]:
    """Return the tensors of a collective's argument: a tensor, a list of tensors, or a list of lists, one per rank."""
    if isinstance(argument, list | tuple):
        return [tensor for each in argument for tensor in _tensors(each)]
    return [argument] if isinstance(argument, torch.Tensor) else []


def _described(tensor: torch.Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} ({tensor.dtype} on {tensor.device})"


def _wrong(what: str) -> RuntimeError:
    return RuntimeError(f"a collective of a group of one rank: {what}")


KNOWN = frozenset(
    """
    allreduce allreduce_coalesced broadcast reduce _allgather_base all_gather_single gather_into_tensor gather_single
    _reduce_scatter_base reduce_scatter_single allgather_into_tensor_coalesced reduce_scatter_tensor_coalesced
    all_gather_single_coalesced reduce_scatter_single_coalesced allgather allgather_coalesced gather scatter
    reduce_scatter alltoall alltoall_base all_to_all_single barrier monitored_barrier _start_coalescing _end_coalescing
    """.split()
)
"""Names of the methods of `ProcessGroup`, in any version of torch, that a group of one rank carries out."""
