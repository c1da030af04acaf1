"""Ten ways to get a switch wrong, put into one switch from outside: nothing in the library knows of them.

Each is done to data that moves, on member `WHERE` or, where a wrong line of code would do it everywhere, on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ds_dynatrain.plan import MemberPlan
from ds_dynatrain.plan.moves import Moves
from ds_dynatrain.reshard.switch import Transaction
from ds_dynatrain.space import BufferId
from ds_dynatrain.transfer import ReadyPlan, Transport
from ds_dynatrain.transfer.device_memory import DeviceMemory
from ds_dynatrain.transfer.executor import TAG
from ds_dynatrain.transfer.series import Matrix
from tests.engine import jobs

WHERE = 0
FIRST_GENERATION = 2
"""Number of the first switch of a job."""

Act = Callable[[Transaction], None]
Stale = dict[tuple[str, BufferId], torch.Tensor]


def fresh(switch: Transaction, kind: str) -> torch.Tensor:
    """The longest target buffer of a kind that was filled by the moves: one that did not stay in place."""
    moved = [held for key, held in switch.target.items() if key[0] == kind and key not in switch.preparation.kept]
    return max(moved, key=torch.Tensor.numel)


def permute_block(switch: Transaction) -> None:
    """Two blocks of eight change places, the first of them where something is (rows of unused words are zero)."""
    buffer = fresh(switch, "exp_avg")
    at = int(torch.nonzero(buffer)[3])
    one, other = buffer[at : at + 8], buffer[at + 17 : at + 25]
    first = one.clone()
    one.copy_(other)
    other.copy_(first)


def swap_parameters(switch: Transaction) -> None:
    """Two parameters of one length change places, with their moments."""
    vps, rank = switch.preparation.vps.with_layout(switch.proposal.layout, switch.proposal.members), switch.target_rank
    for kind in ("exp_avg", "exp_avg_sq"):
        numbers, pieces = vps.split_by_tensor(vps.holding(vps.layout, rank or 0, kind))
        by_length: dict[int, list[tuple[int, Any]]] = {}
        for number, piece in zip(numbers.tolist(), pieces, strict=True):
            if (kind, piece.buffer) in switch.preparation.kept:
                continue
            by_length.setdefault(piece.stop - piece.start, []).append((number, piece))
        pairs = [same for length, same in by_length.items() if len(same) > 1 and length > 4]
        (_, one), (_, other) = pairs[0][:2]
        length = one.stop - one.start
        views = [switch.target[kind, piece.buffer].narrow(0, piece.offset, length) for piece in (one, other)]
        first = views[0].clone()
        views[0].copy_(views[1])
        views[1].copy_(first)


def flip_bit(switch: Transaction) -> None:
    """The lowest bit of one element."""
    fresh(switch, "master")[5:6].view(torch.int32).bitwise_xor_(1)


def cast_precision(switch: Transaction) -> None:
    """A moment through bf16."""
    buffer = fresh(switch, "exp_avg_sq")
    buffer.copy_(buffer.to(torch.bfloat16))


def lose_steps(switch: Transaction) -> None:
    """Every optimizer state starts to count anew."""
    for state in switch.engine.host.basic_optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def change_rate(switch: Transaction) -> None:
    """The learning rate of the last group is that of the start times 0.5."""
    switch.engine.host.basic_optimizer.param_groups[-1]["lr"] *= 0.5


def reset_stream(switch: Transaction) -> None:
    """Torch's generator starts anew."""
    torch.manual_seed(0)


def without_a_piece(switch: Transaction, plan: MemberPlan) -> MemberPlan:
    """The first move of a moment is left out of every exchange into `WHERE`, at both ends, and of its local moves."""
    if switch.control.member == WHERE:
        cut = [replace(exchange, receives=_without_first(exchange.receives)) for exchange in plan.rounds]
        return replace(plan, local=_without_first(plan.local), rounds=tuple(cut))
    cut = [
        replace(exchange, sends=_without_first(exchange.sends)) if exchange.peer == WHERE else exchange
        for exchange in plan.rounds
    ]
    return replace(plan, rounds=tuple(cut))


def _without_first(moves: Moves) -> Moves:
    rows = [row for row, kind in enumerate(moves.kind.tolist()) if moves.kinds[kind].name == "exp_avg"]
    return moves.select(np.delete(np.arange(len(moves)), rows[:1]))


@dataclass(frozen=True)
class Fault:
    """after: which step of the transaction `act` follows. reason: words of the roll-back's reason."""

    after: str
    act: Act
    reason: str
    everywhere: bool = False


WRONG = "(is not the same after the moves|differs between the replicas of members)"
"""Which of the two depends on whether the target layout keeps the tensor whole."""

