"""Execution of plans by a member that also stands in for absent members: it sends its copies of their state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass, replace
from functools import partial

import torch

from ds_dynatrain.errors import MemberMissing
from ds_dynatrain.plan import MemberPlan, StandInPlan
from ds_dynatrain.transfer.executor import execute
from ds_dynatrain.transfer.ready import ReadyPlan
from ds_dynatrain.transfer.regions import Buffers
from ds_dynatrain.transfer.transport import Handle, Transport, call_beside

TAGS = 256
"""Size of the tag range of each absent member, so that messages of different members never share a tag."""


@dataclass(frozen=True)
class ActingTransport:
    """A transport for the messages of this process's own member, or of an absent member for which it stands in.

    transport: the transport that carries the messages.
    member: the member for which messages are sent.
    stand_ins: the member that stands in for each absent one; the same on all members.
    """

    transport: Transport
    member: int
    stand_ins: Mapping[int, int]

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self.transport.send(tensor, member, self._tag(self.member, tag))

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Handle:
        return self.transport.receive(tensor, self.stand_ins.get(member, member), self._tag(member, tag))

    def _tag(self, sender: int, tag: int) -> int:
        if sender not in self.stand_ins:
            return tag
        return tag + TAGS * (1 + sorted(self.stand_ins).index(sender))


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
    """Execute the plans of a member and of the absent members that it stands in for.

    sources: the source buffers of each of these members; the member itself may be left out if it has no state.
    target: the target buffers of the member itself.
    stand_ins: the member that stands in for each absent one; the same on all members.

    The buffers of absent members must be in host memory. Raises the errors of `execute`.
    """
    member, deadline = plan.own.member, time.monotonic() + deadline_seconds

    def carry_out(part: MemberPlan, source: Buffers, into: Buffers, way: Transport) -> None:
        execute(ReadyPlan.of(part, budget_bytes, on_host), source, into, way, deadline_seconds)

    sendings = []
    for one, part in plan.absent.items():
        away = replace(part, local=part.local.select(slice(0, 0)))  # without moves to the stand-in itself
        send = partial(carry_out, away, sources[one], {}, ActingTransport(transport, one, stand_ins))
        sendings.append((part, call_beside(send, f"dynatrain-stand-in-{one}")))
    mine = ActingTransport(transport, member, stand_ins)
    for one, part in plan.absent.items():
        carry_out(replace(part, rounds=()), sources[one], target, mine)
    carry_out(plan.own, sources.get(member, {}), target, mine)
    for part, sending in sendings:
        if not futures.wait([sending], max(0.0, deadline - time.monotonic())).done:
            peers = [each.peer for each in part.rounds]
            raise MemberMissing(f"sends for member {part.member}", peers, deadline_seconds)
        sending.result()
