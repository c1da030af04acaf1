"""The Triton kernel of `device_digest`. This module is imported only if Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_dynatrain.transfer.weighing import BLOCK_BYTES, FACTOR_SEED, SLICES, WORD_BYTES

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64, see `weighing`."""
WARPS, UNROLL = 4, 8
"""Launch settings with which the kernel reads as fast as torch's own sum on an H100."""


def launch(runs: torch.Tensor, programs: torch.Tensor, width: int, weights: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the digest of each byte range to the entry of its tensor in `sums`.

    All tensors are int64 and on one device.

    runs, programs: the fields of `DeviceRuns` and `Programs`, one per row.
    width: the number of bytes (4, 2 or 1) that a program reads at once.
    """
    with torch.cuda.device(sums.device):
        _weigh[(programs.shape[1],)](
            runs,
            programs,
            weights,
            sums,
            runs.shape[1],
            programs.shape[1],
            WIDTH=width,
            WORD=WORD_BYTES,
            BLOCK=BLOCK_BYTES,
            SLICE=BLOCK_BYTES // SLICES,
            SEED=_signed(FACTOR_SEED),
            GAMMA=_signed(GAMMA),
            FIRST=_signed(FIRST),
            SECOND=_signed(SECOND),
            UNROLL=UNROLL,
            num_warps=WARPS,
        )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@triton.jit
def _shifted(value, by):  # type: ignore[no-untyped-def]
    """Shift an int64 logically to the right."""
    return (value >> by) & ((1 << (64 - by)) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    runs,
    programs,
    weights,
    sums,
    number_of_runs,
    number_of_programs,
    WIDTH: tl.constexpr,  # noqa: N803  # constants are written so
    WORD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    SLICE: tl.constexpr,  # noqa: N803
    SEED: tl.constexpr,  # noqa: N803
    GAMMA: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    SECOND: tl.constexpr,  # noqa: N803
    UNROLL: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(programs + program)
    part = tl.load(programs + number_of_programs + program)
    first = tl.load(programs + 2 * number_of_programs + program)
    number = tl.load(programs + 3 * number_of_programs + program)
    address = tl.load(runs + run)
    begin = tl.load(runs + number_of_runs + run)
    end = begin + tl.load(runs + 2 * number_of_runs + run)
    tensor = tl.load(runs + 3 * number_of_runs + run)
    byte = part * SLICE + WIDTH * tl.arange(0, SLICE // WIDTH).to(tl.int64)
    found = tl.zeros((SLICE // WIDTH,), dtype=tl.int64)
    for block in tl.range(first, first + number, loop_unroll_factor=UNROLL):
        at = block * BLOCK + byte
        inside = (at >= begin) & (at < end)
        here = address + at - begin
        if WIDTH == 4:
            value = tl.load(here.to(tl.pointer_type(tl.uint32)), mask=inside, other=0).to(tl.int64)
        elif WIDTH == 2:
            value = tl.load(here.to(tl.pointer_type(tl.uint16)), mask=inside, other=0).to(tl.int64)
        else:
            value = tl.load(here.to(tl.pointer_type(tl.uint8)), mask=inside, other=0).to(tl.int64)
        mixed = (block.to(tl.int64) + 1) * GAMMA + SEED
        mixed = (mixed ^ _shifted(mixed, 30)) * FIRST
        mixed = (mixed ^ _shifted(mixed, 27)) * SECOND
        found += value * ((mixed ^ _shifted(mixed, 31)) | 1)
    weight = tl.load(weights + byte // WORD) << (8 * (byte % WORD))
    tl.atomic_add(sums + tensor, tl.sum(found * weight, axis=0))
