"""Messages between devices by a communicator: `send` and `recv` of many members in one group call, as NCCL has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as td
from torch._C._distributed_c10d import HashStore

from ds_dynatrain.adapters.communicators import NCCL, Communicator, end
from ds_dynatrain.adapters.device import device_backend, is_accelerated, start_thread, synchronize
from ds_dynatrain.errors import MemberMissing, TransferError
from ds_dynatrain.transfer.batched import Message

GROUPING = (NCCL,)
"""Back-ends of which it is known that they send and receive in groups."""
LOOK_SECONDS = 0.05
"""Between two looks whether somebody else has given up."""
END_SECONDS = 5.0
"""So long an aborted batch is waited for."""


def can_send_between_devices() -> bool:
    """Whether the accelerator's library of collectives does so."""
    return is_accelerated() and device_backend() in GROUPING


class CommunicatorLink:
    """See `transfer.DeviceLink`. members: of the communicator, in its order. stop: called while waiting, may raise."""

    def __init__(
        self, communicator: Communicator, member: int, members: Sequence[int], stop: Callable[[], None]
    ) -> None:
        self.communicator, self._stop = communicator, stop
        self._rank_of = {each: rank for rank, each in enumerate(members)}
        self._group = td.ProcessGroup(HashStore(), self._rank_of[member], len(members))  # which nobody else knows
        communicator.serve(self._group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """See `DeviceLink`."""
        group, device = self._group, self.communicator.device
        group._start_coalescing(device)
        try:
            for tensor, member in receives:
                group.recv([tensor], self._rank_of[member], 0)
            for tensor, member in sends:
                group.send([tensor], self._rank_of[member], 0)
        finally:
            work = group._end_coalescing(device)
        work.wait()  # by this thread's stream, not by the thread

    def run(self, work: Callable[[], None], deadline: float, what: str, members: Sequence[int]) -> None:
        """See `DeviceLink`; whatever `stop` raises, too.

        The first messages between two devices connect these, which a library waits for without end, as it does for
        messages: so all of it is done in a thread, and the communicator is aborted if need be.
        """
        synchronize()  # other streams, too
        errors, begin = list[BaseException](), time.monotonic()

        def carry_out() -> None:
            try:
                work()
                synchronize()
            except BaseException as error:
                errors.append(error)

        thread = start_thread(carry_out, "dynatrain-moves")
        try:
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                self._stop()
                if time.monotonic() > deadline and thread.is_alive():
                    raise MemberMissing(what, members, time.monotonic() - begin)
            if errors:
                raise TransferError(f"{what} with members {[*members]} failed: {errors[0]}") from errors[0]
            if self.communicator.is_ended:  # as if it were well: what has arrived is not known
                raise TransferError(f"{what} with members {[*members]} failed: the communicator was aborted")
        except BaseException:
            end([self.communicator], is_broken=True)
            thread.join(END_SECONDS)
            raise
