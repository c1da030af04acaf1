"""A plan carried out by a member that stands in for others: their parts in threads, beside its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.plan import MemberPlan, StandInPlan
from ds_dynatrain.transfer.executor import execute
from ds_dynatrain.transfer.regions import Buffers
from ds_dynatrain.transfer.transport import Handle, Transport

TAGS = 256
"""Tags of each member that somebody stands in for, so that between two processes each pair of members has its own."""


@dataclass(frozen=True)
class ActingTransport:
    """The end of `member`, which this process is or stands in for.

    stand_ins: absent member -> who stands in for it, the same on all members.
    """

    transport: Transport
    member: int
    stand_ins: Mapping[int, int]

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """See `Transport`."""
        return self.transport.send(tensor, member, self._tag(self.member, tag))

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        """See `Transport`."""
        return self.transport.receive(tensor, self.stand_ins.get(member, member), self._tag(member, tag))

    def _tag(self, sender: int, tag: int) -> int:
        if sender not in self.stand_ins:
            return tag
        return tag + TAGS * (1 + sorted(self.stand_ins).index(sender))


@dataclass
class _Sending:
    """The part of an absent member that goes to others, in a thread."""

    part: MemberPlan
    source: Buffers
    transport: Transport
    seconds: float
    budget_bytes: int
    on_host: bool
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"dynatrain-stand-in-{self.part.member}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            execute(self.part, self.source, {}, self.transport, self.seconds, self.budget_bytes, self.on_host)
        except BaseException as error:
            self.error = error

    def end(self, deadline: float) -> None:
        """Wait for it; whatever it has failed with."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            peers = [each.peer for each in self.part.rounds]
            raise MemberMissing(f"sends for member {self.part.member}", peers, self.seconds)
        if self.error is not None:
            raise self.error


def execute_standing_in(
    plan: StandInPlan,
    sources: Mapping[int, Buffers],
    target: Buffers,
    transport: Transport,
    stand_ins: Mapping[int, int],
    deadline_seconds: float,
    budget_bytes: int,
    on_host: bool = True,
) -> None:
    """`execute`, for a member and for those that it stands in for. All of the latter's buffers are in host memory.

    sources: what each of them held, by member; nothing for one that is in the target alone. target: the member's own
    buffers. stand_ins: of the whole plan, on all members alike. Raises as `execute`.
    """
    member, how = plan.own.member, (budget_bytes, on_host)
    deadline = time.monotonic() + deadline_seconds
    sendings = [
        _Sending(_away(part), sources[one], ActingTransport(transport, one, stand_ins), deadline_seconds, *how)
        for one, part in plan.absent.items()
    ]
    mine = ActingTransport(transport, member, stand_ins)
    for one, part in plan.absent.items():
        execute(replace(part, rounds=()), sources[one], target, mine, deadline_seconds, *how)
    execute(plan.own, sources.get(member, {}), target, mine, deadline_seconds, *how)
    for sending in sendings:
        sending.end(deadline)


def _away(part: MemberPlan) -> MemberPlan:
    """Without what stays with the stand-in."""
    return replace(part, local=part.local.select(slice(0, 0)))
