"""Communicators: back-ends of process groups, from the accelerator's own library. The CPU uses gloo instead.

A communicator is expensive (about a second and half a GiB with NCCL), so all groups with the same members in the same
order share one, and successive worlds reuse it as long as these members stay. Making a communicator while collectives
are running may deadlock (NVIDIA/nccl#1082), so call `World.connect` only while no member runs a collective.
`CommunicatorLink` moves state between devices during a switch: it makes many `send` and `recv` calls in one of NCCL's
group calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as distributed_c
import torch.distributed as td
from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, Store, _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters.groups.device import (
    compute_device,
    device_backend,
    is_accelerated,
    on_device,
    synchronize,
)
from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.transfer.batched import Message
from ds_dynatrain.transfer.transport import call_beside

NCCL = "nccl"
ABORTING = (NCCL,)
"""Back-ends whose `abort` is known to release a rank that waits for a dead peer."""
GROUPING = (NCCL,)
"""Back-ends that are known to send and receive in group calls."""
OLDEST_NCCL = (2, 26, 2)
"""Oldest version of NCCL that sends and receives reliably in group calls."""
BUILT_IN = {NCCL: "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}
"""Back-ends that torch itself provides if it was built with them. Other back-ends register with torch."""
Kind = td.ProcessGroup.BackendType
Stop = Callable[[], None]
"""Function that is called repeatedly during a wait; it may raise."""
LOOK_SECONDS = 0.05
"""Seconds between two checks for failures of other members during a wait."""
END_SECONDS = 5.0
"""Longest time, in seconds, to wait until aborted messages have ended."""
SPARE_SECONDS = 5.0
"""Seconds by which a library's own timeout exceeds ours, so that our error, which names members, comes first."""


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL that this process has loaded, which may differ from the one torch was built with."""
    try:
        library, found = ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW), ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):  # NCCL is linked into torch's own library
        return torch.cuda.nccl.version()  # type: ignore[no-any-return]
    return found.value // 10000, found.value // 100 % 100, found.value % 100


def unfinished() -> str:
    """Return a description of the first unfinished NCCL collective in torch's flight recorder; "" if there is none."""
    dump = getattr(distributed_c, "_dump_nccl_trace_json", None)
    try:
        entries = [] if dump is None else json.loads(dump(True, True)).get("entries", [])
    except (RuntimeError, ValueError):  # the device may be lost; the log goes without it
        return ""
    for entry in entries[:1]:
        group = " ".join(map(str, entry.get("process_group", [])))
        return f"{entry.get('profiling_name')} {entry.get('collective_seq_id')} of group {group}, {entry.get('state')}"
    return ""


def go_on() -> None:
    """Do nothing. Default for the `stop` callback of waits that cannot be cancelled."""


@dataclass(frozen=True)
class Connections:
    """Result of `World.connect` on one member.

    built: the number of communicators that were made.
    kept: the number of communicators that were kept from the previous world.
    milliseconds: the time that the call took.
    is_ahead: whether the communicators were connected before the pause of the switch.
    """

    built: int = 0
    kept: int = 0
    milliseconds: float = 0.0
    is_ahead: bool = False


@dataclass(eq=False)
class Communicator:
    """A back-end of process groups that connects some members, in a fixed order, on one device.

    device: the device of the tensors that it sends.
    kind: torch's name for the back-end.
    backend: torch's back-end object.
    users: the number of worlds that use the communicator: two while the next world is taking it over.
    since: the time at which the communicator was made. If several members share two communicators, all of them made the
        two in the same order.
    ending: a lock for ending the communicator only once: the first caller, in any thread, acquires it and never
        releases it.
    """

    device: torch.device
    kind: td.ProcessGroup.BackendType
    backend: Backend
    users: int = 0
    since: int = field(default_factory=time.monotonic_ns)
    ending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_ended(self) -> bool:
        """Whether a thread has ended the communicator, or is doing so."""
        return self.ending.locked()

    def serve(self, group: td.ProcessGroup) -> None:
        """Make a group with the same members send the device's tensors through this communicator."""
        group.bound_device_id = self.device  # before registration, which tells the back-end
        group._register_backend(self.device, self.kind, self.backend)


