"""Where every element lies on a rank, written down by numpy's splitting: another way than that of `space`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ds_dynatrain.space import (
    Cut,
    Dealt,
    DimCut,
    Layout,
    LogicalTensor,
    Partitioner,
    Pick,
    Pieces,
    VirtualParameterSpace,
    ZeroRules,
)

Ints = npt.NDArray[np.int64]
Address = tuple[str, int, int]
Buffers = dict[tuple[str, int], Ints]
"""Coordinates, element by element, of the buffers of one kind on a rank, by (place, index). Nobody writes into them."""
PADDING = -1


def buffers_under(vps: VirtualParameterSpace, layout: Layout, rank: int, kind: str) -> Buffers:
    """`buffers` under any layout: the tensors are cut by numpy's own splitting, coordinates in hand."""
    held = vps.kind(kind)
    return _of_groups(
        _under(vps.tensors, vps.rules, vps.partitioner, layout, rank, kind, held.whole_tensors),
        np.repeat([tensor.group for tensor in vps.tensors], [tensor.numel for tensor in vps.tensors]),
        held.groups,
    )


def _of_groups(found: Buffers, group_of: Ints, groups: frozenset[int] | None) -> Buffers:
    """Less the tensors of optimizer groups that do not have the kind."""
    if groups is None:
        return found
    wanted = np.append(np.isin(group_of, sorted(groups)), False)  # the last one stands for PADDING
    return _tidy({name: np.where(wanted[line], line, PADDING) for name, line in found.items()})


