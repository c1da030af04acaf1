"""A switch played out on arrays, element by element, and its least bytes counted apart from the planner.

Every element has a value that no other one has, but those of kinds of equal bytes. A plan has to bring each element of
the target's buffers there once, out of where the source has it; padding stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynatrain.plan import MemberPlan, Moves, SwitchPlan, bytes_sent, traffic
from ds_dynatrain.space import BufferId, Layout, LogicalTensor, VirtualParameterSpace, ZeroRules
from tests.space.expected import PADDING, Ints, buffers, buffers_under

Memory = dict[tuple[str, str, int], Ints]
"""Values by (kind, place, index of the buffer)."""
EMPTY = -1


class Move(NamedTuple):
    """One run [start, stop) of `kind` from member `source` to member `target`; offsets in elements."""

    kind: str
    start: int
    stop: int
    source: int
    target: int
    source_kind: str
    source_buffer: BufferId
    source_offset: int
    target_buffer: BufferId
    target_offset: int


def each(moves: Moves) -> Iterator[Move]:
    """The rows of all blocks one by one, with names in place of numbers."""
    names = [field.name for field in fields(moves)][: -len(("kinds", "source_buffers", "target_buffers"))]
    for columns in zip(*(getattr(moves, name).tolist() for name in names), strict=True):
        block = dict(zip(names, columns, strict=True))
        for row in range(block["number"]):
            start = block["start"] + row * block["step"]
            yield Move(
                kind=moves.kinds[block["kind"]].name,
                start=start,
                stop=start + block["length"],
                source=block["source"],
                target=block["target"],
                source_kind=moves.kinds[block["source_kind"]].name,
                source_buffer=moves.source_buffers[block["source_buffer"]],
                source_offset=block["source_offset"] + row * block["source_step"],
                target_buffer=moves.target_buffers[block["target_buffer"]],
                target_offset=block["target_offset"] + row * block["target_step"],
            )


def value(vps: VirtualParameterSpace, kind: str, coordinate: Ints) -> Ints:
    """What elements hold."""
    code = [other.name for other in vps.kinds].index(min(vps.kind(kind).sources))
    return code * len(vps.line) + coordinate


def memory(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: Iterable[str]) -> Memory:
    """All elements on a rank."""
    return {
        (kind, *name): np.where(line == PADDING, EMPTY, value(vps, kind, line))
        for kind in kinds
        for name, line in buffers_under(vps, layout, rank, kind).items()
    }


def coordinates(vps: VirtualParameterSpace, layout: Layout, rank: int, kind: str) -> set[int]:
    """The elements of one kind on a rank."""
    return set().union(*(line.tolist() for line in buffers_under(vps, layout, rank, kind).values())) - {PADDING}


def play(plan: SwitchPlan) -> int:
    """Carry a plan out; the bytes that crossed. AssertionError unless every element arrives, once, and nothing else."""
    vps = plan.sides.vps
    old = {member: memory(vps, vps.layout, rank, plan.kinds) for rank, member in enumerate(vps.members)}
    due = {member: memory(vps, plan.sides.layout, rank, plan.kinds) for rank, member in enumerate(plan.target_members)}
    new = {member: {name: np.full_like(line, EMPTY) for name, line in held.items()} for member, held in due.items()}
    parts = {member: plan.for_member(member) for member in plan.members}
    crossed = 0
    for member, part in parts.items():
        _copy(vps, part.local, old.get(member, {}), new.get(member, {}))
    for phase, memories in (("rounds", old), ("relays", new)):  # relays read what the rounds have written
        for member, part in parts.items():
            for exchange in getattr(part, phase):
                answer = next(other for other in getattr(parts[exchange.peer], phase) if other.peer == member)
                assert list(each(exchange.sends)) == list(each(answer.receives))
                held = {name: line.copy() for name, line in memories.get(member, {}).items()}
                _copy(vps, exchange.sends, held, new.get(exchange.peer, {}))
                crossed += exchange.sends.nbytes
    for member, part in parts.items():
        before = {name: line.copy() for name, line in new.get(member, {}).items()}
        _copy(vps, part.derived, before, new.get(member, {}))
    for member, held in due.items():
        for name, line in held.items():
            wrong = np.flatnonzero(new[member][name] != line)
            assert not len(wrong), f"member {member}: {name} is not written, or is padding, at {wrong.tolist()}"
    _check_sums(plan, parts, crossed)
    return crossed


def stays(move: Move) -> bool:
    """Whether a run has one name of kind, buffer and offset on both sides."""
    places = (
        (move.source, move.source_kind, move.source_buffer, move.source_offset),
        (move.target, move.kind, move.target_buffer, move.target_offset),
    )
    return places[0] == places[1]


def _copy(vps: VirtualParameterSpace, moves: Moves, source: Memory, target: Memory) -> None:
    for move in each(moves):
        run = np.arange(move.start, move.stop)
        read = _part(source, (move.source_kind, *move.source_buffer), move.source_offset, len(run))
        assert np.array_equal(read, value(vps, move.source_kind, run)), f"reads something else: {move}"
        into = _part(target, (move.kind, *move.target_buffer), move.target_offset, len(run))
        assert (into == EMPTY).all(), f"writes twice: {move}"
        into[:] = value(vps, move.kind, run)


def _part(memory: Memory, name: tuple[str, str, int], offset: int, length: int) -> Ints:
    """A run of a buffer, to read or to write; AssertionError if it is not in there."""
    assert name in memory, f"there is no {name}"
    assert 0 <= offset < offset + length <= len(memory[name]), f"[{offset}, {offset + length}) is not in {name}"
    return memory[name][offset : offset + length]


def _check_sums(plan: SwitchPlan, parts: dict[int, MemberPlan], crossed: int) -> None:
    sent = {member: sum(exchange.sends.nbytes for exchange in part.exchanges) for member, part in parts.items()}
    received = {member: sum(exchange.receives.nbytes for exchange in part.exchanges) for member, part in parts.items()}
    assert crossed == bytes_sent(plan) == sum(sent.values())
    assert {member: (sent[member], received[member]) for member in parts} == traffic(plan)


def lacking_bytes(
    tensors: list[LogicalTensor],
    rules: ZeroRules,
    source: tuple[Layout, int | None],
    target: tuple[Layout, int],
    weight_bytes: int,
    kinds: Iterable[str],
) -> int:
    """Least bytes that one member must receive, element by element: source and target as (layout, rank or None)."""
    present = set(kinds)

    def held(layout: Layout, rank: int | None, kind: str) -> npt.NDArray[np.bool_]:
        """For each coordinate, whether it is there."""
        marks = np.zeros(sum(tensor.numel for tensor in tensors) + 1, dtype=bool)  # the last one stands for PADDING
        if kind in present and rank is not None:
            for line in buffers(tensors, rules, layout, rank, kind).values():
                marks[line] = True
        return marks[:-1]

    weight, master = held(*target, "weight"), held(*target, "master")
    if weight_bytes == 4:
        total = 4 * np.count_nonzero((weight | master) & ~held(*source, "weight") & ~held(*source, "master"))
    else:
        total = 2 * np.count_nonzero(weight & ~held(*source, "weight") & ~master)
        total += 4 * np.count_nonzero(master & ~held(*source, "master"))
    for kind, size in (("exp_avg", 4), ("exp_avg_sq", 4), ("stale_grad", weight_bytes)):
        total += size * np.count_nonzero(held(*target, kind) & ~held(*source, kind))
    return int(total)