def ends_with_its_members() -> bool:
    """Return whether aborting the accelerator's collectives releases a rank that waits for a dead peer."""
    return device_backend() in ABORTING


def can_send_between_devices() -> bool:
    """Return whether the accelerator's communication library is known to send and receive in group calls."""
    return is_accelerated() and device_backend() in GROUPING


def is_watched() -> bool:
    """Return whether torch has a watchdog over the accelerator's collectives."""
    return is_accelerated() and device_backend() == NCCL


def end(communicators: Sequence[Communicator], is_broken: bool = False) -> None:
    """End communicators. All members must call this function. Communicators that have already ended are skipped.

    is_broken: whether to abort them, because a member is gone, a member may lack one of them, or a collective has
        failed. Communicators may wait for each other if they are aborted one by one (pytorch/pytorch#119797). As in
        torch, they are therefore aborted from the last one to the first, and those of NCCL inside one group call.
    """
    ordered = sorted(communicators, key=lambda each: each.since)
    living = [each for each in ordered if each.ending.acquire(blocking=False)]
    if not is_broken:
        for each in living:
            each.backend.shutdown()
        return
    backends: list[Any] = [each.backend for each in reversed(living)]
    grouping = next((each for each in reversed(backends) if hasattr(each, "_group_start")), None)
    if grouping is not None:
        grouping._group_start()
    try:
        for each in backends:
            each.abort()
    finally:
        if grouping is not None:
            grouping._group_end()


@dataclass(frozen=True)
class Endpoint:
    """Inputs for making a communicator.

    name: the name of the group.
    ranks: the ranks to connect.
    place: the index of this process in `ranks`.
    store: the key-value store over which the ranks exchange addresses.
    """

    name: str
    ranks: Sequence[int]
    place: int
    store: Store


def make_communicator(where: Endpoint, seconds: float, stop: Stop = go_on) -> Communicator:
    """Make a communicator, and connect it if its library can connect before use. All of its members must call this.

    seconds: timeout for connecting. Collectives have the timeout that they have in any DeepSpeed job.
    stop: callback that is called repeatedly while this call waits; it may raise.

    Raises RuntimeError if torch does not know the accelerator's back-end, or if the communicator cannot be connected
    within `seconds`; the communicator is then aborted.

    A library may wait for a peer forever, so the connection is made in a separate thread. After a timeout that thread
    is left behind, and if it still makes a communicator, the communicator is aborted.
    """
    found = call_beside(on_device(partial(_connected, where, seconds + SPARE_SECONDS)), "dynatrain-connect")
    end_at = time.monotonic() + seconds
    try:
        while not wait([found], LOOK_SECONDS).done:
            stop()
            if time.monotonic() > end_at and not found.done():
                raise RuntimeError(
                    f"{device_backend()} has not connected ranks {list(where.ranks)} of {where.name} within "
                    f"{seconds:g} s; {_missing(where)}"
                )
        return found.result()
    except BaseException:
        found.add_done_callback(lambda made: None if made.exception() else end([made.result()], is_broken=True))
        raise


def _missing(where: Endpoint) -> str:
    """Describe the members that have not begun to connect or, if all have, those that have not finished."""
    for step in ("begun", "done"):
        absent = [rank for place, rank in enumerate(where.ranks) if not where.store.check([f"{step}/{place}"])]
        if absent:
            return f"not {step}: {absent}"
    return "all of them are through by now"