AFTER: dict[str, Fault] = {
    "permuted block": Fault("_execute", permute_block, rf"exp_avg of '[\w.]+' {WRONG}"),
    "swapped parameters": Fault("_execute", swap_parameters, rf"exp_avg of '[\w.]+' {WRONG}"),
    "bit flip": Fault("_execute", flip_bit, rf"master of '[\w.]+' {WRONG}"),
    "precision cast": Fault("_execute", cast_precision, rf"exp_avg_sq of '[\w.]+' {WRONG}", True),
    "lost step counter": Fault("_rebuild", lose_steps, r"carry of member \d after the moves .*: scalars", True),
    "changed learning rate": Fault("_rebuild", change_rate, r"carry of member \d after the moves .*: groups", True),
    "random stream reset": Fault("_carry", reset_stream, r"random streams of rank \d"),
}
REASONS = {name: fault.reason for name, fault in AFTER.items()} | {
    "stale moment": rf"exp_avg of '[\w.]+' {WRONG}",
    "dropped piece": rf"exp_avg of '[\w.]+' {WRONG}",
    "diverged replica": r"source: weight of '[\w.]+' differs between the replicas of members (0 and 1|1 and \d)"
    r"|replicas of the weight of '[\w.]+' on several pipeline stages or tensor ranks differ",
    "corrupted message": rf"of '[\w.]+' {WRONG}",
}


@contextmanager
def injected(names: Sequence[str], stale: Stale) -> Iterator[None]:
    """Inside the block the job's first switch fails by the first fault, its second by the second, and so on.

    Call it on every rank. stale: old copies of moments.
    """
    by_generation = {FIRST_GENERATION + number: name for number, name in enumerate(names)}
    with ExitStack() as stack:
        for method in sorted({fault.after for fault in AFTER.values()}):
            stack.enter_context(_followed(method, by_generation))
        stack.enter_context(_other_execution(by_generation, stale))
        yield


@contextmanager
def _followed(method: str, by_generation: Mapping[int, str]) -> Iterator[None]:
    own = getattr(Transaction, method)

    def wrapped(self: Transaction, *arguments: Any) -> Any:
        result = own(self, *arguments)
        fault = AFTER.get(by_generation.get(self.proposal.generation, ""))
        if fault is None or fault.after != method or self.target_rank is None:
            return result
        if fault.everywhere or self.control.member == WHERE:
            fault.act(self)
        return result

    with patch.object(Transaction, method, wrapped):
        yield


@contextmanager
def _other_execution(by_generation: Mapping[int, str], stale: Stale) -> Iterator[None]:
    own = Transaction._execute

    def wrapped(self: Transaction, plan: ReadyPlan, transport: Transport, *link: Any) -> Any:
        name = by_generation.get(self.proposal.generation)
        if name == "dropped piece":
            how = self.engine.settings.memory_budget_bytes, plan.on_host, plan.sharing, self.preparation.ways.batching
            return own(self, ReadyPlan.of(without_a_piece(self, plan.plan), *how), transport, *link)
        if name == "stale moment" and self.control.member == WHERE:
            moved = {key: held for key, held in stale.items() if key not in self.preparation.kept}
            with patch.object(self, "source", {**self.source, **moved}):
                return own(self, plan, transport, *link)
        if name == "corrupted message":
            with corrupted(plan, transport):
                return own(self, plan, transport, *link)
        return own(self, plan, transport, *link)

    with patch.object(Transaction, "_execute", wrapped):
        yield


@contextmanager
def corrupted(plan: ReadyPlan, transport: Transport) -> Iterator[None]:
    """One bit of each message is another, and of each matrix that is read from another member's accelerator."""
    alive: list[torch.Tensor] = []
    send = type(transport).send

    def sent(self: Transport, tensor: torch.Tensor, member: int, tag: int) -> Any:
        if tag != TAG:
            return send(self, tensor, member, tag)
        alive.append(tensor.clone())
        alive[-1].view(torch.uint8)[0] ^= 1
        return send(self, alive[-1], member, tag)

    with ExitStack() as stack:
        stack.enter_context(patch.object(type(transport), "send", sent))
        if plan.sharing is not None:
            memory = type(plan.sharing.memory)
            read = memory.read

            def taken(self: DeviceMemory, address: int, matrix: Matrix, into: torch.Tensor, place: Matrix) -> None:
                read(self, address, matrix, into, place)
                into[place.begin] ^= 1

            stack.enter_context(patch.object(memory, "read", taken))
        yield


def train(
    made: jobs.Job,
    steps: int,
    schedule: jobs.Schedule,
    record: jobs.Record,
    each: Callable[[jobs.Job], None] | None = None,
) -> None:
    """What `jobs.train` does, for switches that may fail."""
    engine, asked = made.engine, set[int]()
    while engine.idle or engine.global_steps < steps:
        for batch in made.loader:
            jobs.one_micro_batch(engine, batch, record)
            if engine.micro_steps % engine.gradient_accumulation_steps():
                continue
            step = engine.global_steps
            if each is not None:
                each(made)
            if step in schedule and step not in asked and step < steps:
                asked.add(step)
                jobs.ask(engine, schedule[step])
            if step >= steps:
                break
