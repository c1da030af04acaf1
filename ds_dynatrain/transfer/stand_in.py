"""Execution of a plan by a member that stands in for others: their parts run in threads, beside its own."""

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
"""Number of tags of each member that another stands in for: each pair of members has its own between two processes."""


@dataclass(frozen=True)
class ActingTransport:
    """The transport of `member`, which is this process or one that it stands in for.

    stand_ins: member that acts for each absent one; the same on all members.
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
    """Do as `execute` does, for a member and for the absent ones that it stands in for, whose buffers are all in host
    memory.

    sources: source buffers of each of them, by member; a member that is in the target alone has none. target: the
    member's own buffers. stand_ins: those of the whole plan, the same on all members. Raises as `execute` does.
    """
    member, deadline = plan.own.member, time.monotonic() + deadline_seconds

    def carry_out(part: MemberPlan, source: Buffers, into: Buffers, way: Transport) -> None:
        execute(ReadyPlan.of(part, budget_bytes, on_host), source, into, way, deadline_seconds)

    sendings = []
    for one, part in plan.absent.items():
        away = replace(part, local=part.local.select(slice(0, 0)))  # without what stays with the stand-in
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
