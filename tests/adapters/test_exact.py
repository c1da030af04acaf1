"""Sums of leaves over any number of owners, in threads that are ranks: the tree of leaves, in all stages."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as td
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.exact.adapters import exact_sums as sums_file
from ds_dynatrain.exact.adapters import lines as lines_file
from ds_dynatrain.exact.adapters.exact_sums import LeafSums
from ds_dynatrain.exact.adapters.lines import lines_of
from ds_dynatrain.space.leaves import MicroStep


class Net:
    """DeepSpeed's collectives between threads."""

    ReduceOp = td.ReduceOp

    def __init__(self, size: int) -> None:
        self.size, self.place = size, threading.local()
        self._barrier, self._sent = threading.Barrier(size, timeout=20), [Any] * size

    def get_world_size(self, group: Any = None) -> int:
        return self.size

    def get_rank(self, group: Any = None) -> int:
        return int(self.place.rank)

    def _exchange(self, sent: Any) -> list[Any]:
        self._sent[self.get_rank()] = sent
        self._barrier.wait()
        found = list(self._sent)
        self._barrier.wait()
        return found

    def all_to_all_single(
        self, into: torch.Tensor, out: torch.Tensor, sizes: list[int], splits: list[int], group: Any = None
    ) -> None:
        assert out.numel() == sum(splits) and into.numel() == sum(sizes)
        rows = self._exchange([part.clone() for part in out.split(splits)])
        into.copy_(torch.cat([row[self.get_rank()] for row in rows]))

    def all_reduce(self, held: torch.Tensor, op: Any = td.ReduceOp.SUM, group: Any = None) -> None:
        rows = torch.stack(self._exchange(held.clone()))
        held.copy_(rows.amax(0) if op == td.ReduceOp.MAX else rows.sum(0))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """On every rank."""

        def there(rank: int) -> Any:
            self.place.rank = rank
            return work(rank)

        with patch.object(sums_file, "dist", self), patch.object(lines_file, "dist", self):
            with ThreadPoolExecutor(self.size) as pool:
                return list(pool.map(there, range(self.size)))


