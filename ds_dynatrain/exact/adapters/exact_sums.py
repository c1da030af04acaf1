"""Gradient sums and norms for the ZeRO optimizer of an exact job, which do not depend on the number of ranks.

DeepSpeed adds gradients in an order that depends on the layout: first those of each rank's micro-batches, then those of
the ranks. Here each micro-step sends every slice of every leaf's gradient to the slice's owner, in an all-to-all, and
the owner adds leaves in the order of their numbers (`exact.bits.sums`). A leaf is a micro-batch of fixed size. All ZeRO
stages do this, with bitwise identical results: stages 2 and 3 as soon as gradients arrive, stage 1 at the end of a
backward pass, because it holds whole gradients anyway.

Gradients are sent in the dtype of the weights, and added in fp32. With fp16 they are gradients of the scaled loss. A
sum that is not finite makes the norm infinite; only the norm makes DeepSpeed skip a step, in all stages alike.

Gradients are sent in chunks (`lines`), by the same plan on every rank. A parameter without a gradient is sent as zeros,
so ranks need not use the same parameters (except in stage 3, whose layers are gathered on all ranks at once).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime import utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_dynatrain.exact.adapters.lines import Chunk, Lines
from ds_dynatrain.exact.bits.rows import usage
from ds_dynatrain.exact.bits.squares import Grid, largest, square_sums
from ds_dynatrain.exact.bits.sums import level_of, rest_of
from ds_dynatrain.space.leaves import MicroStep


class LeafSums:
    """The gradient sums of one ZeRO optimizer, added leaf by leaf. A leaf is a micro-batch of fixed size.

    The optimizer then uses these sums, and a gradient norm that also does not depend on the number of ranks.

    lines: the positions of the optimizer's gradients.
    now: function that returns the latest micro-step; None if there was none.
    """

    def __init__(self, zero: Any, lines: Lines, now: Callable[[], MicroStep | None]) -> None:
        self._zero, self._lines, self._now = zero, lines, now
        self._needs = [{id(piece.parameter) for piece in chunk.pieces} for chunk in lines.chunks]
        """The ids of the parameters in each chunk."""
        self._known = set[int]().union(*self._needs)
        self._levels: dict[int, list[torch.Tensor]] = {}
        self._send = self._receive = torch.empty(0)
        self.forget()
        zero.has_overflow = lambda partition_gradients=True: False  # an infinite norm skips the step instead
        zero.overlapping_partition_gradients_reduce_epilogue = self.finish
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            zero.reduce_ready_partitions_and_remove_grads = self.arrive
            zero._get_norm_groups = lambda: [global_norm(zero, lines)]
        else:
            zero.check_grad_overflow = True  # otherwise an infinite norm would skip no step in bf16
            zero.use_grad_accum_attribute = False  # gradients are taken from where autograd leaves them
            zero.process_gradients = lambda parameter, group: self.arrive(parameter)
            zero.scaled_global_norm = lambda norm_type=2: utils.combine_grad_norm_groups([global_norm(zero, lines)])

    def forget(self) -> None:
        """Discard the sums of a global batch whose optimizer step has not been taken, if there is one."""
        self._done = 0
        self._begin()

    def _begin(self) -> None:
        self._next = 0
        self._came: set[int] = set()

    def arrive(self, parameter: nn.Parameter) -> None:
        """Record that a parameter's gradient is complete in this backward pass, and send the chunks that are now
        complete.

        Does nothing in ZeRO stage 1, where all chunks are sent at the end.
        """
        if not self._lines.is_eager or id(parameter) not in self._known:
            return
        if id(parameter) in self._came:
            raise usage("exact: a gradient in several parts").error()
        self._came.add(id(parameter))
        while self._next < len(self._needs) and self._needs[self._next] <= self._came:
            self._send_next()

    def finish(self) -> None:
        """End a backward pass. After the last pass of a global batch, also give the sums to DeepSpeed."""
        self.end_leaf()
        if self._zero.is_gradient_accumulation_boundary():
            self.close()

    def end_leaf(self) -> None:
        """End the backward pass of a micro-step by sending the chunks that remain."""
        step = self._present()
        if step.number != self._done:
            raise usage("exact: a micro-batch that is no leaf").error(
                f"micro-step {step.number} of a global batch after {self._done} that were trained"
            )
        while self._next < len(self._needs):
            self._send_next()
        self._begin()
        self._done += 1

    @torch.no_grad()
    def close(self) -> None:
        """End a global batch, and give DeepSpeed the sums over all leaves, even if this rank has trained none of the
        samples.

        A zero in a sum is never negative.
        """
        self._done = 0
        newest, *older = rest_of(self._present().leaves)
        for line in range(len(self._lines.lengths)):
            levels = self._sums_of(line)
            total = levels[newest]
            for level in older:
                total = torch.add(levels[level], total, out=levels[level])
            self._lines.take(line, total.add_(0.0))

    def _present(self) -> MicroStep:
        step = self._now()
        if step is None:
            raise usage("exact: a micro-batch that is no leaf").error("a backward pass without a loader's micro-batch")
        return step

    @torch.no_grad()
    def _send_next(self) -> None:
        chunk, own = self._lines.chunks[self._next], self._present().own()
        self._next += 1
        if own:
            for row, leaf in zip(self._rows(chunk), own, strict=False):
                self._push(chunk, row, leaf)
        for parameter in chunk.freed:
            parameter.grad = None

    def _rows(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """Exchange a chunk. Return an iterator over each rank's gradients for this rank's part of the chunk."""
        send, size = self._filled(chunk), len(chunk.splits)
        if size == 1:
            return iter([send])
        group = self._lines.group(chunk.line)
        mine = chunk.splits[dist.get_rank(group=group)]
        receive = self._receive[: mine * size]
        dist.all_to_all_single(receive, send, [mine] * size, list(chunk.splits), group=group)
        return iter(receive.view(size, mine))

    def _filled(self, chunk: Chunk) -> torch.Tensor:
        """Fill the send buffer with this rank's gradients of a chunk, in the weights' dtype, and return the buffer."""
        if not len(self._send):
            chunks = self._lines.chunks
            (dtype,) = {piece.parameter.dtype for each in chunks for piece in each.pieces}
            self._send = torch.empty(max(each.numel for each in chunks), dtype=dtype, device="cpu")
            into = max(max(each.splits) * len(each.splits) for each in chunks)
            self._receive = torch.empty(into, dtype=dtype, device="cpu")
        send = self._send[: chunk.numel]
        if sum(piece.numel for piece in chunk.pieces) < chunk.numel:
            send.zero_()  # for the gaps between pieces
        for piece in chunk.pieces:
            part, gradient = send[piece.at : piece.at + piece.numel], piece.parameter.grad
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.reshape(-1)[piece.start : piece.start + piece.numel])
        return send

    def _push(self, chunk: Chunk, row: torch.Tensor, leaf: int) -> None:
        levels, level = self._sums_of(chunk.line), level_of(leaf)
        place = slice(chunk.begin, chunk.begin + row.numel())
        for lower in range(level):
            row = torch.add(levels[lower][place], row, out=levels[level][place])
        if not level:
            levels[0][place].copy_(row)

    def _sums_of(self, line: int) -> list[torch.Tensor]:
        """Return the partial sums of a line (gradients that are reduced together), one for each level of
        `exact.bits.sums`.

        Those that do not exist yet are allocated.
        """
        held = self._levels.setdefault(line, [])
        while len(held) < self._present().leaves.bit_length():
            held.append(torch.zeros(self._lines.lengths[line], dtype=torch.float32, device="cpu"))
        return held


def global_norm(zero: Any, lines: Lines) -> torch.Tensor:
    """Return the norm of all gradients as a 0-D fp32 tensor; inf if a gradient is not finite.

    The norm does not depend on which rank holds what. Padding is left out: its size depends on the layout, and would
    change the grid to which squares are rounded.
    """
    parts = [part.numpy() for part in lines.held()]
    most = torch.tensor([max(map(largest, parts), default=0.0)], dtype=torch.float64)
    for group in lines.sharing:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if not 0 < float(most) < math.inf:
        return most[0].to(torch.float32)
    grid = Grid.of(float(most), lines.numel)
    sums = torch.tensor([square_sums(part, grid) for part in parts] or [(0, 0)], dtype=torch.int64).sum(0)
    for group in lines.sharing:
        dist.all_reduce(sums, group=group)
    return torch.tensor(math.sqrt(grid.total(*sums.tolist())), dtype=torch.float32)
