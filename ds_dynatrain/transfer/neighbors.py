"""Neighbors: members on one machine that read each other's memory, if the kernel permits it.

Linux's process_vm_readv transfers bytes with a single copy. The kernel permits it to processes that may debug the other
one: those of the same user and, where Yama restricts debugging to descendants, those that `permit_readers` admits. The
shared-memory transports of MPI libraries work in the same way.

A sender says in a small message where its bytes are. The receiver reads them from the sender's memory and confirms when
it has read all of them. Peers are not trusted further: lengths are checked, and the certificate of the switch verifies
the values that were read, just as it verifies values received over a network.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.transfer.device_memory import MemoryProbe
from ds_dynatrain.transfer.transport import Handle, Transport, bytes_of

MOST_BYTES = 1 << 30
"""Most bytes per read; one system call transfers at most 2^31 - 1."""
LEAST_BYTES = 16 * 1024
"""Shortest message that is read; a shorter one arrives before two small messages would."""
PR_SET_PTRACER = 0x59616D61
ANYBODY, NOBODY = -1, 0
"""Values that permit all processes of the same user, or none, to read. From <linux/prctl.h>."""
TAKEN = 1 << 20
"""Distance from the tag of a message to the tag with which its receiver confirms that it has read all of it."""
Share = Callable[[str, Any], Mapping[int, Any]]
"""Function `share(what, record)` that sends a record (plain JSON) to all members and returns all records by member."""
PROBE_BYTES = 16


class _Region(ctypes.Structure):
    """C structure `struct iovec`: address and length of a run of bytes."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def machine() -> str:
    """Return a name that is the same in all processes that might be able to read each other's memory.

    Such processes run on the same boot of the kernel, in the same process and network namespaces. The name is empty if
    the system does not support reading the memory of other processes.
    """
    if sys.platform != "linux":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def permit_readers(who: int = ANYBODY) -> None:
    """Let other processes of this user read this process's memory even where Yama would forbid it; ignore failures.

    who: `ANYBODY`, or `NOBODY` to revoke the permission for the whole process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(who & (1 << 64) - 1), 0, 0, 0)


def read_memory(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous uint8 tensor in host memory with bytes of another process.

    process: the ID of the process.
    address: the address of the first byte there.

    Raises TransferError if the kernel does not permit it, or if there is no such process or memory.
    """
    library, done, length = ctypes.CDLL(None, use_errno=True), 0, into.numel()
    library.process_vm_readv.restype = ctypes.c_ssize_t
    while done < length:
        part = min(length - done, MOST_BYTES)
        here, there = _Region(into.data_ptr() + done, part), _Region(address + done, part)
        count = library.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            why = os.strerror(ctypes.get_errno()) if count else "nothing was read"
            raise TransferError(f"cannot read {length - done} bytes of process {process}: {why}")
        done += count


class Neighbors(NamedTuple):
    """The members on this machine that can read this member's memory, and whose memory this member can read.

    processes: the ID of each neighbor's process.
    lenders: the neighbors with which this member shares accelerator memory: each can read the other's.
    """

    processes: Mapping[int, int]
    lenders: frozenset[int]


def find_neighbors(member: int, share: Share, device: torch.device | None = None) -> Neighbors:
    """Find this member's neighbors, by reading a few random bytes of every process. All members must call it.

    member: this member's number.
    share: sends a record to all members and returns theirs.
    device: this member's accelerator, if any.
    """
    probe = torch.tensor(list(os.urandom(PROBE_BYTES)), dtype=torch.uint8)  # not drawn from training
    permit_readers()
    lent = MemoryProbe(device)
    cards = share("cards", {"process": os.getpid(), "probe": [probe.data_ptr(), probe.tolist()], "device": lent.record})
    able, lending = list[int](), list[int]()
    for other, card in sorted(cards.items()):
        if other != member and _can_read(card):
            able.append(other)
            if lent.can_read(card["device"]):
                lending.append(other)
    near, lenders = dict[int, int](), set[int]()
    for other, (reads, borrows) in share("readable", [able, lending]).items():  # near: the same on both sides
        if other in able and member in reads:
            near[other] = int(cards[other]["process"])
            if other in lending and member in borrows:
                lenders.add(other)
    return Neighbors(near, frozenset(lenders))


def _can_read(card: Mapping[str, Any]) -> bool:
    """Return whether the memory of a member can be read, which is tested by reading its probe."""
    address, expected = card["probe"]
    seen = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    try:
        read_memory(int(card["process"]), int(address), seen)
    except TransferError:
        return False
    return bool(seen.tolist() == expected)


@dataclass(frozen=True)
class NeighborTransport:
    """A transport in which neighbors read long messages from each other's memory; `far` carries everything else.

    processes: the ID of each neighbor's process.
    """

    far: Transport
    processes: Mapping[int, int]

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        if member not in self.processes or tensor.nbytes < LEAST_BYTES:
            return self.far.send(tensor, member, tag)
        data = bytes_of(tensor).to("cpu")
        place = torch.tensor([data.data_ptr(), data.numel()], dtype=torch.int64)
        said = self.far.send(place, member, tag)
        return _Lent((data, place), [said, self.far.receive(_confirmation(), member, tag + TAKEN)])

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        if member not in self.processes or tensor.nbytes < LEAST_BYTES:
            return self.far.receive(tensor, member, tag)
        place = torch.zeros(2, dtype=torch.int64)
        return _Borrowed(self, bytes_of(tensor), member, tag, place, self.far.receive(place, member, tag))


def _confirmation() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


@dataclass(frozen=True)
class _Lent:
    """A message to a neighbor: its bytes with their place, and the messages that must be done."""

    held: Sequence[torch.Tensor]
    handles: Sequence[Handle]

    def wait(self, deadline: float) -> None:
        for handle in self.handles:
            handle.wait(deadline)


@dataclass(frozen=True)
class _Borrowed:
    """A message from a neighbor.

    place: the address and the length of the bytes there, once `told` is done.
    """

    transport: NeighborTransport
    data: torch.Tensor
    member: int
    tag: int
    place: torch.Tensor
    told: Handle

    def wait(self, deadline: float) -> None:
        self.told.wait(deadline)
        (address, length), awaited = self.place.tolist(), self.data.numel()
        if length != awaited:
            raise TransferError(f"member {self.member} offers {length} bytes where {awaited} are awaited")
        host = self.data if self.data.device.type == "cpu" else torch.empty(length, dtype=torch.uint8)
        try:
            read_memory(self.transport.processes[self.member], address, host)
        except TransferError as error:
            raise TransferError(f"receive of {length} bytes with member {self.member} failed: {error}") from error
        if host is not self.data:
            self.data.copy_(host)
        self.transport.far.send(_confirmation(), self.member, self.tag + TAKEN).wait(deadline)