@lru_cache(maxsize=4096)
def _under(
    tensors: tuple[LogicalTensor, ...],
    rules: ZeroRules,
    partitioner: Partitioner | None,
    layout: Layout,
    rank: int,
    kind: str,
    whole: bool,
) -> Buffers:
    if partitioner is None:
        return buffers(tensors, rules, layout, rank, kind, whole)
    at = layout.coordinate(rank)
    index, width = at["data"] * layout.sequence + at["sequence"], layout.data * layout.sequence
    neighbour, size = index * layout.tensor + at["tensor"], width * layout.tensor // layout.expert
    local, coordinates, base = [], [], 0
    for tensor, cuts in zip(tensors, partitioner(layout), strict=True):
        held = np.arange(base, base + tensor.numel).reshape(tensor.shape)
        base += tensor.numel
        for cut, place in ((cuts.expert, neighbour % layout.expert), (cuts.tensor, at["tensor"])):
            held = held if cut is None else _split(held, cut, place)
        held = held if at["pipe"] in cuts.stages else np.empty(0, np.int64)
        local.append(LogicalTensor(tensor.name, held.shape, tensor.group))
        coordinates.append(held.reshape(-1))
    line = np.append(np.concatenate(coordinates), PADDING)
    expert = np.repeat([tensor.expert for tensor in tensors], [tensor.numel for tensor in local])
    found: Buffers = {}
    for experts, ranks, place in ((False, width, index), (True, size, neighbour // layout.expert)):
        plain = Layout(data=ranks, zero_stage=layout.zero_stage)
        mine = np.append(np.where(expert == experts, line[:-1], PADDING), PADDING)
        parts = _tidy(
            {name: mine[part] for name, part in buffers(tuple(local), rules, plain, place, kind, whole).items()}
        )
        assert not found.keys() & parts.keys(), "experts and others in one buffer: no optimizer group has both"
        found |= parts
    return found


def _split(held: Ints, cut: Cut, place: int) -> Ints:
    """One rank's share of an array, block by block."""
    if isinstance(cut, Pick):
        return held if place in cut.holders else np.empty(0, np.int64)
    if isinstance(cut, Dealt):
        return held[list(cut.rows[place])]
    assert isinstance(cut, DimCut)
    blocks = np.split(held, np.cumsum([sum(block) for block in cut.blocks])[:-1], axis=cut.dim)
    shares = [
        np.split(block, np.cumsum(sizes)[:-1], axis=cut.dim)[place]
        for block, sizes in zip(blocks, cut.blocks, strict=True)
    ]
    return np.concatenate(shares, axis=cut.dim)


def buffers(
    tensors: Sequence[LogicalTensor], rules: ZeroRules, layout: Layout, rank: int, kind: str, whole: bool = False
) -> Buffers:
    """The buffers of a kind on a rank by (place, index), up to their last element: coordinates, and PADDING between.

    whole: the kind is one that stages 1 and 2 keep of whole tensors.
    """
    if kind == "stale_grad" and layout.zero_stage < 3:
        return {}
    ends = np.cumsum([0, *(tensor.numel for tensor in tensors)]).tolist()
    lines = [np.arange(low, high) for low, high in itertools.pairwise(ends)]
    numbers = [number for number, tensor in enumerate(tensors) if tensor.trainable or kind == "weight"]
    if layout.zero_stage == 0:
        return _tidy({("tensor", number): lines[number] for number in numbers})
    if layout.zero_stage == 3:
        return _tidy(_parted(tensors, lines, rules, layout.data, rank, numbers))
    found = _flat(tensors, lines, rules, layout, rank, kind)
    return _tidy(widened(lines, found) if whole else found)


def addresses(
    tensors: Sequence[LogicalTensor], rules: ZeroRules, layout: Layout, rank: int, kind: str
) -> dict[int, Address]:
    """Where each coordinate lies on a rank, as (place, index, offset)."""
    return addresses_in(buffers(tensors, rules, layout, rank, kind))


def addresses_in(found: Buffers) -> dict[int, Address]:
    """The same of given buffers; a coordinate that lies twice on a rank has no place in such a dictionary."""
    lying = [(at, (*name, offset)) for name, line in found.items() for offset, at in enumerate(line.tolist())]
    held = [each for each in lying if each[0] != PADDING]
    assert len(dict(held)) == len(held)
    return dict(held)


def laid_out(pieces: Pieces) -> Buffers:
    """What pieces say, as `buffers` has it."""
    ends: dict[tuple[str, int], int] = {}
    for piece in pieces:
        ends[piece.buffer] = max(ends.get(piece.buffer, 0), piece.offset + piece.stop - piece.start)
    found = {tuple(name): np.full(end, PADDING) for name, end in ends.items()}
    for piece in pieces:
        part = found[piece.buffer][piece.offset : piece.offset + piece.stop - piece.start]
        assert (part == PADDING).all(), f"{piece} lies on another one"
        part[:] = np.arange(piece.start, piece.stop)
    return found


def equal(found: Buffers, expected: Buffers) -> bool:
    """Whether the same elements lie at the same places."""
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def _tidy(found: Buffers) -> Buffers:
    """Buffers that have an element, without padding behind the last one."""
    last = {name: np.flatnonzero(line != PADDING)[-1:] for name, line in found.items()}
    return {name: line[: int(last[name][0]) + 1] for name, line in found.items() if len(last[name])}


def _flat(
    tensors: Sequence[LogicalTensor], lines: list[Ints], rules: ZeroRules, layout: Layout, rank: int, kind: str
) -> Buffers:
    data, stage = layout.data, layout.zero_stage
    found: Buffers = {}
    for group in sorted({tensor.group for tensor in tensors if tensor.trainable}):
        line = flat_line(
            [lines[number] for number, tensor in enumerate(tensors) if tensor.group == group],
            data if stage in rules.round_robin_stages else 1,
            rules.weight_alignment if stage in rules.aligned_stages else 1,
        )
        line = padded(line, rules.alignment_factor * data)
        part = len(line) // data
        found["group", group] = line if kind == "weight" else line[rank * part : (rank + 1) * part]
    if kind == "weight":
        found |= {("tensor", n): lines[n] for n, tensor in enumerate(tensors) if not tensor.trainable}
    return found


def widened(lines: list[Ints], part: Buffers) -> Buffers:
    """Every tensor of which a rank has an element, whole: one after another as they lie in its flat groups."""
    number_of = np.repeat(np.arange(len(lines)), [len(line) for line in lines])
    found: Buffers = {}
    for name, line in part.items():
        numbers = dict.fromkeys(number_of[line[line != PADDING]].tolist())
        found[name] = np.concatenate([np.empty(0, np.int64), *(lines[number] for number in numbers)])
    return found


def flat_line(tensors: list[Ints], deals: int, alignment: int) -> Ints:
    """A flat group, element by element, with PADDING between tensors.

    As DeepSpeed 0.19.8 writes it (`is_optimized_parameter`, `_round_robin_reorder`, `param_padding`): tensors of no
    element are dropped, tensor i goes into pile i % deals, and each but the last is padded.
    """
    piles: dict[int, list[Ints]] = {}
    for i, tensor in enumerate(tensor for tensor in tensors if len(tensor)):
        piles.setdefault(i % deals, []).append(tensor)
    line = np.empty(0, np.int64)
    for tensor in itertools.chain(*piles.values()):
        line = np.concatenate([padded(line, alignment), tensor])
    return line


def padded(line: Ints, multiple: int) -> Ints:
    """A line with PADDING at its end, up to a multiple of some number."""
    return np.append(line, np.full(-len(line) % multiple, PADDING))


def _parted(
    tensors: Sequence[LogicalTensor], lines: list[Ints], rules: ZeroRules, data: int, rank: int, numbers: list[int]
) -> Buffers:
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

    def mine(n: int) -> Ints:
        return np.append(lines[n], np.full(part[n] * data - len(lines[n]), PADDING)).reshape(data, -1)[rank]

    found: Buffers = {("subgroup", i): np.concatenate([mine(n) for n in members]) for i, members in enumerate(groups)}
    return found | {("partition", n): mine(n) for n in numbers if not tensors[n].trainable}