class Flat(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """As much of stages 1 and 2 as the sums look at."""

    def __init__(self, groups: list[list[nn.Parameter]], ranks: int, stage: int, bucket: int, gap: int) -> None:
        self.partition_gradients, self.reduce_bucket_size = stage == 2, bucket
        self.round_robin_bit16_groups, self.round_robin_bit16_offsets = groups, []
        self.partition_size, self.averaged_gradients = [], {}
        for parameters in groups:
            at, offsets = 0, []
            for parameter in parameters:
                offsets.append(at)
                at += parameter.numel() + gap
            self.round_robin_bit16_offsets.append(offsets)
            self.partition_size.append(math.ceil(at / (2 * ranks)) * 2)
        self.real_dp_process_group = [None] * len(groups)
        self.dp_process_group, self.is_last = None, False

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.is_last

    def whole(self, totals: list[dict[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
        """Every parameter's gradient, of what all ranks have."""
        found = []
        for number, parameters in enumerate(self.round_robin_bit16_groups):
            line = torch.cat([total[number][0] for total in totals])
            offsets = self.round_robin_bit16_offsets[number]
            found += [line[at : at + held.numel()] for held, at in zip(parameters, offsets, strict=True)]
        return found


class Cut(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """As much of stage 3."""

    def __init__(self, groups: list[list[nn.Parameter]], ranks: int, bucket: int) -> None:
        self.fp16_groups, self.reduce_bucket_size, self.averaged_gradients = groups, bucket, {}
        for held in (held for parameters in groups for held in parameters):
            part = math.ceil(held.numel() / ranks)
            held.partition_numel, held.ds_numel = (lambda part=part: part), held.numel()
        size = sum(held.partition_numel() for parameters in groups for held in parameters)
        self.grad_partitions_flat_buffer = torch.full((size,), 7.0)
        self.dp_process_group, self.is_last = None, False

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.is_last

    def whole(self, totals: list[dict[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
        found = []
        for number, parameters in enumerate(self.fp16_groups):
            for place, held in enumerate(parameters):
                found.append(torch.cat([total[number][place] for total in totals])[: held.numel()])
        return found


Leaves = list[list[torch.Tensor | None]]
"""By leaf, then by parameter."""


def tree(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The definition."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:half]) + tree(leaves[half:])


def trained(sizes: list[list[int]], leaves: Leaves, data: int, stage: int, bucket: int, gap: int = 0) -> Any:
    """(gradients, bytes of the norm) of a global batch that `data` ranks train."""
    net, steps = Net(data), math.ceil(len(leaves) / data)
    zeros: list[Any] = [None] * data

    def rank(number: int) -> Any:
        dtype = next((held.dtype for leaf in leaves for held in leaf if held is not None), torch.float32)
        groups = [[nn.Parameter(torch.zeros(size, dtype=dtype)) for size in group] for group in sizes]
        flat = [held for group in groups for held in group]
        zero: Any = Cut(groups, data, bucket) if stage == 3 else Flat(groups, data, stage, bucket, gap)
        zeros[number] = zero
        now: list[MicroStep] = []
        sums = LeafSums(zero, lines_of(zero, {id(held): place for place, held in enumerate(flat)}), lambda: now[-1])
        for batch in range(2):  # buffers are used again
            for step in range(steps):
                now.append(MicroStep(step, data, len(leaves)))
                zero.is_last = step == steps - 1
                leaf = step * data + number
                for held, gradient in reversed(list(zip(flat, leaves[leaf if leaf < len(leaves) else 0], strict=True))):
                    if gradient is not None:
                        held.grad = gradient.clone() if batch else torch.ones_like(gradient)
                        sums.arrive(held)
                zero.overlapping_partition_gradients_reduce_epilogue()
                assert all(held.grad is None for held in flat)
        lines = lines_of(zero, {})
        norm = sums_file.global_norm(zero, lines)
        return {key: [part.clone() for part in parts] for key, parts in zero.averaged_gradients.items()}, norm

    found = net.run(rank)
    assert len({float(norm) for _, norm in found}) == 1
    return zeros[0].whole([totals for totals, _ in found]), float(found[0][1])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], Leaves]:
    sizes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
    count = draw(st.integers(1, 9))
    stream = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))

    def leaf() -> list[torch.Tensor | None]:
        flat = [size for group in sizes for size in group]
        return [
            None
            if draw(st.integers(0, 9)) == 0
            else (torch.randn(size, generator=stream) * 10.0 ** (size % 3)).to(dtype)
            for size in flat
        ]

    return sizes, [leaf() for _ in range(count)]


@settings(deadline=None, max_examples=60)
@given(
    batch=batches(), data=st.integers(1, 5), stage=st.integers(1, 3), bucket=st.integers(1, 30), gap=st.integers(0, 3)
)
def test_any_world_and_stage_has_the_tree(
    batch: tuple[list[list[int]], Leaves], data: int, stage: int, bucket: int, gap: int
) -> None:
    sizes, leaves = batch
    data = min(data, len(leaves))
    flat = [size for group in sizes for size in group]
    filled = [
        [torch.zeros(size) if got is None else got.float() for size, got in zip(flat, row, strict=True)]
        for row in leaves
    ]
    wanted = [tree([row[place] for row in filled]) + 0.0 for place in range(len(flat))]
    with patch.object(lines_file, "LEAST_CHUNK", 1):
        found, norm = trained(sizes, leaves, data, stage, bucket, gap)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()
    assert norm == trained(sizes, leaves, 1, 1, 1000)[1]


def test_no_zero_is_negative() -> None:
    (found,), _ = trained([[3]], [[torch.tensor([-0.0, 0.0, -0.0])] for _ in range(3)], 2, 2, 9)
    assert not torch.signbit(found).any()


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_not_finite_is_told(wrong: float, stage: int) -> None:
    leaves: Leaves = [[torch.tensor([1.0, 2.0])], [torch.tensor([wrong, 1.0])], [torch.ones(2)]]
    assert trained([[2]], leaves, 2, stage, 9)[1] == math.inf


def test_memory_is_that_of_the_parts() -> None:
    """log2(leaves) + 1 partial sums, and as much again to send and to receive as a rank owns."""
    net, leaves, size = Net(4), 8, 4096

    def rank(number: int) -> None:
        parameter = nn.Parameter(torch.zeros(size))
        zero = Flat([[parameter]], 4, 2, size, 0)
        sums = LeafSums(zero, lines_of(zero, {id(parameter): 0}), lambda: now[-1])
        now: list[MicroStep] = []
        for step in range(2):
            now.append(MicroStep(step, 4, leaves))
            zero.is_last = step == 1
            parameter.grad = torch.ones(size)
            sums.finish()
        held = [level for levels in sums._levels.values() for level in levels]
        assert len(held) == 4 and {level.numel() for level in held} == {size // 4}
        assert sums._receive.numel() <= size // 4 and sums._send.numel() <= size // 4

    with patch.object(lines_file, "LEAST_CHUNK", 1):
        net.run(rank)


def test_what_is_no_leaf_is_refused() -> None:
    def rank(number: int) -> None:
        parameter = nn.Parameter(torch.zeros(3))
        zero = Flat([[parameter]], 1, 2, 9, 0)
        now: list[MicroStep | None] = [None]
        sums = LeafSums(zero, lines_of(zero, {id(parameter): 0}), lambda: now[-1])
        with pytest.raises(UnsupportedError, match="a backward pass without a loader's micro-batch"):
            sums.finish()
        now.append(MicroStep(0, 1, 2))
        sums.finish()
        with pytest.raises(UnsupportedError, match="micro-step 0 of a global batch after 1"):
            sums.finish()
        sums.forget()
        parameter.grad = torch.ones(3)
        sums.arrive(parameter)
        with pytest.raises(UnsupportedError, match="got a second gradient"):
            sums.arrive(parameter)

    Net(1).run(rank)
