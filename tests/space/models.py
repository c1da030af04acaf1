"""Small models and worlds for tests, and ZeRO's layout written down element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ds_dynatrain.space import (
    FROZEN,
    Cut,
    DimCut,
    Layout,
    LogicalTensor,
    Pick,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
)

Address = tuple[str, int, int]


def fused(dim: int, sizes: Sequence[int], count: int) -> DimCut:
    """Blocks along a dim, each cut evenly: gate-and-up; query, key and value."""
    return DimCut(dim, tuple((size // count,) * count for size in sizes))


def even(dim: int, size: int, count: int) -> DimCut:
    """A dim cut evenly."""
    return fused(dim, [size], count)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[LogicalTensor]:
    """Two groups and frozen tensors of odd sizes, some empty; perhaps no tensor at all."""
    counts = (draw(st.integers(0, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 2)))
    found: list[LogicalTensor] = []
    for group, count in zip((0, 1, FROZEN), counts, strict=True):
        for _ in range(count):
            shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
            found.append(LogicalTensor(f"t{len(found)}", shape, group))
    return found


zero_rules = st.builds(
    ZeroRules,
    sub_group_size=st.integers(1, 20),
    round_robin_stages=st.sets(st.sampled_from([1, 2])).map(frozenset),
    aligned_stages=st.sets(st.sampled_from([1, 2])).map(frozenset),
    weight_alignment=st.sampled_from([1, 4, 8]),
)
layouts = st.builds(Layout, zero_stage=st.integers(0, 3), data=st.integers(1, 4))
weight_sizes = st.sampled_from([4, 2])


def space(
    tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout, members: tuple[int, ...], weight: int = 2
) -> VirtualParameterSpace:
    return VirtualParameterSpace(tensors, rules, standard_kinds(weight, stale_grad=weight), layout, members)


def addresses_under(vps: VirtualParameterSpace, layout: Layout, rank: int, kind: str) -> dict[int, Address]:
    """`addresses` under any layout: the tensors are cut by numpy's own splitting, element numbers in hand."""
    if vps.partitioner is None:
        return addresses(list(vps.tensors), vps.rules, layout, rank, kind, vps.kind(kind).whole_tensors)
    at = layout.coordinate(rank)
    index, width = at["data"] * layout.sequence + at["sequence"], layout.data * layout.sequence
    neighbour, size = index * layout.tensor + at["tensor"], width * layout.tensor // layout.expert
    local, numbers = [], []
    for tensor, base, cuts in zip(vps.tensors, vps.bases[:-1].tolist(), vps.partitioner(layout), strict=True):
        held = np.arange(tensor.numel).reshape(tensor.shape) + base
        for cut, place in ((cuts.expert, neighbour % layout.expert), (cuts.tensor, at["tensor"])):
            held = held if cut is None else _split(held, cut, place)
        held = held if at["pipe"] in cuts.stages else np.empty(0, np.int64)
        local.append(LogicalTensor(tensor.name, held.shape, tensor.group))
        numbers += held.reshape(-1).tolist()
    main: dict[int, Address] = {}
    for experts, ranks, place in ((False, width, index), (True, size, neighbour // layout.expert)):
        plain, whole = Layout(data=ranks, zero_stage=layout.zero_stage), vps.kind(kind).whole_tensors
        part = addresses(local, vps.rules, plain, place, kind, whole)
        chosen = {step for step, flag in enumerate(_flags(vps, local)) if flag == experts}
        main |= {numbers[step]: where for step, where in part.items() if step in chosen}
    return main


def _flags(vps: VirtualParameterSpace, local: list[LogicalTensor]) -> list[bool]:
    """For each local element, whether it is an expert's."""
    return [tensor.expert for tensor, held in zip(vps.tensors, local, strict=True) for _ in range(held.numel)]


def _split(held: npt.NDArray[np.int64], cut: Cut, place: int) -> npt.NDArray[np.int64]:
    """One rank's share of an array, block by block."""
    if isinstance(cut, Pick):
        return held if place in cut.holders else np.empty(0, np.int64)
    assert isinstance(cut, DimCut)
    blocks = np.split(held, np.cumsum([sum(block) for block in cut.blocks])[:-1], axis=cut.dim)
    shares = [
        np.split(block, np.cumsum(sizes)[:-1], axis=cut.dim)[place]
        for block, sizes in zip(blocks, cut.blocks, strict=True)
    ]
    return np.concatenate(shares, axis=cut.dim)


def addresses(
    tensors: list[LogicalTensor], rules: ZeroRules, layout: Layout, rank: int, kind: str, whole: bool = False
) -> dict[int, Address]:
    """Where each coordinate lies on a rank, as (place, index, offset).

    whole: the kind is one that stages 1 and 2 keep of whole tensors.
    """
    base = [sum(tensor.numel for tensor in tensors[:number]) for number in range(len(tensors) + 1)]
    main: dict[int, Address] = {}
    if kind == "stale_grad" and layout.zero_stage < 3:
        return main
    numbers = [number for number, tensor in enumerate(tensors) if tensor.trainable or kind == "weight"]
    if layout.zero_stage == 0:
        for number in numbers:
            main |= {base[number] + i: ("tensor", number, i) for i in range(tensors[number].numel)}
    elif layout.zero_stage < 3:
        _flat(tensors, rules, layout, rank, kind, base, main)
        main = widened(tensors, base, main) if whole else main
    else:
        _parted(tensors, rules, layout.data, rank, numbers, base, main)
    return main


def _flat(
    tensors: list[LogicalTensor],
    rules: ZeroRules,
    layout: Layout,
    rank: int,
    kind: str,
    base: list[int],
    out: dict[int, Address],
) -> None:
    data, stage = layout.data, layout.zero_stage
    for group in sorted({tensor.group for tensor in tensors if tensor.trainable}):
        line = flat_line(
            [range(base[n], base[n] + tensor.numel) for n, tensor in enumerate(tensors) if tensor.group == group],
            data if stage in rules.round_robin_stages else 1,
            rules.weight_alignment if stage in rules.aligned_stages else 1,
        )
        step = rules.alignment_factor * data
        line += [-1] * (-len(line) % step)
        part = len(line) // data
        for position, coordinate in enumerate(line):
            if coordinate >= 0 and kind == "weight":
                out[coordinate] = ("group", group, position)
            elif coordinate >= 0 and position // max(part, 1) == rank:
                out[coordinate] = ("group", group, position - rank * part)
    if kind == "weight":
        for number, tensor in enumerate(tensors):
            if not tensor.trainable:
                out |= {base[number] + i: ("tensor", number, i) for i in range(tensor.numel)}


def widened(tensors: list[LogicalTensor], base: list[int], part: dict[int, Address]) -> dict[int, Address]:
    """Every tensor of which a rank has an element, whole: one after another as they lie in its flat groups."""
    found: dict[int, Address] = {}
    ends: dict[int, int] = {}
    for coordinate, (place, group, _) in sorted(part.items(), key=lambda item: item[1]):
        number = next(n for n, tensor in enumerate(tensors) if base[n] <= coordinate < base[n] + tensor.numel)
        if base[number] not in found:
            for i in range(tensors[number].numel):
                found[base[number] + i] = (place, group, ends.get(group, 0) + i)
            ends[group] = ends.get(group, 0) + tensors[number].numel
    return found


def flat_line(tensors: list[range], deals: int, alignment: int) -> list[int]:
    """A flat group, element by element, with -1 for padding between tensors.

    As DeepSpeed 0.19.8 writes it (`is_optimized_parameter`, `_round_robin_reorder`, `param_padding`): tensors of no
    element are dropped, tensor i goes into pile i % deals, and each but the last is padded.
    """
    piles: dict[int, list[range]] = {}
    for i, tensor in enumerate(tensor for tensor in tensors if len(tensor)):
        piles.setdefault(i % deals, []).append(tensor)
    ordered = [tensor for pile in piles.values() for tensor in pile]
    line: list[int] = []
    for index, tensor in enumerate(ordered):
        line += tensor
        if index < len(ordered) - 1:
            line += [-1] * (-len(line) % alignment)
    return line


def _parted(
    tensors: list[LogicalTensor],
    rules: ZeroRules,
    data: int,
    rank: int,
    numbers: list[int],
    base: list[int],
    out: dict[int, Address],
) -> None:
    part = [math.ceil(tensor.numel / data) for tensor in tensors]
    groups: list[list[int]] = []
    for group in sorted({tensor.group for tensor in tensors if tensor.trainable}):
        members = [n for n in numbers if tensors[n].group == group]
        if sum(part[n] for n in members) <= rules.sub_group_size:
            groups += [members] if members else []
            continue
        current: list[int] = []
        for n in members:
            current.append(n)
            if sum(part[m] for m in current) >= rules.sub_group_size or n == members[-1]:
                groups.append(current)
                current = []
    for index, members in enumerate(groups):
        offset = 0
        for n in members:
            for i in range(rank * part[n], min((rank + 1) * part[n], tensors[n].numel)):
                out[base[n] + i] = ("subgroup", index, offset + i - rank * part[n])
            offset += part[n]
    for n in numbers:
        if not tensors[n].trainable:
            for i in range(rank * part[n], min((rank + 1) * part[n], tensors[n].numel)):
                out[base[n] + i] = ("partition", n, i - rank * part[n])
