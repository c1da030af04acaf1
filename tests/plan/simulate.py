"""A switch played out in dictionaries, and its least bytes counted in plain Python, apart from the planner."""

from __future__ import annotations

from collections.abc import Iterable

from ds_dynatrain.plan import MemberPlan, Move, Moves, SwitchPlan
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules
from tests.space.models import addresses, addresses_under

Memory = dict[tuple[str, str, int, int], tuple[str, int]]


def value(vps: VirtualParameterSpace, kind: str, coordinate: int) -> tuple[str, int]:
    """What an element holds: equal for kinds of equal bytes."""
    return min(vps.kind(kind).sources), coordinate


def memory(vps: VirtualParameterSpace, layout: Layout, rank: int, kinds: Iterable[str]) -> Memory:
    """All elements on a rank, by (kind, place, index, offset)."""
    found: Memory = {}
    for kind in kinds:
        groups = vps.kind(kind).groups
        for at, where in addresses_under(vps, layout, rank, kind).items():
            if groups is None or vps.locate(at)[0].group in groups:
                found[(kind, *where)] = value(vps, kind, at)
    return found


def play(plan: SwitchPlan) -> tuple[dict[int, Memory], int]:
    """Memory of every target member after the plan is carried out, and the bytes that crossed."""
    vps = plan.sides.vps
    old = {member: memory(vps, vps.layout, rank, plan.kinds) for rank, member in enumerate(vps.members)}
    new: dict[int, Memory] = {member: {} for member in plan.target_members}
    parts = {member: plan.for_member(member) for member in plan.members}
    crossed = 0
    for member, part in parts.items():
        _copy(vps, part.local, old.get(member, {}), new.get(member, {}))
        for exchange in part.rounds:
            answer = next(other for other in parts[exchange.peer].rounds if other.peer == member)
            assert list(exchange.sends) == list(answer.receives)
            _copy(vps, exchange.sends, old.get(member, {}), new.get(exchange.peer, {}))
            crossed += exchange.sends.nbytes
    for member, part in parts.items():
        _copy(vps, part.derived, dict(new.get(member, {})), new.get(member, {}))
    _check_sums(plan, parts, crossed)
    return new, crossed


def stays(move: Move) -> bool:
    """Whether a run has one name of kind, buffer and offset on both sides."""
    places = (
        (move.source, move.source_kind, move.source_buffer, move.source_offset),
        (move.target, move.kind, move.target_buffer, move.target_offset),
    )
    return places[0] == places[1]


def _copy(vps: VirtualParameterSpace, moves: Moves, source: Memory, target: Memory) -> None:
    for move in moves:
        for step in range(move.stop - move.start):
            got = source[(move.source_kind, *move.source_buffer, move.source_offset + step)]
            assert got == value(vps, move.source_kind, move.start + step)
            place = (move.kind, *move.target_buffer, move.target_offset + step)
            assert place not in target, f"written twice: {place}"
            target[place] = value(vps, move.kind, move.start + step)


def _check_sums(plan: SwitchPlan, parts: dict[int, MemberPlan], crossed: int) -> None:
    assert crossed == plan.bytes_sent == sum(part.bytes_sent for part in parts.values())
    received = {member: sum(each.receives.nbytes for each in part.rounds) for member, part in parts.items()}
    assert {member: (part.bytes_sent, received[member]) for member, part in parts.items()} == plan.traffic


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

    def held(layout: Layout, rank: int, kind: str) -> set[int]:
        return set(addresses(tensors, rules, layout, rank, kind)) if kind in present else set()

    def had(kind: str) -> set[int]:
        return set() if source[1] is None else held(source[0], source[1], kind)

    weight, master = held(*target, "weight"), held(*target, "master")
    if weight_bytes == 4:
        total = 4 * len((weight | master) - had("weight") - had("master"))
    else:
        total = 2 * len(weight - had("weight") - master) + 4 * len(master - had("master"))
    for kind, size in (("exp_avg", 4), ("exp_avg_sq", 4), ("stale_grad", weight_bytes)):
        total += size * len(held(*target, kind) - had(kind))
    return total
