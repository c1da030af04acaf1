"""A small model's whole state with known values, and the buffers that a rank of any layout holds of it."""

from __future__ import annotations

import itertools

import torch

from ds_dynatrain.space import (
    FROZEN,
    MASTER,
    WEIGHT,
    AxisCuts,
    BufferId,
    Kind,
    Layout,
    LogicalTensor,
    Partition,
    VirtualParameterSpace,
    ZeroRules,
    standard_kinds,
    uneven,
)
from ds_dynatrain.transfer import Buffers

PAD = 3
SENTINEL = -12345.0
SHAPES = ((97, 131), (131,), (7,), (300, 211), (1,), (64, 64), (6, 5000), (5, 3))


def space(layout: Layout, members: tuple[int, ...], weight: int = 2) -> VirtualParameterSpace:
    """Eight tensors in two groups, one of them frozen; the tensor axis cuts matrices along their columns."""
    last = len(SHAPES) - 1
    tensors = [
        LogicalTensor(f"t{number}", shape, FROZEN if number == last else int(number > 3))
        for number, shape in enumerate(SHAPES)
    ]
    rules = ZeroRules(sub_group_size=20_000)
    return VirtualParameterSpace.of(tensors, rules, standard_kinds(weight), layout, members, columns)


def columns(layout: Layout) -> Partition:
    """Columns as evenly as possible; vectors and what is too narrow whole."""
    found = list[AxisCuts]()
    for shape in SHAPES:
        ends = [shape[-1] * part // layout.tensor for part in range(layout.tensor + 1)]
        is_cut = len(shape) == 2 and shape[1] >= layout.tensor
        cut = uneven(1, [high - low for low, high in itertools.pairwise(ends)])
        found.append(AxisCuts(tensor=cut if is_cut else None))
    return tuple(found)


def dtype_of(kind: Kind) -> torch.dtype:
    return torch.float32 if kind.itemsize == 4 else torch.bfloat16


def logical_state(vps: VirtualParameterSpace) -> dict[str, torch.Tensor]:
    """Every kind over the whole line; weights are cast from masters."""
    generator = torch.Generator().manual_seed(1)
    numel = int(vps.bases[-1])
    state = {kind.name: torch.randn(numel, generator=generator) for kind in vps.kinds}
    state[WEIGHT] = state[MASTER].to(dtype_of(vps.kind(WEIGHT)))
    return state


def buffers_of(vps: VirtualParameterSpace, layout: Layout, rank: int, state: dict[str, torch.Tensor] | None) -> Buffers:
    """The buffers of a rank, each a little longer than needed: filled from `state`, or with the sentinel all over."""
    buffers: dict[tuple[str, BufferId], torch.Tensor] = {}
    for kind in vps.kinds:
        pieces = vps.holding(layout, rank, kind.name)
        ends: dict[BufferId, int] = {}
        for piece in pieces:
            ends[piece.buffer] = max(ends.get(piece.buffer, 0), piece.offset + piece.stop - piece.start)
        for name, end in ends.items():
            buffers[kind.name, name] = torch.full((end + PAD,), SENTINEL, dtype=dtype_of(kind))
        if state is None:
            continue
        for piece in pieces:
            into = buffers[kind.name, piece.buffer]
            into[piece.offset : piece.offset + piece.stop - piece.start] = state[kind.name][piece.start : piece.stop]
    return buffers


def differences(
    vps: VirtualParameterSpace, layout: Layout, rank: int, state: dict[str, torch.Tensor], buffers: Buffers
) -> list[str]:
    """Where the buffers of a rank differ, bit by bit, from what they should hold; padding included."""
    expected = buffers_of(vps, layout, rank, state)
    wrong = [str(key) for key in expected if key not in buffers]
    for key, values in expected.items():
        if not torch.equal(values.view(torch.uint8), buffers[key].view(torch.uint8)):
            wrong.append(f"rank {rank}: {key}")
    return wrong