def _connected(where: Endpoint, seconds: float) -> Communicator:
    device, name = compute_device(), device_backend()
    own: Any = where.store
    base = own.clone()
    store = PrefixStore(f"{name}/", base)
    store.set_timeout(timedelta(seconds=seconds))
    base.set(f"begun/{where.place}", "")
    made = Communicator(device, *make_backend(name, store, where))
    try:
        if made.backend.supports_splitting:  # as in torch: the back-end can connect before use
            made.backend.eager_connect_single_device(device)
    except BaseException:
        end([made], is_broken=True)
        raise
    base.set(f"done/{where.place}", "")
    return made


def make_backend(name: str, store: Store, where: Endpoint) -> tuple[Kind, Any]:
    """Make a back-end for one device the way `torch.distributed` does, without touching torch's global state."""
    built_in: Any = getattr(c10d, BUILT_IN.get(name, ""), None)
    options: Any = _DistributedBackendOptions() if built_in is None else built_in.Options()
    options.global_ranks_in_group, size = list(where.ranks), len(where.ranks)
    if built_in is not None:
        options._timeout, options.group_name = default_pg_timeout, where.name
        return getattr(Kind, name.upper()), built_in(store, where.place, size, options)
    plugin = td.Backend._plugins.get(name.upper())
    if plugin is None:
        known = ", ".join(sorted(each.lower() for each in td.Backend._plugins)) or "none"
        raise RuntimeError(
            f"the accelerator {compute_device().type} communicates by {name!r}, which torch "
            f"{torch.__version__} was not built with and nobody has registered (registered: {known}); import the "
            "package that brings it, or take a torch that is built for the accelerator"
        )
    if not plugin.extended_api:
        return Kind.CUSTOM, plugin.creator_fn(store, where.place, size, default_pg_timeout)
    options.store, options.group_rank, options.group_size = store, where.place, size
    options.timeout, options.group_id = default_pg_timeout, where.name
    return Kind.CUSTOM, plugin.creator_fn(options, None)


class CommunicatorLink:
    """A `transfer.DeviceLink` that uses a communicator.

    members: the communicator's members, in its order.
    stop: callback that is called repeatedly during waits; it may raise.
    """

    def __init__(self, communicator: Communicator, member: int, members: Sequence[int], stop: Stop) -> None:
        self.communicator, self._stop = communicator, stop
        self._rank_of = {each: rank for rank, each in enumerate(members)}
        self._group = td.ProcessGroup(HashStore(), self._rank_of[member], len(members))  # unknown to torch.distributed
        communicator.serve(self._group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        group, device = self._group, self.communicator.device
        group._start_coalescing(device)
        try:
            for tensor, member in receives:
                group.recv([tensor], self._rank_of[member], 0)
            for tensor, member in sends:
                group.send([tensor], self._rank_of[member], 0)
        finally:
            work = group._end_coalescing(device)
        work.wait()  # the stream waits, and the thread does not

    def run(self, work: Callable[[], None], deadline: float, what: str, members: Sequence[int]) -> None:
        """Run `work` as `DeviceLink.run` specifies. Errors raised by `stop` are passed on.

        The first messages between two devices also connect them. A library waits without limit for connections and
        messages, so `work` runs in a thread, and the communicator is aborted if the deadline passes.
        """
        synchronize()  # other streams, too
        begin = time.monotonic()

        def carry_out() -> None:
            work()
            synchronize()

        done = call_beside(on_device(carry_out), "dynatrain-moves")
        try:
            while not wait([done], LOOK_SECONDS).done:
                self._stop()
                if time.monotonic() > deadline and not done.done():
                    raise MemberMissing(what, members, time.monotonic() - begin)
            if error := done.exception():
                raise TransferError(f"{what} with members {[*members]} failed: {error}") from error
            if self.communicator.is_ended:  # the work then succeeds with unknown results
                raise TransferError(f"{what} with members {[*members]} failed: the communicator was aborted")
        except BaseException:
            end([self.communicator], is_broken=True)
            wait([done], END_SECONDS)
            raise
