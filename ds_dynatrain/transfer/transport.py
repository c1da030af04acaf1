"""Transport of bytes between members: a small interface, and its implementation with torch.distributed.

Every transport has this contract. `send` and `receive` return immediately. Messages between two members with the same
tag arrive in sending order, and are matched in order with the receives of that tag. A message and its receive have
equal length. A tensor must not be used between `send` or `receive` and the return of the handle's `wait`. A failed wait
raises an error that names the member; the transport is then unusable and must be discarded with its group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from ds_dynatrain.errors import MemberMissing, TransferError, UnsupportedError

T = TypeVar("T")
Landing = tuple[torch.Tensor, torch.Tensor] | None
"""A tensor on an accelerator, and the host memory from which to fill it; None for a tensor in host memory."""
MESSAGE_BYTES = 1 << 30
"""Maximum size of a message in bytes. Longer tensors are split, because some system calls take at most 2^31 - 1
bytes."""
MINIMUM_WAIT_SECONDS = 0.001
"""Minimum timeout. Gloo counts whole milliseconds, and takes zero for no limit."""
ROUNDING_SECONDS = 0.005
"""A failure within this time before the deadline counts as a timeout."""
LOOK_SECONDS = 0.25
"""Seconds between two calls of `stop` during a wait."""
RELAY_TAG = 2
RELAY_BYTES = 16 << 20
"""Tensors are relayed in parts of at most this size, so that all levels of the tree work at the same time."""


class Handle(Protocol):
    """Handle of a message whose sending or receiving has been started."""

    def wait(self, deadline: float) -> None:
        """Wait until the message is sent or received; `deadline` is a `time.monotonic()` value.

        Raises MemberMissing when the deadline passes, and TransferError if the connection fails earlier.
        """


class Transport(Protocol):
    """A transport that sends and receives 1-D contiguous tensors; the module's docstring states its contract."""

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Start to send the tensor's bytes to `member`."""

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Start to receive a message from `member` into the tensor."""


class GroupTransport:
    """Point-to-point messages over a process group that has a gloo back-end for CPU tensors.

    members: the member number of each rank of the group.
    stop: called repeatedly during long waits; ends the wait by raising an error. It is needed in jobs that continue
        after the death of a member: if the sockets of a group are shut down while a message is being sent, gloo loses
        the message and would wait until the deadline.

    Tensors on an accelerator travel through host memory. Gloo closes all connections of a group when one wait times
    out. After MemberMissing, build a new group without the missing member.
    """

    def __init__(
        self, group: dist.ProcessGroup, members: Sequence[int], stop: Callable[[], None] | None = None
    ) -> None:
        if len(members) != group.size() or len(set(members)) != len(members):
            raise TransferError(f"a group of {group.size()} ranks needs as many different members, got {list(members)}")
        backend = group._get_backend(torch.device("cpu")).name()
        if backend != "gloo" and group.size() > 1:  # a single rank sends nothing
            raise UnsupportedError(
                f'the transfer group has the CPU back-end {backend!r}, and bytes travel by gloo; give it backend="gloo"'
            )
        self._group, self._stop = group, stop
        self._rank_of = dict(zip(members, range(len(members)), strict=True))

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Start to send a tensor.

        A tensor on an accelerator is copied to the host, and may be changed after the call.
        """
        return self._begin(self._group.send, "send to", bytes_of(tensor).to("cpu"), member, tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """Start to receive a message into a tensor. A tensor on an accelerator is filled during `wait`."""
        data = bytes_of(tensor)
        host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=torch.uint8)
        landing = None if host is data else (data, host)
        return self._begin(self._group.recv, "receive from", host, member, tag, landing)

    def _begin(
        self,
        call: Callable[..., dist.Work],
        what: str,
        data: torch.Tensor,
        member: int,
        tag: int,
        landing: Landing = None,
    ) -> Handle:
        rank, begins = self._rank_of.get(member), range(0, data.numel(), MESSAGE_BYTES)
        if rank is None or rank == self._group.rank():
            raise TransferError(f"member {member} is no peer here; the group has the members {sorted(self._rank_of)}")
        try:
            works = [call([data[begin : begin + MESSAGE_BYTES]], rank, tag) for begin in begins]
        except RuntimeError as error:
            raise TransferError(f"cannot {what} member {member}: {error}") from error
        return _GroupHandle(works, f"{what.split()[0]} of {data.numel()} bytes", member, self._stop, landing)


@dataclass
class _GroupHandle:
    """The messages that carry one tensor and, if it is received into an accelerator's memory, the copy to that
    memory."""

    works: list[dist.Work]
    what: str
    member: int
    stop: Callable[[], None] | None
    landing: Landing
    since: float = field(default_factory=time.monotonic)

    def wait(self, deadline: float) -> None:
        if self.stop is None:
            self._finish(deadline)
        else:
            ended = call_beside(partial(self._finish, deadline), "dynatrain-wait")
            while not futures.wait([ended], LOOK_SECONDS).done:
                self.stop()
            ended.result()
        if self.landing is not None:
            target, host = self.landing
            target.copy_(host)

    def _finish(self, deadline: float) -> None:
        for work in self.works:
            left = max(deadline - time.monotonic(), MINIMUM_WAIT_SECONDS)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                if time.monotonic() >= deadline - ROUNDING_SECONDS:
                    raise MemberMissing(self.what, [self.member], time.monotonic() - self.since) from error
                raise TransferError(f"{self.what} with member {self.member} failed: {error}") from error


def call_beside(call: Callable[[], T], name: str) -> futures.Future[T]:
    """Run a function in a daemon thread, which does not keep the process alive; return its future."""
    ended: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as bytes (uint8), the form in which tensors are sent and digested.

    Raises TransferError unless the tensor is 1-D and contiguous.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise TransferError(
            f"1-D contiguous tensors alone can be sent or digested, got {shape}, {stride}: flatten first"
        )
    return tensor.detach().view(torch.uint8)


def send_down(
    tree: Sequence[int], mine: int, tensors: Sequence[torch.Tensor], transport: Transport, deadline: float
) -> int:
    """Broadcast tensors from the first member of `tree` to all others in it. All members of `tree` must call this.

    Returns the number of bytes that this member has sent.

    tree: the members as a binary tree: the member at index i sends to the members at 2i + 1 and 2i + 2.
    mine: this member.
    tensors: the values to send or, on members other than the first, tensors to fill.
    deadline: a `time.monotonic()` value.

    Raises the errors of `Handle.wait`.
    """
    place = tree.index(mine)
    below = tree[2 * place + 1 : 2 * place + 3]
    parts = list[torch.Tensor]()
    for tensor in tensors:
        if tensor.numel():
            parts += torch.split(tensor.contiguous().view(-1), max(1, RELAY_BYTES // tensor.element_size()))
    coming = [transport.receive(part, tree[(place - 1) // 2], RELAY_TAG) for part in parts] if place else []
    sent = []
    for number, part in enumerate(parts):
        if place:
            coming[number].wait(deadline)
        sent += [transport.send(part, member, RELAY_TAG) for member in below]
    for handle in sent:
        handle.wait(deadline)
    return len(below) * sum(part.nbytes for part in parts)
